"""Chooses the name, and the keys, of a new machine's node, where a cluster's keys were made beforehand."""

import re
from collections.abc import Collection, Iterable, Iterator
from itertools import count
from pathlib import Path

from unicron.errors import InvalidInputError
from unicron_provisioner.providers.protocol import QuotaError


def free_name(keys: Path | None, pool: str, used: Collection[str]) -> str:
    """Return the name of a node that no machine of a pool has.

    Args:
        keys: folder of the keys of nodes, of which those called POOL-NUMBER are the pool's; None where none are needed.
        pool: its name.
        used: names that its machines have.

    Raises:
        QuotaError: all nodes that have keys are in use.
    """
    if keys is None:
        return next(name for name in _names(pool) if name not in used)
    names = in_order(pool, [path.stem for path in keys.glob("*/*.nk")])
    cure = f"give keys to more, as `unicron credentials node {pool}-{len(used) + 1}`"
    return first_free(names, used, f"pool {pool} with a key in {keys}", cure)


def first_free(names: Iterable[str], used: Collection[str], what: str, cure: str) -> str:
    """Return the first of some nodes that no machine is.

    Raises:
        QuotaError: all of them, which are those of `what`, are in use.
    """
    found = next((name for name in names if name not in used), None)
    if found is None:
        raise QuotaError(f"all {len(used)} nodes of {what} are in use: {cure}")
    return found


def in_order(pool: str, names: Iterable[str]) -> list[str]:
    """Return which of these names are those of a pool's nodes, POOL-NUMBER, in the order of their numbers."""
    numbers = [re.fullmatch(rf"{re.escape(pool)}-(\d+)", name) for name in names]
    return [match[0] for match in sorted((each for each in numbers if each), key=lambda each: int(each[1]))]


def _names(pool: str) -> Iterator[str]:
    return (f"{pool}-{number}" for number in count(1))


def credentials(keys: Path | None, node: str) -> dict[str, Path]:
    """Return the files of a node's keys, by the setting that names each."""
    if keys is None:
        return {}
    return {setting: path for setting, path in named(keys / node, node).items() if path.exists()}


def named(folder: Path, node: str) -> dict[str, Path]:
    """Return the files of a node's keys in a folder that is its own, by the setting that names each."""
    return {"UNICRON_NATS_NKEY": folder / f"{node}.nk", "UNICRON_FABRIC_KEY": folder / "fabric.key"}


def folder_of_keys(text: str, base: Path) -> Path | None:
    """Return the folder of keys that a file of pools names, None for none.

    Raises:
        InvalidInputError: it is not there.
    """
    if not text:
        return None
    found = (base / Path(text).expanduser()).resolve()
    if not found.is_dir():
        raise InvalidInputError(f"keys {str(found)!r}: no folder there; give the one in which nodes have their keys")
    return found
