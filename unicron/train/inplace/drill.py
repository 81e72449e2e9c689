"""A drill: a process that takes a rank's place on trial, while the rank itself lives on.

The last rank records where a replacement would begin, what that is given by the other ranks in the next iterations, and
where it has to be after them. A *ghost* (`unicron.train.inplace.ghost`) begins there, is no member of any group, and
is given what was recorded. Whatever becomes of it, the rank goes on as if there had been no drill: a rank that could
not be replaced loses in-place healing, and nothing else.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from unicron.contracts.worker import Drilled
from unicron.snapshots.memory import SnapshotMemory, trial_name
from unicron.snapshots.trials import Trial
from unicron.train.carry.kinds import NotCarriedError
from unicron.train.groups.switched import Work
from unicron.train.inplace.recording import Called, Recording, contribution, flatten, outer, reason_of
from unicron.train.inplace.seed import Seed
from unicron.train.loops.active_loops import LoopSnapshot
from unicron.train.worker.channel import AgentChannel

FIRST, LATEST = 2, 10
"""Iterations: in which the first drill begins, and from which on it is said that no snapshot could be taken."""

AGAIN = 4
"""The next drill begins when there are so many times as many iterations, and once as the first epoch is over."""

PATIENCE_S = 10.0
"""Seconds that the end of a script waits for a trial that is under way."""

PASSED = "a trial has shown that it could, but not at each place of its loops: "
"""How a reason begins that is known of another place than the one at which a trial was passed."""

State = Callable[[], Mapping[str, Any]]
"""Returns the state that all ranks have alike, as a replacement would be given it."""


class Drill:
    """One rank's part in the drills of its script.

    Args:
        line: to the agent.
        rank: of this process.
        seed: from which a ghost grows; None where this rank is not drilled.
        on_problem: is called, by a thread, with what a trial has shown, before that is reported.

    Attributes:
        recording: that is being made; None where none is.
        problem: why another process can't take this rank's place; empty as long as no trial has shown it.
    """

    def __init__(self, line: AgentChannel, rank: int, seed: Seed | None, on_problem: Callable[[str], None]) -> None:
        self._line, self._rank, self._seed, self._on_problem = line, rank, seed, on_problem
        self.recording: Recording | None = None
        self.problem = ""
        self._due, self._epoch = FIRST, -1
        self._first_outer: list[Any] | None = None
        self._over = threading.Event()
        self._over.set()
        self._lock, self._warned = threading.Lock(), ""
        self._is_first, self._has_passed, self._refused_at = True, False, -1

    def at_snapshot(self, record: LoopSnapshot | NotCarriedError, iteration: int, epoch: int, state: State) -> None:
        """Begin or end a recording, where one is due and no trial is under way.

        Args:
            record: that this rank has just published, between two iterations.
            iteration: that comes next.
            epoch: of the membership.
            state: returns what all ranks have alike.
        """
        if isinstance(record, NotCarriedError):
            self._refused_at = iteration
        if self._seed is None or self.problem or not self._over.is_set():
            return
        if self.recording is not None and epoch != self._epoch:  # a rank was lost, and with it what was to be given
            self._drop()
        elif isinstance(record, NotCarriedError):
            if iteration >= LATEST:
                self.warn(f"{record}", iteration)
        elif self.recording is None:
            if iteration >= self._due or self._is_after_first_epoch(record):
                self._begin(record, iteration, epoch, state)
        elif self.recording.is_enough(iteration, record):
            self._end(self.recording, record, iteration, state)

    def _is_after_first_epoch(self, record: LoopSnapshot) -> bool:
        """Return whether the epoch is over in which the first drill began, and none has begun since."""
        return self._first_outer is not None and outer(record.chain) != self._first_outer

    def refuse(self, why: str) -> None:
        """Show nothing from now on: it is known already why no process can take this rank's place, and reported."""
        with self._lock:
            self.problem = why
        self._drop()

    def skip(self, why: str) -> None:
        """Report that there is no drill."""
        if self._seed is not None:
            self._stay_unproven(0, why)

    def warn(self, why: str, iteration: int = 0) -> None:
        """Report why there may be none, once."""
        if self._seed is not None and not self._warned:
            self._warned = why
            self._report(iteration, "", f"{PASSED * self._has_passed}{why}", undecided=True)

    def _begin(self, record: LoopSnapshot, iteration: int, epoch: int, state: State) -> None:
        self._epoch = epoch
        if self._due == FIRST:
            self._first_outer = outer(record.chain)
        elif outer(record.chain) != self._first_outer:
            self._first_outer = None
        if why := lacking_gpu_memory():
            self._stay_unproven(iteration, why)
            return
        try:
            self.recording = Recording(SnapshotMemory.of_worker().folder / trial_name(os.environ["UNICRON_WORKER"]))
            self.recording.begin(iteration, record, state())
        except Exception as error:  # noqa: BLE001 whatever the script's objects raise, the script goes on
            self._stay_unproven(iteration, reason_of(error))

    def _end(self, recording: Recording, record: LoopSnapshot, iteration: int, state: State) -> None:
        try:
            recording.end(iteration, record, state())
        except Exception as error:  # noqa: BLE001 likewise
            recording.problem = reason_of(error)
        self.recording = None
        if recording.problem:
            recording.remove()
            self._stay_unproven(recording.began, recording.problem)
        else:
            self._due = AGAIN * max(recording.began, 1)
            self._over.clear()
            if self._is_first:
                self._tell_begun(recording)
            threading.Thread(target=self._try, args=(recording,), name="unicron-drill", daemon=True).start()

    def _tell_begun(self, trial: Recording) -> None:
        """Report that the first trial begins, and have its outcome outlive this rank: others wait for it then."""
        begun = Drilled(iteration=trial.began, rank=self._rank, under_way=True)
        with contextlib.suppress(OSError):  # there is no room: then it is lost with this rank
            Trial(trial.folder).begin(begun)
            self._line.send(begun)

    def _try(self, trial: Recording) -> None:
        """Have ghosts run a trial, and report what comes of it."""
        verdict = self._seed.run(trial.folder, is_first=self._is_first) if self._seed is not None else {}
        trial.remove()
        with self._lock:
            if self.problem:
                self._over.set()
            if not self._over.is_set():  # else the script has ended, or it is known otherwise, and that is said
                self.problem = str(verdict.get("problem", ""))
                self._is_first = False
                self._has_passed |= not (self.problem or verdict.get("unproven"))
                if self.problem:
                    self._on_problem(self.problem)
                self._report(trial.began, self.problem, str(verdict.get("unproven", "")))
                if self._has_passed and self._warned and self._refused_at >= trial.began:  # and still is so
                    self._report(trial.began, "", f"{PASSED}{self._warned}", undecided=True)
                self._over.set()

    def _stay_unproven(self, iteration: int, why: str) -> None:
        self._drop()
        self._report(iteration, "", why)
        self._seed = None

    def _report(self, iteration: int, problem: str, unproven: str, *, undecided: bool = False) -> None:
        if unproven and (self.problem or (self._has_passed and not undecided)):
            return  # what is known from earlier is as true as before
        drilled = Drilled(iteration=iteration, rank=self._rank, problem=problem, unproven=unproven, undecided=undecided)
        self._line.send(drilled)

    def _drop(self) -> None:
        if self.recording is not None:
            self.recording.remove()
            self.recording = None

    def finish(self) -> None:
        """Wait for a trial that is under way, for a moment, as the script has come to its end."""
        self._over.wait(PATIENCE_S)
        with self._lock:
            if not (self._over.is_set() or self.problem):
                self._report(self._due // AGAIN, "", "the script had ended before the trial was over")
                self._over.set()
        self._drop()
        if self._seed is not None:
            self._seed.cut()

    # --- what the rank does meanwhile --------------------------------------------------------------------------------

    def run_collective(self, name: str, arguments: Sequence[Any], rank: int, begin: Callable[[], Work]) -> Work:
        """Begin a collective of the script's own, and record it.

        Args:
            name: of it.
            arguments: of the call.
            rank: of this process, in its group.
            begin: begins it.
        """
        recording = self.recording
        if recording is None:
            return begin()
        called = Called(name, [], [])
        recording.add_collective(called)
        recording.keep(called.given, lambda: contribution(name, arguments, rank))
        work = begin()

        def finish() -> None:
            work.wait()
            recording.keep(called.left, lambda: flatten(list(arguments)))

        return Work(finish)


def lacking_gpu_memory() -> str:
    """Return why a ghost has no room beside this rank on its GPU; empty where it has, or there is no GPU."""
    if not torch.cuda.is_available():
        return ""
    (free, _), used = torch.cuda.mem_get_info(), torch.cuda.max_memory_reserved()
    return "" if used <= free else f"its GPU has {free >> 20} MiB left, and a ghost may need {used >> 20} MiB"
