"""The ways in which the workers of a task come back after a failure: one object each, with all that differs by it.

A new way is a word of `Healing`, a class here, and the module that runs its programs; nobody else asks which way it is.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from unicron.contracts.ranges import MOST_SECONDS
from unicron.contracts.tasks import SHORTEST_SILENCE_S, UNCOUNTED, Healing, ParallelLayout, TaskSpec
from unicron.errors import Problem

PYTHON = frozenset({"python", "python3"})


class HealingWay:
    """A way of healing: of a program without a session, unless a class below says otherwise.

    Attributes:
        counts_iterations: the task is done after its `iterations`; else its program says when.
        tracks_states: it is recorded which worker has which part of the state, a part that is lost is looked for, and
            states go to storage; else the ranks agree on it among themselves, or the program does all that.
        saves_states: copies of the workers' states are saved in the memory of nodes.
        begins_again: without a usable copy of its state the program begins again from its top; else the task ends.
        resumes: a state that an earlier task has stored is given to it; else its program looks for one by itself.
        elastic: it goes on with fewer workers than it may have.
        waits_for_replacements: no membership forms without the worker that replaces a lost one.
        runs_again: each membership runs the program from its beginning.
        seats_ranks: ranks are places, known before there is a membership, and a new worker takes that of the lost one.
        may_be_uncarried: it may turn out that no other process can take over what a rank has.
        runner: module whose `launch(request, run_script)` runs a worker's program; empty: it is run as a script is.
        runs_any: `runner` runs any program; else this must be Python.
        ahead: modules to import before the first of its workers is forked.
    """

    counts_iterations = False
    tracks_states = False
    saves_states = False
    begins_again = False
    resumes = False
    elastic = True
    waits_for_replacements = True
    runs_again = False
    seats_ranks = False
    may_be_uncarried = False
    runner = ""
    runs_any = False
    ahead: tuple[str, ...] = ()

    def layout(self, workers: int) -> ParallelLayout | None:
        """Return the only layout in which so many workers can run it; None where that is not decided by the way."""
        del workers
        return None

    def problems(self, spec: TaskSpec) -> Iterator[Problem]:
        """Yield what another way of healing could do, but not this one."""
        way = f"where `heal` is {spec.heal.value}"
        if not (spec.silence_s == 0 or SHORTEST_SILENCE_S <= spec.silence_s <= MOST_SECONDS):  # no number is neither
            must = f"must be {SHORTEST_SILENCE_S:g} s or more, or 0 for no limit"
            yield Problem("silence_s", spec.silence_s, must)
        if not 0 <= spec.stop_grace_s <= MOST_SECONDS:  # not a number is none either
            yield Problem("stop_grace_s", spec.stop_grace_s, f"must be 0 to {MOST_SECONDS:g} s")
        if spec.resume and not self.resumes:
            yield Problem("resume", spec.resume, f"its script resumes by itself {way}")
        if not self.elastic and spec.min_workers != spec.max_workers:
            yield Problem("min_workers", spec.min_workers, f"must be max_workers, {spec.max_workers}, {way}")
        yield from self._shape_problems(spec, way)

    def _shape_problems(self, spec: TaskSpec, way: str) -> Iterator[Problem]:
        if spec.layouts or spec.layout.replica_workers > 1:
            yield Problem("layout", "given", f"its script shares out its model by itself {way}")

    def silence_s(self, spec: TaskSpec) -> float:
        """Return for how long its ranks may all show no sign of life, in seconds; 0: for ever."""
        return spec.silence_s

    def wait_s(self, spec: TaskSpec, usual_s: float) -> float | None:
        """Return how long is waited for a worker to start, or for all to meet; None: for ever."""
        del spec
        return usual_s

    def launch(self, layout: ParallelLayout) -> dict[str, Any]:
        """Return how the standby is to run a worker of such a replica."""
        return {"runner": self.runner, "ahead": self.ahead, "parts": layout.replica_workers > 1}


class InSession(HealingWay):
    """Workers that live stay, and go on in the iteration that failed; the script says how far it is."""

    counts_iterations = tracks_states = saves_states = resumes = True
    waits_for_replacements = False

    def problems(self, spec: TaskSpec) -> Iterator[Problem]:
        """Yield nothing: fields of other ways don't count."""
        del spec
        yield from ()

    def silence_s(self, spec: TaskSpec) -> float:
        """Return no limit: a session says itself how far it is."""
        del spec
        return 0.0


