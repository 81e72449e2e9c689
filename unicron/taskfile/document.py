"""Reads a task file: its fields to a `TaskSpec`, its problems with file and line."""

import difflib
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from unicron import healing
from unicron.checks import task_problems, task_warnings
from unicron.contracts.tasks import Healing, ParallelLayout, TaskSpec
from unicron.contracts.watchdogs import LogPattern
from unicron.costmodel import formulas
from unicron.errors import InvalidInputError, Problem
from unicron.files import read_text
from unicron.printable import listed, shown
from unicron.taskfile import fields
from unicron.taskfile.fields import BadValueError, items, whole, within, word
from unicron.taskfile.layouts import AUTO, best_layouts, read_layout
from unicron.taskfile.model import TABLE, read_model, read_table

REQUIRED = ("name", "command")
SHELL_WORDS = frozenset({"&&", "||", "|", ";", "&", "<", ">", ">>", "2>", "2>&1", "&>"})
SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh", "env"})
_EXPANDED = re.compile(r"\$[A-Za-z_({]|`")
FIELDS = tuple(field.name for field in msgspec.structs.fields(TaskSpec) if field.name != "layouts")


class TaskFile(NamedTuple):
    """A task file that can be submitted.

    Attributes:
        warnings: what is allowed but rarely meant, one line each, with file and line.
    """

    spec: TaskSpec
    warnings: list[str]


MOST_BYTES = 1024 * 1024
MOST_VALUES = 100_000
MOST_DEPTH, MOST_DIGITS = 20, 4000
"""Size limit of a file of tasks; thousands of tasks are smaller."""


def load(path: Path) -> TaskFile:
    """Read the task file at `path`.

    A relative `workdir` starts at the file's folder, which is also the default.

    Raises:
        InvalidInputError: one line for each problem: file, line, field, value, and what is allowed.
    """
    return parse(read_text(path, "give the path of a task file, which is YAML", MOST_BYTES), path)


def parse(text: str, path: Path) -> TaskFile:
    """Make a spec of `text`; `path` is where it came from.

    Raises:
        InvalidInputError: as for `load`.
    """
    values, lines = read_mapping(text, path)
    problems = [Problem(field, values[field], _suggestion(field)) for field in values if field not in FIELDS] + [
        Problem(field, None, "is required") for field in REQUIRED if values.get(field) is None
    ]
    given: dict[str, Any] = {}
    readers: dict[str, Callable[[Any], Any]] = {**_READERS, "throughput": partial(_throughput, path.parent)}
    elsewhere: list[str] = []  # problems in other files, which name their own place
    for field, value in values.items():
        if field in FIELDS and value is not None:
            try:
                given[field] = readers[field](value)
            except BadValueError as bad:
                name = f"{field}.{bad.key}" if bad.key else field
                problems.append(Problem(name, value if bad.value is None else bad.value, bad.allowed))
            except InvalidInputError as error:
                elsewhere.append(str(error))
    healing.complete(given)
    if not problems and not elsewhere:
        given["workdir"] = str((path.absolute().parent / given.get("workdir", "")).resolve())
        spec, problems = _spec(given)
    if problems or elsewhere:
        raise InvalidInputError(listed([*(_place(problem, path, lines) for problem in problems), *elsewhere]))
    if spec.model is not None and "flops_per_iteration" not in given:
        spec = msgspec.structs.replace(spec, flops_per_iteration=formulas.iteration_flops(spec.model))
    return TaskFile(spec, [_place(warning, path, lines) for warning in task_warnings(spec)])


def _spec(given: dict[str, Any]) -> tuple[TaskSpec, list[Problem]]:
    """Return the spec that the fields make, and what is wrong with it."""
    layout = given.pop("layout", ParallelLayout())
    if layout == AUTO:
        spec = TaskSpec(**given)
        problems = task_problems(spec)  # first: what the layouts are chosen from must be right
        if problems:
            return spec, problems
        try:
            layout = best_layouts(spec)
        except BadValueError as bad:
            return spec, [Problem("layout", AUTO, bad.allowed)]
    spec = TaskSpec(**given, **{"layouts" if isinstance(layout, dict) else "layout": layout})
    return spec, task_problems(spec)


