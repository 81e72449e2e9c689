"""With what agents are to run, by the files of a set-up that `unicron init` wrote and people have changed since."""

from collections.abc import Iterator
from pathlib import Path

from unicron import rules
from unicron.contracts.base import Record
from unicron.errors import InvalidInputError
from unicron.files import MB, convert, read_text, read_toml

CURE = "give the folder that `unicron init` wrote"


class Agent(Record, kw_only=True, frozen=True):
    """An agent, or each agent of a pool.

    Attributes:
        settings: of its environment, by variable.
        rules: digest of the rules that it is to have; empty where the set-up does not have them.
        pool: whether it is a pool's, where some settings are of each machine.
    """

    settings: dict[str, str]
    rules: str = ""
    pool: bool = False


class Wanted(Record, kw_only=True, frozen=True):
    """All agents, by node and by pool."""

    nodes: dict[str, Agent] = {}
    pools: dict[str, Agent] = {}


class _Slurm(Record, kw_only=True, frozen=True):
    env: dict[str, str] = {}


class _Pool(Record, kw_only=True, frozen=True):
    slurm: _Slurm = _Slurm()


class _File(Record, kw_only=True, frozen=True):
    pool: dict[str, _Pool] = {}


def read(folder: Path) -> Wanted:
    """Return with what agents are to run by the set-up in `folder`.

    Raises:
        InvalidInputError: it is none, or a file of it can't be used.
    """
    nodes = {path.parents[2].name: _node(path) for path in sorted(folder.glob("*/etc/unicron/agent.env"))}
    pools: dict[str, Agent] = {}
    for path in sorted(folder.glob("*/etc/unicron/pools.toml")):
        pools |= dict(_pools(path, folder))
    if not nodes and not pools:
        raise InvalidInputError(f"{folder}: no set-up, as there is no agent in it; {CURE}")
    return Wanted(nodes=nodes, pools=pools)


def _node(path: Path) -> Agent:
    settings = _environment(path.with_name("cluster.env")) | _environment(path)
    return Agent(settings=settings, rules=_digest(path.parents[2], settings))


def _pools(path: Path, folder: Path) -> Iterator[tuple[str, Agent]]:
    """Yield what agents of each pool are to run with; a job of Slurm has the environment of who submits it, too."""
    inherited = _environment(path.with_name("cluster.env"))
    for name, pool in convert(str(path), read_toml(path, CURE), _File).pool.items():
        settings = inherited | pool.slurm.env
        yield name, Agent(settings=settings, rules=_digest(folder / SEEN_BY_ALL, settings), pool=True)


SEEN_BY_ALL = "nodes"
"""Stands where the name of a host could, for what all nodes see in one place."""


def _environment(path: Path) -> dict[str, str]:
    lines = [line.strip() for line in read_text(path, CURE, MB).splitlines()]
    return dict(_pair(path, line) for line in lines if line and not line.startswith("#"))


def _pair(path: Path, line: str) -> tuple[str, str]:
    name, equals, value = line.partition("=")
    if not equals:
        raise InvalidInputError(f"{path}: {line!r}: write NAME=VALUE")
    return name, value


def _digest(root: Path, settings: dict[str, str]) -> str:
    """Return the digest of the rules that the host whose files lie in `root` is to have."""
    named = settings.get("UNICRON_RULES", "")
    there = root / named.lstrip("/")
    return rules.load(str(there)).digest if named and there.is_dir() else "" if named else rules.load().digest