class ByRestart(HealingWay):
    """The program is run again on all ranks, and goes on from its own checkpoints."""

    runs_again = runs_any = True
    runner = "unicron.train.restart.launcher"

    def wait_s(self, spec: TaskSpec, usual_s: float) -> float | None:
        """Return how long: its programs may take so long to end."""
        return usual_s + spec.stop_grace_s


class InPlace(HealingWay):
    """Survivors keep running, and a replacement takes the rank of the lost one; all ranks are one replica's places."""

    saves_states = begins_again = seats_ranks = may_be_uncarried = True
    elastic = False
    runner = "unicron.train.inplace.launch"
    ahead = (runner,)

    def layout(self, workers: int) -> ParallelLayout | None:
        """Return the one whose places are the ranks."""
        return ParallelLayout(shard=workers)

    def _shape_problems(self, spec: TaskSpec, way: str) -> Iterator[Problem]:
        if spec.layouts or spec.layout != self.layout(spec.max_workers):
            yield Problem("layout", "given", f"its script shares out its work by itself {way}")
        program = spec.command[1:2] if spec.command[1:2] != ["-m"] else spec.command[2:3]
        if Path(spec.command[0]).name not in PYTHON or not program or program[0].startswith("-"):
            must = f"must be `python SCRIPT.py ...` or `python -m MODULE ...` {way}"
            yield Problem("command", " ".join(spec.command), must)

    def wait_s(self, spec: TaskSpec, usual_s: float) -> float | None:
        """Return how long: before it joins its first membership, a worker runs all of its script before the loop.

        Who hangs there is found by its silence, so this is for who is busy for ever.
        """
        return max(usual_s, 2 * spec.silence_s) if spec.silence_s else None

    def launch(self, layout: ParallelLayout) -> dict[str, Any]:
        """Return how: places of its replica are ranks, and no parts of a model."""
        return {**super().launch(layout), "parts": False}


WAYS: dict[Healing, HealingWay] = {
    Healing.SESSION: InSession(),
    Healing.RESTART: ByRestart(),
    Healing.IN_PLACE: InPlace(),
}


def way_of(spec: TaskSpec) -> HealingWay:
    """Return a task's way of healing; that of a session where this version doesn't know it."""
    return WAYS.get(spec.heal, WAYS[Healing.SESSION])


def healed_by(heal: Healing, spec: TaskSpec) -> TaskSpec:
    """Return a task healed in that way, with what follows from it."""
    way = WAYS[heal]
    iterations = spec.iterations if way.counts_iterations else UNCOUNTED
    return replace(spec, heal=heal, iterations=iterations, layout=way.layout(spec.max_workers) or spec.layout)


def complete(given: dict[str, Any]) -> None:
    """Add to the fields of a task what follows from its way of healing, where a user has not said otherwise."""
    way, workers = WAYS.get(given.get("heal", Healing.SESSION)), given.get("max_workers", 1)
    if way is None:
        return
    if not way.counts_iterations:
        given.setdefault("iterations", UNCOUNTED)  # the task is done when its program says so
    if not way.elastic:
        given.setdefault("min_workers", workers)
    if layout := way.layout(workers):
        given.setdefault("layout", layout)


def shown_shape(spec: TaskSpec, workers: int) -> ParallelLayout:
    """Return the layout of so many workers as people know it: places that only healing knows are none."""
    return ParallelLayout().with_workers(workers) if way_of(spec).seats_ranks else spec.shape(workers)
