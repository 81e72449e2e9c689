"""Task files: YAML that a user writes, checked field by field, to a `TaskSpec`."""

import difflib
import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from unicron.contracts.checks import Problem, task_problems, task_warnings
from unicron.contracts.tasks import TaskSpec
from unicron.errors import InvalidInputError

REQUIRED = ("name", "command")
FIELDS = tuple(field.name for field in msgspec.structs.fields(TaskSpec))


class TaskFile(NamedTuple):
    """A task file that can be submitted.

    Attributes:
        warnings: what is allowed but rarely meant, one line each, with file and line.
    """

    spec: TaskSpec
    warnings: list[str]


class _Bad(Exception):  # noqa: N818 - never leaves this module
    """A value of the wrong kind; `allowed` says which kind is right."""

    def __init__(self, allowed: str, *, value: Any = None, key: str = "") -> None:
        super().__init__(allowed)
        self.allowed, self.value, self.key = allowed, value, key


def load(path: Path) -> TaskFile:
    """Read the task file at `path`.

    A relative `workdir` starts at the file's folder, which is also the default.

    Raises:
        InvalidInputError: one line for each problem: file, line, field, value, and what is allowed.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidInputError(f"{path}: can't be read ({error.strerror}); give the path of a task file") from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{path}: not UTF-8 text (byte {error.start}); task files are YAML") from error
    return parse(text, path)


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
    for field, value in values.items():
        if field in FIELDS and value is not None:
            try:
                given[field] = _READERS[field](value)
            except _Bad as bad:
                name = f"{field}.{bad.key}" if bad.key else field
                problems.append(Problem(name, value if bad.value is None else bad.value, bad.allowed))
    if not problems:
        given["workdir"] = str((path.absolute().parent / given.get("workdir", "")).resolve())
        spec = TaskSpec(**given)
        problems = task_problems(spec)
    if problems:
        raise InvalidInputError("\n".join(_place(problem, path, lines) for problem in problems))
    return TaskFile(spec, [_place(warning, path, lines) for warning in task_warnings(spec)])


def read_mapping(text: str, path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the mapping that `text` holds, and the line of each of its keys.

    Raises:
        InvalidInputError: broken YAML (with line and column), no mapping, or the same key twice.
    """
    node = compose(text, path)
    if not isinstance(node, yaml.MappingNode):
        raise InvalidInputError(f"{path}: expected 'field: value' lines, as in 'name: gpt'")
    lines: dict[str, int] = {}
    for key, _ in node.value:
        line = key.start_mark.line + 1
        if str(key.value) in lines:
            raise InvalidInputError(
                f"{path}:{line}: {key.value} stands there twice; line {lines[key.value]} has it too"
            )
        lines[str(key.value)] = line
    values = yaml.safe_load(text)
    return {str(key): value for key, value in values.items()}, lines


def compose(text: str, path: Path) -> yaml.Node | None:
    """Return the YAML nodes of `text`, all of which plain types can hold.

    Raises:
        InvalidInputError: it is not YAML; file, line and column are named.
    """
    try:
        yaml.safe_load(text)  # composing alone would let unknown tags through
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else f"{path}"
        raise InvalidInputError(f"{place}: not valid YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an impossible date
        raise InvalidInputError(f"{path}: not valid YAML: {error}") from error


def _place(problem: Problem, path: Path, lines: dict[str, int]) -> str:
    line = lines.get(problem.field.partition(".")[0])
    place = f"{path}:{line}" if line else f"{path}"
    value = "" if problem.value is None else f" {problem.value!r}"
    return f"{place}: {problem.field}{value}: {problem.allowed}"


def _suggestion(field: str) -> str:
    near = difflib.get_close_matches(field.lower().replace("-", "_"), FIELDS, n=1, cutoff=0.5)
    if near:
        return f"no such field; did you mean {near[0]!r}?"
    return f"no such field; a task has {', '.join(FIELDS)}"


# --- readers: one for each kind of field; YAML's own types are trusted as little as its users -------------------------


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise _Bad("must be text; put it in quotes")


def _word(value: Any) -> str:
    """Texts, and numbers as they are written in commands and environments."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return _text(value)


def _whole(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise _Bad("must be a whole number")


def _number(value: Any) -> float:
    """Numbers; also as texts, because YAML takes 1e12 for one."""
    if isinstance(value, (int, float, str)) and not isinstance(value, bool):
        try:
            return float(value)
        except ValueError:
            pass
        except OverflowError:
            return math.inf
    raise _Bad("must be a number")


def _command(value: Any) -> list[str]:
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as error:
            raise _Bad(f"can't be split into words: {error}") from error
    if isinstance(value, list):
        return [_in(f"{place}", _word, word) for place, word in enumerate(value)]
    raise _Bad("must be text or a list of words")


def _env(value: Any) -> dict[str, str]:
    return {_in(str(name), _text, name): _in(str(name), _word, text) for name, text in _items(value, "NAME: value")}


def _throughput(value: Any) -> dict[int, float]:
    rows = _items(value, "workers: FLOP/s")
    return {_in(str(workers), _whole, workers): _in(str(workers), _number, flops) for workers, flops in rows}


def _items(value: Any, shape: str) -> list[tuple[Any, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    raise _Bad(f"must be rows of '{shape}'")


def _in(key: str, read: Callable[[Any], Any], value: Any) -> Any:
    """Read `value`; name `key` where it can't be."""
    try:
        return read(value)
    except _Bad as bad:
        raise _Bad(bad.allowed, value=value, key=key) from bad


_READERS: dict[str, Callable[[Any], Any]] = {
    "name": _text,
    "command": _command,
    "weight": _number,
    "min_workers": _whole,
    "max_workers": _whole,
    "unit": _whole,
    "microbatches": _whole,
    "iterations": _whole,
    "workdir": _text,
    "env": _env,
    "flops_per_iteration": _number,
    "throughput": _throughput,
}
