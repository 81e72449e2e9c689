"""The loops of a script that are under way, and what is known of each loop by what has run in it.

Which loops train is learnt: those are on the stack as an iteration begins. Until the body of a loop has run once
without training it may be one of them, unless its source says for certain that it is. One that is none is left alone.
"""

from types import FrameType

from unicron.train.loops.active_loops import ActiveLoop
from unicron.train.loops.positions import RUNNING, Counted


class LoopStack:
    """The active loops, the outermost first.

    Attributes:
        active: those that are followed.
        training: places of loops that have trained, or of whose source it is certain.
        idle: places of those whose body has run without training.
    """

    def __init__(self) -> None:
        self.active: list[ActiveLoop] = []
        self.training, self.idle = set[str](), set[str]()
        self._begun: list[dict[str, int]] = [{}]

    @property
    def innermost(self) -> ActiveLoop | None:
        """The innermost active loop."""
        return self.active[-1] if self.active else None

    @property
    def is_passed(self) -> bool:
        """Whether the body around the innermost loop has trained since its snapshot: who begins there would, too."""
        return any(each.body_trained and not each.is_fed for each in self.active[:-1])

    @property
    def is_aside(self) -> bool:
        """Whether the innermost loop has not trained yet, and one around it has: that one's snapshots will do."""
        *around, at = self.active
        return at.place not in self.training and any(each.place in self.training for each in around)

    @property
    def is_drawing(self) -> bool:
        """Whether an item is just being found that a loop, or the script, asks for."""
        return bool(RUNNING) or any(each.is_drawing for each in self.active)

    @property
    def asked_by_script(self) -> Counted | None:
        """The iterator that the script itself asks for an item just now, by `next`; None where a loop does."""
        drawn = [at.iterator.iterable for at in self.active if at.is_drawing and at.iterator is not None]
        return RUNNING[0] if RUNNING and not any(each is RUNNING[0] for each in drawn) else None

    @property
    def is_consuming(self) -> bool:
        """Whether the body runs of a loop whose items are found by training."""
        return any(each.is_fed and not each.is_drawing for each in self.active)

    # --- how often loops have begun ----------------------------------------------------------------------------------

    def next_index(self, place: str) -> int:
        """Return how often the loop at a place has begun since the last snapshot of the body around it."""
        return self._begun[len(self.active)].get(place, 0)

    def count_begin(self, place: str) -> None:
        """Count that a loop begins, or is left out."""
        counts = self._begun[len(self.active)]
        counts[place] = counts.get(place, 0) + 1

    def reset_counts(self) -> None:
        """Forget how often loops have begun in the body of the innermost one: it is snapshotted now."""
        self._begun[len(self.active) :] = [{}]

    # --- entering and leaving ----------------------------------------------------------------------------------------

    def push(self, place: str, index: int, frame: FrameType, last: int | None) -> ActiveLoop:
        """Add a loop that begins, as the innermost one."""
        at = ActiveLoop(place, index, frame, last)
        self.active.append(at)
        self._begun[len(self.active) :] = [{}]
        return at

    def pop(self, depth: int) -> None:
        """Remove the loops from this depth on; note of each whether it has trained."""
        for each in self.active[depth:]:
            self.note_body(each)
        trained = any(each.place in self.training for each in self.active[depth:])
        del self.active[depth:]
        if depth:
            self.active[-1].had_inner_loop |= trained

    def find_abandoned(self, caller: FrameType, place: str = "") -> int | None:
        """Return the depth of the outermost `while` loop that the script has left; None where there is none.

        Args:
            caller: what runs now: outside of such a loop, or the frame of that is gone.
            place: of the loop whose head it is at, if it is at one.
        """
        frames = frames_of(caller)
        for depth, at in enumerate(self.active):
            if at.is_fed and not at.is_drawing:  # the rest waits until the next item is asked for
                return None
            if at.last is None:
                continue
            inside = line_of(at.place) <= (line_of(place) if place else caller.f_lineno) <= at.last
            if id(at.frame) not in frames or (at.frame is caller and not inside):
                return depth
        return None

    # --- what is learnt ----------------------------------------------------------------------------------------------

    def note_training(self) -> None:
        """Note that all active loops train; one that is just finding an item is fed by those inside."""
        for each in self.active[-1:]:
            each.body_trained = True
        for each in self.active:
            each.trains, each.is_fed = True, each.is_fed or each.is_drawing
        self.training |= {each.place for each in self.active}
        self.idle -= self.training

    def note_body(self, at: ActiveLoop) -> None:
        """Note, as a loop's body ends, whether it has trained."""
        if not at.trains and at.place not in self.training:
            self.idle.add(at.place)

    def may_train(self, place: str) -> bool:
        """Return whether the loop at a place trains, or nothing is known of it and this is no part of another's items.

        What trains in a body that is fed by training could not be followed, either.
        """
        if place in self.training:
            return True
        return place not in self.idle and self.asked_by_script is None and not self.is_consuming


def frames_of(caller: FrameType | None) -> set[int]:
    """Return the identities of a frame and of those that wait for it."""
    found = set[int]()
    while caller is not None:
        found.add(id(caller))
        caller = caller.f_back
    return found


def line_of(place: str) -> int:
    """Return the line of a place ("FILE:LINE")."""
    return int(place.rpartition(":")[2])