def read_mapping(text: str, path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the mapping that `text` holds, and the line of each of its keys.

    Raises:
        InvalidInputError: broken YAML (with line and column), no mapping, or the same key twice, also further in.
    """
    node = compose(text, path)
    if not isinstance(node, yaml.MappingNode):
        raise InvalidInputError(f"{path}: expected 'field: value' lines, as in 'name: gpt'")
    _check_keys(node, path)
    with _translated_errors(path):
        yaml.SafeLoader("").flatten_mapping(node)
    for key, value in node.value:
        if key.value in {"command", "env"}:
            _keep_words(value)
    values = {key.value: construct(value, path) for key, value in node.value}
    return values, {key.value: key.start_mark.line + 1 for key, _ in node.value}


def _keep_words(node: yaml.Node) -> None:
    """Have what YAML takes for a number or a time, as 0022, 3.10 and 12:30:45, stay what is written there."""
    for each in node.value if isinstance(node, yaml.SequenceNode) else ():
        _keep_words(each)
    for _, each in node.value if isinstance(node, yaml.MappingNode) else ():
        _keep_words(each)
    if node.tag in {f"tag:yaml.org,2002:{kind}" for kind in ("int", "float", "timestamp")}:
        node.tag = "tag:yaml.org,2002:str"


def _check_keys(node: yaml.MappingNode, path: Path) -> None:
    """Refuse a key that stands there twice, also in a mapping inside, or that is no word."""
    lines: dict[str, int] = {}
    for key, inner in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise InvalidInputError(f"{path}:{line}: a list or mapping stands where the name of a field should")
        if key.value in lines:
            raise InvalidInputError(
                f"{path}:{line}: {key.value} stands there twice; line {lines[key.value]} has it too"
            )
        lines[key.value] = line
        if isinstance(inner, yaml.MappingNode):
            _check_keys(inner, path)


def compose(text: str, path: Path) -> yaml.Node | None:
    """Return the YAML nodes of `text`, None where there is nothing in it.

    Raises:
        InvalidInputError: it is not YAML, or more than anybody writes; file and line are named.
    """
    with _translated_errors(path):
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is not None:
        _check_size(node, path)
    return node


def construct(node: yaml.Node, path: Path) -> Any:
    """Return what a node holds, in plain types.

    Raises:
        InvalidInputError: they can't hold it; file, line and column are named.
    """
    with _translated_errors(path):
        return yaml.SafeLoader("").construct_document(deepcopy(node))  # which resolves merges in place


@contextmanager
def _translated_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else f"{path}"
        raise InvalidInputError(f"{place}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date
        raise InvalidInputError(f"{path}: not valid YAML: {error}") from error


def _check_size(node: yaml.Node, path: Path) -> None:
    """Refuse what is small as text and large as values: aliases of aliases, and numbers of thousands of digits."""
    left, count = [(node, 1)], 0
    while left:
        each, depth = left.pop()
        count += 1
        place = f"{path}:{each.start_mark.line + 1}"
        if depth > MOST_DEPTH:
            raise InvalidInputError(f"{place}: more than {MOST_DEPTH} lists and mappings inside one another")
        if count > MOST_VALUES:
            raise InvalidInputError(f"{place}: more than {MOST_VALUES:,} values, counting each alias as what it names")
        if each.tag == "tag:yaml.org,2002:int" and len(each.value) > MOST_DIGITS:
            raise InvalidInputError(f"{place}: a number of {len(each.value)} digits; {MOST_DIGITS} are allowed")
        if isinstance(each, yaml.MappingNode):
            left += [(inner, depth + 1) for pair in each.value for inner in pair]
        elif isinstance(each, yaml.SequenceNode):
            left += [(inner, depth + 1) for inner in each.value]


def _place(problem: Problem, path: Path, lines: dict[str, int]) -> str:
    line = lines.get(problem.field.partition(".")[0])
    place = f"{path}:{line}" if line else f"{path}"
    value = "" if problem.value is None else f" {shown(problem.value)}"
    return f"{place}: {problem.field}{value}: {problem.allowed}"


def _suggestion(field: str) -> str:
    near = difflib.get_close_matches(field.lower().replace("-", "_"), FIELDS, n=1, cutoff=0.5)
    if near:
        return f"no such field; did you mean {near[0]!r}?"
    return f"no such field; a task has {', '.join(FIELDS)}"


# --- readers: one for each kind of field -----------------------------------------------------------------------------


def _command(value: Any) -> list[str]:
    if isinstance(value, str):
        try:
            words = shlex.split(value)
        except ValueError as error:
            raise BadValueError(f"can't be split into words: {error}") from error
        meant = [word for word in words if word in SHELL_WORDS or _EXPANDED.search(word)]
        if meant and Path(words[0]).name not in SHELLS:
            raise BadValueError(f"is run by no shell, to which {meant[0]} would mean more: give it to bash -c '...'")
        return words
    if isinstance(value, list):
        return [within(f"{place}", word, each) for place, each in enumerate(value)]
    raise BadValueError("must be text or a list of words")


def _heal(value: Any) -> Healing:
    if value in list(healing.WAYS):
        return Healing(value)
    raise BadValueError(f"must be one of {', '.join(healing.WAYS)}")


def _env(value: Any) -> dict[str, str]:
    rows = items(value, "NAME: value")
    return {within(str(name), fields.text, name): within(str(name), word, each) for name, each in rows}


def _throughput(folder: Path, value: Any) -> dict[int, float]:
    if isinstance(value, str):
        return read_table(folder / value)
    rows = items(value, TABLE)
    return {within(str(workers), whole, workers): within(str(workers), fields.number, flops) for workers, flops in rows}


def _watch_log(value: Any) -> list[LogPattern]:
    shape = "a list of `pattern` with `within_s` or `absent_for_s`"
    if not isinstance(value, list):
        raise BadValueError(f"must be {shape}")
    return [within(f"{place}", _log_pattern, each) for place, each in enumerate(value)]


def _log_pattern(value: Any) -> LogPattern:
    read, given = fields.readers(LogPattern), dict[str, Any]()
    for name, each in items(value, "pattern, within_s, absent_for_s"):
        if name not in read:
            raise BadValueError(f"has no field {shown(name)}; it has {', '.join(read)}")
        given[name] = within(name, read[name], each)
    if "pattern" not in given:
        raise BadValueError("needs a `pattern`")
    return LogPattern(**given)


_READERS: dict[str, Callable[[Any], Any]] = fields.readers(TaskSpec) | {
    "command": _command,
    "env": _env,
    "heal": _heal,
    "layout": read_layout,
    "model": read_model,
    "watch_log": _watch_log,
}
