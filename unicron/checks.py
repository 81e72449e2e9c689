"""The rules that a task must obey: one set for all services that accept tasks."""

import math

from unicron import subjects
from unicron.contracts.ranges import MOST_SECONDS
from unicron.contracts.tasks import UNCOUNTED, ModelSpec, ParallelLayout, TaskSpec
from unicron.costmodel import catalogue
from unicron.errors import InvalidInputError, Problem
from unicron.healing import way_of
from unicron.log_patterns import compiled

RECOMMENDED_WEIGHT = (0.5, 2.0)
"""Weights outside of it starve other tasks or the task itself (paper section 5)."""

MOST_WORKERS = 100_000
"""Most workers of one task."""

MOST_AMOUNT = 1e40
"""Largest weight or number of FLOP/s."""

NAMED = 8
"""Most rows of a table that a problem names."""

MOST_LAYOUTS = 1_000
"""Most rows of a table of layouts: specs travel with many messages."""

MOST_PATTERNS = 8
"""Patterns of a task: each line that a worker writes is matched against each of them."""

SHORTEST_WATCH_S = 10.0
"""Agents look no more often for what was not written."""

_LIMITS = {
    "min_workers": MOST_WORKERS,
    "max_workers": MOST_WORKERS,
    "unit": 100_000,
    "microbatches": 10**9,
    "iterations": UNCOUNTED,
}

_MODEL_LIMITS = {
    "layers": 1_000,
    "hidden": 10**6,
    "heads": 10_000,
    "sequence": 10**7,
    "vocabulary": 10**7,
    "batch": 100_000,
    "gpus_per_node": 1_000,
}


def task_problems(spec: TaskSpec) -> list[Problem]:
    """Return everything that keeps `spec` from being run."""
    found = _text_problems(spec)
    for field, most in _LIMITS.items():
        if not 1 <= getattr(spec, field) <= most:
            found.append(Problem(field, getattr(spec, field), f"must be a whole number from 1 to {most}"))
    for field in ("weight", "flops_per_iteration"):
        if not _positive(getattr(spec, field)):
            hint = " (0.5 to 2.0 recommended)" if field == "weight" else ""
            found.append(Problem(field, getattr(spec, field), f"must be a finite number above 0{hint}"))
    found += _checkpoint_problems(spec)
    found += way_of(spec).problems(spec)
    found += _pattern_problems(spec)
    for workers, flops in spec.throughput.items():
        if not 1 <= workers <= _LIMITS["max_workers"]:
            found.append(Problem("throughput", workers, "its keys are numbers of workers, from 1"))
        if not _positive(flops):
            found.append(Problem(f"throughput.{workers}", flops, "must be a finite number of FLOP/s above 0"))
    if spec.model is not None:
        found += _model_problems(spec.model)
    found += _layout_problems("layout", spec.layout, spec.model)
    found += _table_problems(spec)
    return found or _size_problems(spec)


def _pattern_problems(spec: TaskSpec) -> list[Problem]:
    """Return what is wrong with the patterns that its workers' lines are to match."""
    if len(spec.watch_log) > MOST_PATTERNS:
        return [Problem("watch_log", len(spec.watch_log), f"{MOST_PATTERNS} patterns at most")]
    found = []
    for index, each in enumerate(spec.watch_log):
        field = f"watch_log.{index}"
        try:
            captures = compiled(each.pattern).groups
        except InvalidInputError as error:
            found.append(Problem(f"{field}.pattern", each.pattern, str(error)))
            continue
        for name in ("within_s", "absent_for_s"):
            value = getattr(each, name)
            if not (value == 0 or SHORTEST_WATCH_S <= value <= MOST_SECONDS):  # not a number is none either
                found.append(
                    Problem(f"{field}.{name}", value, f"must be {SHORTEST_WATCH_S:g} s or more, or 0: no limit")
                )
        if not (each.within_s or each.absent_for_s or captures):
            must = "needs `within_s` or `absent_for_s`, or a group that captures a number, as in 'loss: (\\S+)'"
            found.append(Problem(field, each.pattern, must))
    return found


def _checkpoint_problems(spec: TaskSpec) -> list[Problem]:
    found = []
    if spec.resume and not spec.checkpoints:
        found.append(Problem("resume", spec.resume, "needs `checkpoints`: where an earlier task has written some"))
    if not (math.isfinite(spec.checkpoint_s) and spec.checkpoint_s >= 0):
        found.append(Problem("checkpoint_s", spec.checkpoint_s, "must be a finite number of seconds, or 0"))
    return found


def task_warnings(spec: TaskSpec) -> list[Problem]:
    """Return what is allowed but rarely meant."""
    found = []
    low, high = RECOMMENDED_WEIGHT
    if not low <= spec.weight <= high:
        found.append(Problem("weight", spec.weight, f"{low} to {high} is recommended"))
    if spec.microbatches < spec.max_workers and way_of(spec).counts_iterations:
        found.append(
            Problem("microbatches", spec.microbatches, f"fewer than max_workers {spec.max_workers}: some will idle")
        )
    unused = sorted(set(spec.layouts) - set(spec.sizes))
    if unused:
        limits = f"min_workers {spec.min_workers}, max_workers {spec.max_workers} and unit {spec.unit}"
        found.append(Problem("layout", unused[:NAMED], f"rows that are never used: {limits} rule these sizes out"))
    return found


