"""In which rack and NVLink domain this node is, by what people, Slurm and the GPUs' driver say of it. Pure.

A topology file is TOML, with one table for each set of nodes. Names are written as Slurm writes lists of nodes, and `*`
stands for anything:

    [[nodes]]
    names = "gpu-[01-18],gpu-30"
    rack = "r1"
    domain = "nvl72-1"
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from unicron.errors import InvalidInputError
from unicron.slurm.nodelist import expand

Where = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
"""Name of a rack or a domain."""

CURE = 'name nodes as in names = "gpu-[01-18],gpu-30"; docs/howto/racks.md describes the file'


class Location(NamedTuple):
    """The location of a node.

    Attributes:
        rack: that it is in, or the switch it is behind; empty where that is not known.
        domain: of NVLink; empty where that is not known.
    """

    rack: str = ""
    domain: str = ""

    def completed(self, other: "Location") -> "Location":
        """Return this location with what `other` knows and this one does not."""
        return Location(self.rack or other.rack, self.domain or other.domain)


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes of one rack or domain, as a topology file has them."""

    names: Where
    rack: Where | None = None
    domain: Where | None = None


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nodes: list[Row]


def parse_topology(text: str, path: Path) -> list[Row]:
    """Return the rows of a topology file.

    Args:
        text: of the file.
        path: of it, for messages.

    Raises:
        InvalidInputError: it is no TOML, or a row can't be used; the message names file, row and cure.
    """
    try:
        rows = msgspec.convert(tomllib.loads(text), _File).nodes
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise InvalidInputError(f"{path}: {error}; {CURE}") from error
    for number, row in enumerate(rows, 1):
        if row.rack is None and row.domain is None:
            raise InvalidInputError(f"{path}: row {number} of nodes ({row.names}): it has neither rack nor domain")
        try:
            _ = names_node(row.names, "")
        except InvalidInputError as error:
            raise InvalidInputError(f"{path}: row {number} of nodes: {error}; {CURE}") from error
    return rows


def find_node(rows: Iterable[Row], node: str, path: Path) -> Location:
    """Return where a topology file says that a node is.

    Raises:
        InvalidInputError: two rows say different things of it.
    """
    found = Location()
    for row in rows:
        if names_node(row.names, node):
            said = Location(row.rack or "", row.domain or "")
            for kind, old, new in zip(Location._fields, found, said, strict=True):
                if old and new and old != new:
                    raise InvalidInputError(
                        f"{path}: {node} is in {kind} {old!r} by one row and in {new!r} by another ({row.names}); "
                        "leave it in one of them"
                    )
            found = found.completed(said)
    return found


def names_node(names: str, node: str) -> bool:
    """Return whether a list of nodes in Slurm's form, in which `*` stands for anything, names a node.

    Raises:
        InvalidInputError: it is no such list.
    """
    return any(re.fullmatch(".*".join(map(re.escape, each.split("*"))), node) for each in expand(names))


def read_slurm_variables(environ: Mapping[str, str]) -> Location:
    """Return what Slurm has said to a step that it started on this node: the block it is in, and its leaf switch.

    `SLURM_TOPOLOGY_ADDR` names them from the top down, `SLURM_TOPOLOGY_ADDR_PATTERN` says what each is:
    "s0.s1.node-7" and "switch.switch.node", or "b8.node-7" and "block.node" (https://slurm.schedmd.com/srun.html).
    """
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    names = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".", len(kinds) - 1)
    if len(names) != len(kinds):
        return Location()
    said = dict(zip(kinds, names, strict=True))  # of several switches the last one counts, the node's own
    return Location(_word(said.get("switch", "")), _word(said.get("block", "")))


def read_slurm_topology(text: str, node: str) -> Location:
    """Return where `scontrol show topology` says that a node is; lines that say something else are left out."""
    found = Location()
    for line in text.splitlines():
        said = dict(pair.split("=", 1) for pair in line.split() if "=" in pair)
        if "Nodes" in said and _is_named(said["Nodes"], node):
            switch = said.get("SwitchName", "") if said.get("Level") == "0" else ""
            found = found.completed(Location(_word(switch), _word(said.get("BlockName", ""))))
    return found


def fabric_domain(cluster: bytes, clique: int) -> str:
    """Return the NVLink domain of GPUs by what NVML says, as Kubernetes' label nvidia.com/gpu.clique has it.

    Args:
        cluster: UUID of all that one NVLink fabric connects, 16 bytes; zeros where the GPUs' node is alone in it.
        clique: number of those in it that reach one another.
    """
    if not any(cluster):
        return ""
    digits = cluster.hex()
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    return f"{'-'.join(parts)}.{clique}"


def _is_named(names: str, node: str) -> bool:
    try:
        return names_node(names, node)
    except InvalidInputError:
        return False


def _word(name: str) -> str:
    """Return a name that Slurm gave, empty where it is none that can be used."""
    return name if name.isprintable() and len(name) <= 128 else ""
