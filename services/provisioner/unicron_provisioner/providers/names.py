"""Chooses the name, and the keys, of a new machine's node, where a cluster's keys were made beforehand."""

import re
from collections.abc import Collection, Iterator
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
    names = _names(pool) if keys is None else iter(keyed(keys, pool))
    found = next((name for name in names if name not in used), None)
    if found is None:
        raise QuotaError(
            f"all {len(used)} nodes of pool {pool} with a key in {keys} are in use: give keys to more, as `unicron "
            f"credentials node {pool}-{len(used) + 1}`"
        )
    return found


def keyed(keys: Path, pool: str) -> list[str]:
    """Return the names of a pool's nodes that have a key, in the order of their numbers."""
    numbers = [re.fullmatch(rf"{re.escape(pool)}-(\d+)", path.stem) for path in keys.glob("*/*.nk")]
    return [match[0] for match in sorted((each for each in numbers if each), key=lambda each: int(each[1]))]


def _names(pool: str) -> Iterator[str]:
    return (f"{pool}-{number}" for number in count(1))


def credentials(keys: Path | None, node: str) -> dict[str, Path]:
    """Return the files of a node's keys, by the setting that names each."""
    if keys is None:
        return {}
    found = {"UNICRON_NATS_NKEY": keys / node / f"{node}.nk", "UNICRON_FABRIC_KEY": keys / node / "fabric.key"}
    return {setting: path for setting, path in found.items() if path.exists()}


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
