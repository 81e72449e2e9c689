"""Fault scripts: YAML with faults, their targets and times. Pure; `unicron_chaos.injection` carries them out."""

import difflib
from pathlib import Path
from typing import Any

import yaml

from unicron.contracts.base import Record
from unicron.contracts.faults import FAULTS, WORKER, FaultKind
from unicron.errors import InvalidInputError
from unicron.files import read_text
from unicron.printable import shown
from unicron.subjects import token
from unicron.taskfile import MOST_BYTES, compose, construct

_SHAPES = {
    "": ("at", "fault", "target"),
    "at": ("task", "iteration"),
    "worker": ("task", "rank"),
    "node": ("node",),
}
_VALUE = "value"
"""A field that a fault may have besides."""


class RankTarget(Record, kw_only=True, frozen=True):
    """The worker that has this rank of a task at the time of the fault."""

    task: str
    rank: int

    def __str__(self) -> str:
        return f"{self.task}:{self.rank}"


class ScriptedFault(Record, kw_only=True, frozen=True):
    """One line of a fault script.

    Attributes:
        task, iteration: it strikes while this task computes this iteration, counted from 0.
        fault: one of `FAULTS`.
        target: the worker, or the name of the node.
        value: what else the fault takes; empty for its default.
    """

    task: str
    iteration: int
    fault: str
    target: RankTarget | str
    value: str = ""


class _Bad(Exception):  # noqa: N818 - never leaves this module
    """A value that can't be used, with its field and what is allowed."""

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        super().__init__(field)
        given = "" if value is None else f" {shown(value)}"
        self.text = f"{field}{given}: {allowed}"


def load(path: Path) -> list[ScriptedFault]:
    """Read the fault script at `path`.

    Raises:
        InvalidInputError: it names the file, the line, the fault's number, the field, the value and what is allowed.
    """
    return parse(read_text(path, "give the path of a fault script", MOST_BYTES), path)


def parse(text: str, path: Path) -> list[ScriptedFault]:
    """Return the faults in `text`, in their order; `path` is where it came from.

    Raises:
        InvalidInputError: as for `load`.
    """
    node = compose(text, path)
    if not isinstance(node, yaml.SequenceNode) or not node.value:
        raise InvalidInputError(f"{path}: expected a list of faults, each with {_list(_SHAPES[''])}")
    found = []
    for number, (item, value) in enumerate(zip(node.value, construct(node, path), strict=True), start=1):
        try:
            found.append(_fault(value))
        except _Bad as bad:
            place = f"{path}:{item.start_mark.line + 1}: fault {number}"
            raise InvalidInputError(f"{place}: {bad.text}") from bad
    return found


def parse_target(text: str) -> RankTarget | str:
    """Return the target that a person wrote: TASK:RANK for a worker, else the name of a node.

    Raises:
        InvalidInputError: it is neither.
    """
    task, colon, rank = text.partition(":")
    if not colon:
        return token(text, "node")
    if not rank.isdecimal():
        raise InvalidInputError(f"target {text!r}: expected TASK:RANK with a rank from 0, as in gpt:1")
    return RankTarget(task=token(task, "task"), rank=int(rank))


def _fault(value: Any) -> ScriptedFault:
    given = value.get(_VALUE) if isinstance(value, dict) else None
    item = _mapping({key: each for key, each in value.items() if key != _VALUE} if given is not None else value, "", "")
    at = _mapping(item["at"], "at", "at")
    fault = item["fault"]
    if fault not in FAULTS:
        near = difflib.get_close_matches(str(fault), FAULTS, n=1)
        known = tuple(FAULTS)
        raise _Bad("fault", fault, f"did you mean {near[0]!r}?" if near else f"must be one of {_list(known)}")
    kind = FAULTS[fault]
    return ScriptedFault(
        task=_name(at["task"], "at.task"),
        iteration=_count(at["iteration"], "at.iteration"),
        fault=fault,
        target=_target(item["target"], kind),
        value=_value(given, kind),
    )


def _target(value: Any, kind: FaultKind) -> RankTarget | str:
    either = len(kind.targets) > 1 and isinstance(value, dict) and "node" in value
    if either or WORKER not in kind.targets:
        return _name(_mapping(value, "target", "node")["node"], "target.node")
    target = _mapping(value, "target", "worker")
    return RankTarget(task=_name(target["task"], "target.task"), rank=_count(target["rank"], "target.rank"))


def _value(value: Any, kind: FaultKind) -> str:
    """Return the value to go by; YAML has numbers of its own."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | None):
        raise _Bad(_VALUE, value, "must be a number or a word")
    try:
        return kind.checked("" if value is None else str(value))
    except InvalidInputError as error:
        raise _Bad(_VALUE, value, str(error)) from error


def _mapping(value: Any, field: str, shape: str) -> dict[str, Any]:
    """Return `value` if it has exactly the fields of `shape`."""
    wanted = _SHAPES[shape]
    if not isinstance(value, dict):
        raise _Bad(field or "it", value, f"must be a mapping with {_list(wanted)}")
    lead = f"{field}." if field else ""
    for name in value:
        if name not in wanted:
            raise _Bad(f"{lead}{name}", value[name], f"no such field here; it has {_list(wanted)}")
    for name in wanted:
        if value.get(name) is None:
            raise _Bad(f"{lead}{name}", None, "is required")
    return value


def _name(value: Any, field: str) -> str:
    try:
        return token(value if isinstance(value, str) else "", field)
    except InvalidInputError as error:
        raise _Bad(field, value, "use 1 to 64 letters, digits, '-' or '_'") from error


def _count(value: Any, field: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _Bad(field, value, "must be a whole number from 0")
    return value


def _list(names: tuple[str, ...]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
