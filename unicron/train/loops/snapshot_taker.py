"""Takes a rank's snapshots at points of its loops, and restores there that of the rank which it replaces."""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from unicron.exception_texts import brief
from unicron.train.carry.beside import Beside
from unicron.train.carry.kinds import NotCarriedError, NotComparedError
from unicron.train.carry.limit import TimeLimit
from unicron.train.carry.own_snapshot import Heap
from unicron.train.carry.variables import NAME, Variables, spaces_of
from unicron.train.loops.active_loops import ActiveLoop, LoopSnapshot
from unicron.train.loops.loop_stack import LoopStack
from unicron.train.loops.positions import Counted
from unicron.train.loops.program import LIBRARIES
from unicron.train.worker.injected import InjectedFault

EARLY, SMALL_BYTES = 4, 8 << 20
"""Updates before which snapshots have gradients of so many bytes: more may be added to them, which shows later."""

OFTEN, REST = 8, 50.0
"""Once there could be no snapshot at a point so often in a row, for so many times as long as it took to find that out
none is tried there again."""

_NEVER: tuple[int, float, NotCarriedError | None] = (0, 0.0, None)


class SnapshotTaker:
    """Numbers what a script has made before its loops, and takes snapshots of what has changed since.

    Args:
        stack: of the loops.

    Attributes:
        accumulates: the last snapshot contains gradients, to which more is added.
        zeroed: gradients that exist as an iteration begins are zero.
        keeps_gradients: all snapshots contain gradients: the script adds to those of an iteration before.
        pending: a gradient was reduced, and no update has used it.
        updates: made so far.
        trained_versions: returns a sum that grows as parameters are changed that are trained.
        beside: large tensors that another rank gives.
        lacking: why variables could not go along to this rank, which does not have them, by name.
    """

    def __init__(self, stack: LoopStack) -> None:
        self.beside, self._stack = Beside(), stack
        self._heap: Heap | None = None
        self.lacking = dict[str, str]()
        self._modules: dict[str, dict[str, Any]] = {}
        self.accumulates = self.zeroed = self.keeps_gradients = self.pending = False
        self.updates, self._versions = 0, (0, 0)
        self.trained_versions: Callable[[], int] = lambda: 0
        self._limit, self._too_slow = TimeLimit(), None
        self._refused = dict[tuple[str, int], tuple[int, float, NotCarriedError | None]]()

    _too_slow: NotCarriedError | None

    # --- numbering ---------------------------------------------------------------------------------------------------

    def number(
        self,
        caller: FrameType,
        carried: Iterable[Any],
        changes: Iterable[Any],
        own: dict[str, Any],
        copied: Collection[str],
    ) -> NotCarriedError | None:
        """Number all that there is, as the first loop begins; return why no snapshot can be taken, if so.

        Args:
            caller: runs the loop.
            carried: objects whose state is transferred by other means.
            changes: those that loading it changes.
            own: those that go with the snapshots though no variable leads to them, by name.
            copied: evidence of tensors that no process makes by itself; copies of them are carried, too.
        """
        modules = {name: getattr(each, "__dict__", {}) for name, each in sys.modules.copy().items()}
        modules |= {caller.f_globals["__name__"]: caller.f_globals}
        self._modules = {name: each for name, each in modules.items() if NAME in each and name not in LIBRARIES}
        self._modules["optimizers"] = own
        heap = Heap(carried, self.beside)
        try:
            heap.number_objects(self.spaces(caller))
            heap.keep_states(changes)
            heap.carry_copies(copied)
        except NotCarriedError as error:
            return error
        self._heap = heap
        self.note_parameters()
        return None

    def forget(self) -> None:
        """Forget all numbers: the loop has ended without training."""
        self._heap = None

    def number_before(self, caller: FrameType, level: str) -> None:
        """Number what was made on the way to a loop, as a new rank makes it, too."""
        if self._heap is not None:
            self._heap.number_objects(self.spaces(caller), level)

    def number_made(self, generator: Counted) -> None:
        """Number what a generator has made before the loop in which it waits between items, as a new rank's does."""
        for level, name, each in self._generators():
            if each is generator and self._heap is not None:
                self._heap.number_objects({name: each.variables}, level)

    def forget_levels(self, levels: Iterable[str], caller: FrameType, *, arriving: bool) -> None:
        """Forget what was made before loops that have ended, by the beginnings of their levels."""
        if self._heap is not None:
            self._heap.forget_levels(levels)
            if not arriving:
                self._heap.record_present(self.spaces(caller))

    def spaces(self, caller: FrameType) -> Mapping[str, Variables]:
        """Return the variables of the script, as a function of it runs: also of generators in which loops wait."""
        return spaces_of(caller, self._modules) | self._generator_spaces()

    def _generator_spaces(self) -> dict[str, Variables]:
        found = ((name, each) for *_, name, each in self._generators() if each.can_be_entered)
        return {name: each.variables for name, each in found}

    def _generators(self) -> Iterator[tuple[str, str, Counted]]:
        """Yield the generators by which loops find their items, each with its level, and the name of its variables."""
        for depth, at in enumerate(self._stack.active):
            inside = at.iterator.generators() if at.iterator is not None and not at.is_fed else ()
            for number, each in enumerate(inside):
                yield f"{depth}.{at.place}#{at.index} {number}", f"what {at.place} goes over, {number}", each

    # --- gradients and parameters ------------------------------------------------------------------------------------

    @property
    def can_take(self) -> bool:
        """Whether the script is numbered, so that snapshots can be taken."""
        return self._heap is not None

    def written(self) -> str:
        """Return which large array or tensor was written to, that no snapshot has; empty where none was."""
        try:
            if self._heap is not None:
                self._heap.find_written()
        except NotCarriedError as error:
            return str(error)
        return ""

    @property
    def has_other_parameters(self) -> bool:
        """Whether parameters were changed since the last snapshot, and not by an optimizer."""
        return self._heap is not None and self._versions != (self._heap.versions, self.trained_versions())

    @property
    def has_other_trained(self) -> bool:
        """Whether trained parameters were: others, such as those of a key encoder, may be in each forward pass."""
        return self._heap is not None and self._versions[1] != self.trained_versions()

    @property
    def has_other_given(self) -> bool:
        """Whether what a new process gets from the first rank has changed since all was numbered."""
        try:
            return self._heap is not None and (self.has_other_parameters or self._heap.given_has_changed)
        except NotCarriedError:  # nobody can tell
            return True

    def note_parameters(self) -> None:
        """Note that a snapshot is of the parameters as they are now."""
        self._versions = (self._heap.versions, self.trained_versions()) if self._heap is not None else (0, 0)

    @property
    def missing_gradients(self) -> list[torch.nn.Parameter]:
        """Parameters whose gradient was not in the snapshot where this rank began, though it had one."""
        return self._heap.missing_gradients if self._heap is not None else []

    # --- snapshots ---------------------------------------------------------------------------------------------------

    def take(
        self,
        at: ActiveLoop,
        caller: FrameType,
        point: int,
        dead: Iterable[str],
        *,
        leaves: bool,
        needed: bool,
        lasts: bool,
    ) -> bool:
        """Take this rank's snapshot at a point of a loop's body.

        Args:
            at: the loop.
            caller: what runs it.
            point: in its body.
            dead: variables that are set anew before anybody reads them.
            leaves: it is left where it outlives the rank; else it is on the way to another, further inside.
            needed: where there can be none, that is noted in the loop; else nothing is done.
            lasts: the body takes long.

        Returns:
            whether it is of this point; if not, all is as it was.
        """
        early = self.updates < EARLY and self._heap is not None and self._heap.gradient_bytes <= SMALL_BYTES
        accumulates = (self.keeps_gradients or self.pending or early) if leaves else self.accumulates
        lately = self._refused_lately(at.place, point)
        if lately and not needed:
            return False
        snapshot, refused = at.snapshot, self._too_slow or lately
        if self._heap is not None and not refused:
            began = time.monotonic()
            try:
                with self._limit.limited():
                    spaces = self.spaces(caller)
                    never = {name: set(dead) for name, space in spaces.items() if space.belongs_to(caller)}
                    snapshot = self._heap.snapshot(
                        spaces,
                        never,
                        gradients=leaves and accumulates,
                        zeroed=self.zeroed,
                        ends=leaves,
                        at=(at.place, point),
                    )
                    self._refused.pop((at.place, point), None)
                    if lasts:
                        self._heap.record_present(spaces)
            except InjectedFault:
                raise
            except Exception as raised:  # noqa: BLE001 whatever a script's objects raise, it goes on without a snapshot
                error = raised if isinstance(raised, NotCarriedError) else NotCarriedError(brief(raised))
                if self._limit.exceeded:  # it would in each iteration
                    self._too_slow = error
                if not isinstance(error, NotComparedError):
                    now = time.monotonic()
                    often = 1 + self._refused.get((at.place, point), _NEVER)[0]
                    self._refused[at.place, point] = often, now + REST * (now - began), error
                if not needed:
                    return False
                refused = error
        at.record_point(point)
        at.snapshot, at.refusal, self.accumulates = snapshot, refused, accumulates
        return True

    def _refused_lately(self, place: str, point: int) -> NotCarriedError | None:
        """Return why there was no snapshot at a point, where that was found out just now.

        It takes several times as long as a snapshot does, and mostly is so in each iteration.
        """
        often, until, error = self._refused.get((place, point), _NEVER)
        return error if often >= OFTEN and time.monotonic() < until else None

    def record(self, active: Iterable[ActiveLoop]) -> LoopSnapshot | NotCarriedError:
        """Return a record of where this rank is, or why there is none."""
        loops = list(active)
        if refused := next((each.refusal for each in loops if each.refusal is not None), None):
            return refused
        try:
            positions = [self._pack_iterator(each) for each in loops]
        except NotCarriedError as error:
            return error
        return LoopSnapshot([each.location.where for each in loops], positions, [each.snapshot for each in loops])

    def _pack_iterator(self, at: ActiveLoop) -> bytes:
        position = at.iterator
        if position is None or self._heap is None or at.is_fed:
            return b""
        try:
            return self._heap.pack(position.position(), position.own)
        except NotCarriedError as error:
            raise NotCarriedError(f"{error} (what the loop at {at.place} goes over)") from error
        except Exception as error:
            raise NotCarriedError(
                f"what the loop at {at.place} goes over, a {type(position.iterable).__name__}: {error}"
            ) from error

    def advance(self, position: Counted, data: bytes) -> Any:
        """Advance a loop's iterator to a position in another process; return the item whose body runs there.

        Raises:
            NotCarriedError: it can't be brought there.
        """
        if self._heap is None:
            raise NotCarriedError("nothing is numbered here")
        try:
            saved = self._heap.unpack(data, position.own)
        except NotCarriedError:
            raise
        except Exception as error:
            raise NotCarriedError(f"a position can't be read here: {brief(error)}") from error
        return position.advance_to(saved)

    def restore(self, caller: FrameType, snapshot: bytes, *, ends: bool) -> None:
        """Restore a snapshot of the rank that this one replaces; where it `ends`, this one goes on from there.

        Raises:
            NotCarriedError: this process has made something else on the way.
        """
        if self._heap is None or not snapshot:
            raise NotCarriedError("there is no snapshot of the rank that is replaced, or none can be taken here")
        self.accumulates = self._heap.restore(self.spaces(caller), snapshot, ends=ends)
        self.lacking |= self._heap.lacking
        self._heap.record_present(self.spaces(caller))