def check_task(spec: TaskSpec) -> None:
    """Refuse a spec that can't be run.

    Raises:
        InvalidInputError: it names every field that is wrong, its value and what is allowed.
    """
    problems = task_problems(spec)
    if problems:
        raise InvalidInputError(f"task {spec.name!r}: " + "; ".join(map(str, problems)))


def _text_problems(spec: TaskSpec) -> list[Problem]:
    found = []
    if not is_token(spec.name):
        found.append(Problem("name", spec.name, "use 1 to 64 letters, digits, '-' or '_'"))
    if not spec.command or not spec.command[0]:
        found.append(Problem("command", spec.command, "must name a program, then its arguments"))
    if any("\0" in word for word in spec.command):
        found.append(Problem("command", spec.command, "must not hold NUL characters"))
    for name, value in spec.env.items():
        if not name or "=" in name or "\0" in name + value:
            found.append(Problem(f"env.{name}", value, "names must not be empty nor hold '=', and nothing holds NUL"))
    return found


def _model_problems(model: ModelSpec) -> list[Problem]:
    found = [
        Problem(f"model.{field}", getattr(model, field), f"must be a whole number from 1 to {most}")
        for field, most in _MODEL_LIMITS.items()
        if not 1 <= getattr(model, field) <= most
    ]
    if not found and model.hidden % model.heads:
        found.append(Problem("model.heads", model.heads, f"must divide the hidden size {model.hidden}"))
    if model.accelerator not in catalogue.accelerators():
        known = ", ".join(catalogue.accelerators())
        found.append(Problem("model.accelerator", model.accelerator, f"known are {known}"))
    if not 0 <= model.anchor_workers <= MOST_WORKERS:
        allowed = f"must be a whole number from 1 to {MOST_WORKERS}, or 0 without a measurement"
        found.append(Problem("model.anchor_workers", model.anchor_workers, allowed))
    if not 0 <= model.anchor_mfu < 1:
        hint = "model FLOP/s over the peak, from 0 to 1; 45 % is 0.45"
        found.append(Problem("model.anchor_mfu", model.anchor_mfu, hint))
    elif (model.anchor_workers > 0) != (model.anchor_mfu > 0):
        allowed = "anchor_workers and anchor_mfu are given together: the MFU measured on so many"
        found.append(Problem("model.anchor_mfu", model.anchor_mfu, allowed))
    return found


def _table_problems(spec: TaskSpec) -> list[Problem]:
    """Return what is wrong with the layouts by number of workers; they stand in the task file's field `layout`."""
    if len(spec.layouts) > MOST_LAYOUTS:
        allowed = f"at most {MOST_LAYOUTS} rows, one for each number of workers; a larger unit makes do with fewer"
        return [Problem("layout", len(spec.layouts), allowed)]
    found = []
    for workers, layout in spec.layouts.items():
        field = f"layout.{workers}"
        if not 1 <= workers <= MOST_WORKERS:
            found.append(Problem(field, workers, f"its rows are for numbers of workers, from 1 to {MOST_WORKERS}"))
            continue
        problems = _layout_problems(field, layout, spec.model)
        each = layout.replica_workers
        if not problems and workers % each:
            product = f"{layout.tensor} x {layout.pipeline} x {layout.shard}"
            allowed = f"tensor x pipeline x shard is {product} = {each} and must divide the row's {workers} workers"
            problems.append(Problem(field, each, allowed))
        found += problems
    return found


def _layout_problems(field: str, layout: ParallelLayout, model: ModelSpec | None) -> list[Problem]:
    found = [
        Problem(f"{field}.{degree}", getattr(layout, degree), f"must be a whole number from 1 to {MOST_WORKERS}")
        for degree in ("tensor", "pipeline", "shard")
        if not 1 <= getattr(layout, degree) <= MOST_WORKERS
    ]
    if model is None or found:
        return found
    if model.heads % layout.tensor:
        found.append(Problem(f"{field}.tensor", layout.tensor, f"must divide the model's {model.heads} heads"))
    if layout.tensor > model.gpus_per_node:
        allowed = f"at most the {model.gpus_per_node} GPUs of a node: tensor-parallel ranks stay inside of one"
        found.append(Problem(f"{field}.tensor", layout.tensor, allowed))
    if model.layers % layout.pipeline and not model.padded:
        allowed = f"must divide the model's {model.layers} layers; set model.padded where they may be padded"
        found.append(Problem(f"{field}.pipeline", layout.pipeline, allowed))
    return found


def _size_problems(spec: TaskSpec) -> list[Problem]:
    if spec.min_workers > spec.max_workers:
        return [Problem("min_workers", spec.min_workers, f"must not be above max_workers {spec.max_workers}")]
    if spec.sizes:
        return []
    between = f"lies between min_workers {spec.min_workers} and max_workers {spec.max_workers}"
    if spec.layouts:
        allowed = f"no row that is a multiple of unit {spec.unit} {between}; add one, or change the limits"
        return [Problem("layout", sorted(spec.layouts)[:NAMED], allowed)]
    each = spec.layout.replica_workers
    whole = f" that makes whole replicas of {each} workers" if each > 1 else ""
    return [Problem("unit", spec.unit, f"no multiple of it{whole} {between}")]


def _positive(number: float) -> bool:
    """Return whether a number can be planned with: products and sums of such stay finite."""
    return 0 < number <= MOST_AMOUNT


def is_token(text: str) -> bool:
    """Return whether a text can stand in a subject."""
    try:
        subjects.token(text)
    except InvalidInputError:
        return False
    return True
