"""The file of pools (TOML): read, checked as a whole, and refused with the place and the cure."""

import importlib
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from unicron.contracts.pools import Pool
from unicron.errors import InvalidInputError
from unicron.files import convert, read_toml
from unicron_provisioner.providers.protocol import Provider, Surroundings

CURE = "give the path of a TOML file of pools (docs/howto/pools.md)"

KINDS = ("local", "docker", "command", "slurm")
"""Providers: modules of `unicron_provisioner.providers`, each with its `Options`, and `make` to make one."""


class Supply(NamedTuple):
    """The source of a pool's machines.

    Attributes:
        pool: its rules.
        provider: that gives its machines.
        deadline_s: seconds after which a call to it counts as unanswered.
    """

    pool: Pool
    provider: Provider
    deadline_s: float


class _Deadline(msgspec.Struct, kw_only=True):
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 30.0


def load(path: str, nats_url: str, cluster: str = "") -> dict[str, Supply]:
    """Return the pools of a file, in its order; of no file at all, none.

    Args:
        path: of the file; empty for none.
        nats_url: where machines reach the bus.
        cluster: folder of a cluster of this machine; empty: that of the file.

    Raises:
        InvalidInputError: it can't be used; names the file, the place in it, and the cure.
    """
    if not path:
        return {}
    file = Path(path)
    plain = read_toml(file, CURE)
    folder = file.absolute().parent
    try:
        return _read(plain, Surroundings(folder, folder / cluster, nats_url))
    except InvalidInputError as error:
        raise InvalidInputError(f"{file}: {error}") from error


def _read(plain: dict[str, Any], around: Surroundings) -> dict[str, Supply]:
    if unknown := sorted(set(plain) - {"pool"}):
        raise InvalidInputError(f"{unknown[0]}: there is no such table; write [pool.NAME] for each pool")
    pools = plain.get("pool", {})
    if not isinstance(pools, dict) or not pools:
        raise InvalidInputError("there is no pool: write a table [pool.NAME] for each")
    return {name: _supply(name, table, around) for name, table in pools.items()}


def _supply(name: str, table: Any, around: Surroundings) -> Supply:
    where = f"pool.{name}"
    if not isinstance(table, dict):
        raise InvalidInputError(f"{where}: write a table, as [{where}]")
    kind = table.get("provider")
    if kind not in KINDS:
        raise InvalidInputError(f"[{where}] provider {kind!r}: use one of {', '.join(KINDS)}")
    rules = {key: value for key, value in table.items() if key not in {kind, "deadline_s"}}
    known = {field.name for field in msgspec.structs.fields(Pool)} - {"name"}
    if unknown := sorted(set(rules) - known):
        raise InvalidInputError(
            f"[{where}] {unknown[0]}: there is no such key; there are {', '.join(sorted(known))}, deadline_s, and the "
            f"table [{where}.{kind}]"
        )
    pool: Pool = convert(where, {**rules, "name": name}, Pool)
    if pool.min > pool.max:
        raise InvalidInputError(f"[{where}] min {pool.min} is more than max {pool.max}: lower it, or raise max")
    deadline = convert(where, {key: table[key] for key in ("deadline_s",) if key in table}, _Deadline)
    module = importlib.import_module(f"unicron_provisioner.providers.{kind}")
    options = convert(f"{where}.{kind}", table.get(kind, {}), module.Options)
    try:
        return Supply(pool, module.make(pool, options, around), deadline.deadline_s)
    except InvalidInputError as error:
        raise InvalidInputError(f"[{where}.{kind}] {error}") from error
