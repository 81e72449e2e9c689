"""Reads `layout` of a task file: degrees, a table of them by number of workers, or `auto`."""

from typing import Any

from unicron.contracts.tasks import ParallelLayout, TaskSpec
from unicron.errors import InvalidInputError
from unicron.taskfile.fields import BadValueError, items, whole, within

AUTO = "auto"
DEGREES = ("tensor", "pipeline", "shard")

_FORMS = f"'tensor: 2', or of '4: {{tensor: 2}}' for each number of workers; or it is the word {AUTO}"


def read_layout(value: Any) -> ParallelLayout | dict[int, ParallelLayout] | str:
    """Return the shape of a replica, its shape by number of workers, or `AUTO`.

    Raises:
        BadValueError: it names the first key that is unknown or of the wrong kind.
    """
    if value == AUTO:
        return AUTO
    if not isinstance(value, dict):
        raise BadValueError(f"must be rows of {_FORMS}")
    if all(isinstance(key, str) for key in value):
        return _degrees(value)
    for key, entry in value.items():
        if key in DEGREES:
            allowed = "stands beside numbers of workers: give degrees for all sizes, or rows of them for each, not both"
            raise BadValueError(allowed, value=entry, key=key)
        within(str(key), whole, key)
    return {workers: _row(workers, entry) for workers, entry in value.items()}


def best_layouts(spec: TaskSpec) -> dict[int, ParallelLayout]:
    """Return the fastest layout for each number of workers that the task may have, as its model has it.

    Raises:
        BadValueError: it says why there is none, and the cure.
    """
    if spec.model is None:
        raise BadValueError("needs model, from which the fastest layouts are calculated; add it, or give degrees")
    try:
        from unicron.costmodel import planning  # noqa: PLC0415 - needs numpy, which few task files do

        return planning.best_layouts(spec.model, spec.sizes)
    except ModuleNotFoundError as error:
        cure = f"pip install {error.name}, or give degrees for each number of workers"
        raise BadValueError(f"{error.name} is not installed, with which layouts are calculated; {cure}") from error
    except InvalidInputError as error:
        raise BadValueError(str(error)) from error


def _row(workers: int, value: Any) -> ParallelLayout:
    try:
        return _degrees({} if value is None else value)
    except BadValueError as bad:
        key = f"{workers}.{bad.key}" if bad.key else f"{workers}"
        raise BadValueError(bad.allowed, value=value if bad.value is None else bad.value, key=key) from bad


def _degrees(value: Any) -> ParallelLayout:
    given: dict[str, int] = {}
    for key, degree in items(value, "tensor: 2"):
        if key not in DEGREES:
            hint = "; how many replicas there are is for the plan to say" if key == "replicas" else ""
            raise BadValueError(f"no such degree; a layout has {', '.join(DEGREES)}{hint}", value=degree, key=str(key))
        given[key] = within(key, whole, degree)
    return ParallelLayout(**given)
