"""The core of a worker: phases, states that can't be had, and messages to the agent."""

import functools
import random
from collections import defaultdict

import msgspec
import pytest
from helpers.waiting import elapse
from unicron_simulator.storms import resources
from unicron_simulator.storms.collectives import SimulatedGroup
from unicron_simulator.storms.training import INFINITE, Trainer

from unicron.clock import VirtualClock
from unicron.contracts import worker as wire
from unicron.contracts.commands import StartWorker
from unicron.contracts.states import ParkedSnapshot, StateLocation, StateRef
from unicron.contracts.tasks import Breakage, Member, ParallelLayout, TaskSpec
from unicron.errors import GroupBrokenError, StateTransferError
from unicron.train.worker.iteration import WorkerCore
from unicron.train.worker.phases import MOVES, IterationPhase, Move
from unicron.train.worker.shell import Shell, run

SPEC = TaskSpec(name="t", command=["true"], microbatches=4, iterations=50)
WHOLE, PAIR = ParallelLayout(), ParallelLayout(tensor=2)


class Full(Trainer):
    """A worker whose node has no room for its state."""

    why = "no room"

    async def export(self, place, iteration, *, taken=False, kept=False):
        raise StateTransferError(f"{self.why} on {self.host.name}")


class Asking(Trainer):
    """A worker that notes how much it has to do, and whether its backward pass may begin to reduce."""

    asked = ()

    async def _beside(self, what):
        if what.startswith("compute"):
            self.asked = (*self.asked, (len(self.core.todo), self.core.overlaps))
        return await super()._beside(what)


class Slow(Trainer):
    """A worker that takes long to save, and notes how many updates were made meanwhile."""

    missed = ()

    async def _save_state(self, ref, _):
        await elapse(3.0)
        self.missed = (*self.missed, self._updates - ref.iteration)


class Place:
    """Nodes and their agents, as far as workers see them; also who is told of updates."""

    def __init__(self):
        self.groups, self.workers, self.said_by, self.lies, self.saved = {}, {}, defaultdict(list), {}, {}
        self.name, self.lacks = "", set()

    def lacking(self, what):
        return resources.explain(what) if (self.name, what) in self.lacks else ""

    def start(self, name, kind=Trainer, place=0, layout=WHOLE):
        host = Place()
        host.__dict__.update(self.__dict__, name=f"node-of-{name}", kept=self.lies)
        command = StartWorker(node=host.name, slot=0, worker=name, task="t", spec=SPEC, place=place, layout=layout)
        self.workers[name] = kind(command, host, self, random.Random(name))

    def regroup(self, epoch, *names, **more):
        for rank, name in enumerate(names):
            at = {"rendezvous": "node:1", "rendezvous_id": "t", "rank": rank, "world_size": len(names)}
            member = Member(worker=name, node=f"node-of-{name}", slot=0)
            self.workers[name].receive_membership(wire.Membership(epoch=epoch, member=member, **at, **more))

    def deliver_to_agent(self, worker, message):
        self.said_by[worker].append(message)
        return True

    def meeting(self, place, name, size):
        return self.groups.setdefault(name, SimulatedGroup(size))

    def hands_over(self, ref):
        return ref.location.name.endswith(".state") or ref.location.name in self.kept

    def exited(self, *_, **__):
        """Pass over what nobody looks at here."""

    joined = counted = compared = exited

    def check(self, holds, otherwise):
        assert holds, otherwise

    def stepped(self, worker, iteration, gradients):
        assert all(gradient == dict.fromkeys(range(SPEC.microbatches), 1) for gradient in gradients)

    def of(self, worker, kind):
        return [message for message in self.said_by[worker] if isinstance(message, kind)]


def play(script):
    """Run `script(place)` in virtual time; return the place."""
    place = Place()

    async def run():
        await script(place)
        for worker in place.workers.values():
            worker.end(None, 9, silently=True)

    VirtualClock(0.0).run(run())
    return place


async def meet(place, epoch, names="ab", layout=WHOLE, kinds=(), trains_s=2.0, **more):
    """Have workers form a group, and start those that there are not yet; `kinds` has those that are no plain ones."""
    for rank, name in enumerate(names):
        if name not in place.workers:
            place.start(name, dict(kinds).get(name, Trainer), rank % layout.replica_workers, layout)
    await elapse(1.0)
    shape = {} if layout is WHOLE else {"layout": layout.with_workers(len(names))}
    place.regroup(epoch, *names, **shape, **more)
    await elapse(trains_s)


def test_only_the_backward_pass_of_the_last_microbatch_may_begin_to_reduce():
    place = play(lambda place: meet(place, 0, kinds={"a": Asking}))
    assert set(place.workers["a"].asked) == {(2, False), (1, True)}


def test_nobody_updates_what_is_still_being_saved():
    async def script(place):
        await meet(place, 0, kinds={"a": Slow, "b": Slow})
        for worker in place.workers.values():
            worker.save_from_now(wire.Save(on=True))
        await elapse(10.0)

    assert set(play(script).workers["a"].missed) == {0}


def test_a_state_that_its_first_holder_can_t_lay_out_is_taken_from_the_next():
    async def script(place):
        await meet(place, 0, kinds={"b": Full})
        await meet(place, 1, "abcd")  # rank 2 asks rank 0 first, and rank 3 rank 1, which has no room

    place = play(script)
    assert [place.of(name, wire.Joined)[-1].state_from for name in "abcd"] == ["", "", "a", "a"]
    assert place.of("d", wire.Iterated), "and it goes on"


def test_where_no_holder_can_lay_its_state_out_all_are_told_why_and_nobody_hangs():
    async def script(place):
        await meet(place, 0, "a", kinds={"a": Full})
        await meet(place, 1)
        for name in "ab":
            [broken] = place.of(name, wire.Broken)
            assert (broken.epoch, broken.broke) == (1, Breakage.STATE)
            assert broken.error == "no holder could hand its state to ranks [1]: no room on node-of-a"
        await meet(place, 2, "a")

    place = play(script)
    assert [joined.epoch for joined in place.of("a", wire.Joined)] == [0, 2], (
        "without the one that lacks it all goes on"
    )
    assert place.of("a", wire.Iterated)[-1].epoch == 2


def test_who_lacks_a_state_for_which_there_is_no_room_tells_that_and_the_others_go_on_without():
    async def script(place):
        await meet(place, 0, "a")
        place.lacks.add(("node-of-a", resources.ROOM))
        await meet(place, 1, "ab")
        [told], [lacks] = (place.of(name, wire.Broken) for name in "ab")
        assert (told.broke, lacks.broke) == (Breakage.STATE, Breakage.LACK)
        assert "the machine lacks room; make room there" in lacks.error
        await meet(place, 2, "a")

    assert play(script).of("a", wire.Iterated)[-1].epoch == 2


def test_who_lacks_what_a_connection_takes_tells_that_and_the_others_that_they_were_left():
    async def script(place):
        await meet(place, 0)
        place.lacks.add(("node-of-b", resources.PORTS))
        await meet(place, 1)
        [left], [lacks] = (place.of(name, wire.Broken) for name in "ab")
        assert (left.broke, lacks.broke) == (Breakage.GROUP, Breakage.LACK)
        assert "the machine lacks ports; widen" in lacks.error

    play(script)


def test_a_group_that_breaks_is_told_unless_a_newer_membership_is_why():
    async def script(place):
        await meet(place, 0)
        await meet(place, 1)
        assert not place.of("a", wire.Broken)
        place.workers["b"].end(None, 9)
        await elapse(1.0)

    [broken] = play(script).of("a", wire.Broken)
    assert broken.broke is Breakage.GROUP
    assert broken.error == "a peer has left", "not only once this rank comes to a collective with it"


# --- a layout that changes -------------------------------------------------------------------------------------------


async def left_behind(place):
    """Have two replicas leave their state behind; return the shelf."""
    await meet(place, 0)
    await meet(place, 1, leaving=True)
    states = [message.state for name in "ab" for message in place.of(name, wire.Kept)]
    return ParkedSnapshot(layout=ParallelLayout(), iteration=states[0].iteration, states=states)


def test_who_leaves_finishes_the_iteration_and_leaves_its_state_behind_once():
    async def script(place):
        shelf = await left_behind(place)
        last = place.of("a", wire.Iterated)[-1].iteration
        assert [(ref.iteration, ref.place) for ref in shelf.states] == [(last + 1, 0)] * 2
        assert place.of("b", wire.Iterated)[-1].iteration == last
        [_, joined] = place.of("a", wire.Joined)
        assert joined.iteration in {last, last + 1}, "no further than the iteration at hand"
        assert len(place.lies) == 2

    play(script)


def test_who_is_to_go_on_after_all_takes_back_what_it_left():
    async def script(place):
        shelf = await left_behind(place)
        await meet(place, 2)
        assert place.lies == {}
        assert place.of("a", wire.Joined)[-1].iteration == shelf.iteration
        assert place.of("a", wire.Iterated)[-1].iteration > shelf.iteration

    play(script)


def test_who_finds_no_room_for_what_it_leaves_behind_says_so_and_tries_ever_more_rarely_until_there_is_some():
    async def script(place):
        await meet(place, 0)
        place.lacks.add(("node-of-a", resources.ROOM))
        await meet(place, 1, leaving=True)
        await elapse(100.0)
        assert len(place.of("b", wire.Kept)) == 1
        assert not place.of("a", wire.Kept)
        told = place.of("a", wire.Unprotected)
        assert len(told) == 7, "after 1, 2, 4, 8, 16 and 32 s"
        assert all("the machine lacks room; make room there" in each.reason for each in told)
        place.lacks.clear()
        await elapse(60.0)
        assert [each.state.iteration for each in place.of("a", wire.Kept)] == [place.workers["a"].core.iteration]
        assert not [each for name in "ab" for each in place.of(name, wire.Broken)], "nobody is to be blamed"

    play(script)


def test_who_waits_for_room_goes_on_in_a_newer_membership_at_once():
    async def script(place):
        await meet(place, 0)
        place.lacks |= {("node-of-a", resources.ROOM), ("node-of-b", resources.ROOM)}
        await meet(place, 1, leaving=True)
        await elapse(40.0)
        await meet(place, 2)
        assert place.of("a", wire.Iterated)[-1].epoch == 2

    play(script)


def test_workers_of_another_layout_go_on_with_what_was_left():
    async def script(place):
        shelf = await left_behind(place)
        await meet(place, 3, "cd", PAIR, shelf=shelf)
        assert [place.of(each, wire.Joined)[-1].state_from for each in "cd"] == ["a", "a"]
        assert place.of("c", wire.Iterated)[0].iteration == shelf.iteration
        assert place.workers["d"].core.has_state

    play(script)


@pytest.mark.parametrize("later", [0.0, 0.05, 0.1, 0.15, 0.2])
def test_what_a_gpu_computed_as_its_replica_broke_does_not_count(later):
    async def script(place):
        await meet(place, 0, "abcd", PAIR, trains_s=2.0 + later)
        place.workers["a"]._replica.end("reset by a switch")  # all ranks live, and none notices within a microbatch
        await elapse(1.0)
        place.regroup(1, *"abcd", layout=PAIR.with_workers(4))
        await elapse(3.0)

    assert play(script).of("a", wire.Iterated)[-1].epoch == 1


class Unconfirmed:
    """A shell whose group breaks once buckets were shared: what came of that may be noise."""

    async def share(self, bucket, replica):
        """Have a bucket, as far as one can see."""

    async def confirm(self):
        raise GroupBrokenError("a peer has left")


def test_a_bucket_of_others_that_nobody_has_confirmed_is_not_said_to_be_had():
    core = WorkerCore(Shell(*3 * [Unconfirmed()]), 5, 4)
    core.membership = msgspec.structs.replace(core.membership, rank=0, world_size=2, layout=WHOLE.with_workers(2))
    core._reduced = [True, True, False]
    with pytest.raises(GroupBrokenError):
        run(core._share([0, 1, None]))
    assert core._reduced == [True, False, False], "its own it has for sure"


@pytest.mark.parametrize(
    ("phase", "iteration", "told"),
    [
        (IterationPhase.OPEN, 4, True),
        (IterationPhase.REDUCED, 3, True),
        (IterationPhase.REDUCED, 4, False),
        (IterationPhase.BETWEEN, 4, True),
        (IterationPhase.BETWEEN, 5, False),
    ],
)
def test_that_a_peer_has_left_is_told_as_long_as_something_is_to_come_of_it(phase, iteration, told):
    shell = Recording()
    core = WorkerCore(Shell(*3 * [shell]), 5, 4)
    core.phase, core.iteration = phase, iteration
    core.peer_left(core.epoch - 1)
    core.peer_left(core.epoch)
    core.peer_left(core.epoch)
    assert shell.calls == ["Broken"] * told


class BreaksMidway:
    """A shell whose group breaks in the second of three buckets."""

    buckets, is_asynchronous = 3, False

    def begin(self, iteration, buckets):
        self.begun = list(buckets)

    async def reduce(self, bucket):
        if bucket == 1:
            raise GroupBrokenError("a peer has left")


@pytest.mark.parametrize(("workers", "kept"), [(1, [True, False, False]), (2, [False] * 3)])
def test_a_sum_that_a_breaking_replica_may_have_had_noise_in_is_not_kept(workers, kept):
    core = WorkerCore(Shell(*3 * [BreaksMidway()]), 5, 4)
    core._replica.size, core._reduced = workers, [False] * 3
    with pytest.raises(GroupBrokenError):
        run(core._reduce_buckets())
    assert (core._gradients.begun, core._reduced) == ([0, 1, 2], kept)


class Unsettled(BreaksMidway):
    """A shell whose group is whole, while something inside of its replica was interrupted."""

    async def reduce(self, bucket):
        """Sum, as far as one can see."""

    async def settle(self):
        raise GroupBrokenError("a collective was interrupted")

    async def confirm(self):
        raise AssertionError("others would take noise for a sum")


def test_a_rank_that_may_have_computed_noise_confirms_no_sum_to_other_replicas():
    core = WorkerCore(Shell(*3 * [Unsettled()]), 5, 4)
    core._replica.size, core._reduced = 2, [False] * 3
    with pytest.raises(GroupBrokenError):
        run(core._reduce_buckets())
    assert core._reduced == [False] * 3


def test_where_a_part_is_gone_all_are_told_and_nobody_begins_anew():
    async def script(place):
        shelf = await left_behind(place)
        place.lies.clear()
        await meet(place, 3, "cd", PAIR, shelf=shelf)
        for each in "cd":
            [broken] = place.of(each, wire.Broken)
            assert broken.error.startswith("what was left of the state can't be had: place 0 can't be had from")
            assert not place.of(each, wire.Iterated)

    play(script)


# --- phases ----------------------------------------------------------------------------------------------------------


class Recording:
    """A shell that notes what it is asked for; there are no others."""

    buckets = 1
    newest = wire.NOWHERE

    def __init__(self):
        self.calls, self.sent, self.at = [], [], 0.0

    def now(self):
        return self.at

    def send(self, message):
        self.calls.append(type(message).__name__)
        self.sent.append(message)

    def __getattr__(self, name):
        return lambda *_, **__: self.calls.append(name)


@pytest.mark.parametrize("phase", IterationPhase)
def test_only_a_whole_gradient_is_stepped_and_a_worker_that_fell_behind_skips_that(phase):
    shell = Recording()
    core = WorkerCore(Shell(*3 * [shell]), 10, 4)
    core.phase = phase
    if phase in {IterationPhase.REDUCED, IterationPhase.TAKEN}:
        run(core.step())
    else:
        with pytest.raises(RuntimeError, match=r"session\.step\(\) in iteration 0 without its gradient"):
            run(core.step())
    assert ("update" in shell.calls) == (phase is IterationPhase.REDUCED)
    assert core.iteration == (phase is IterationPhase.REDUCED)


@pytest.mark.parametrize("phase", IterationPhase)
def test_a_taken_state_is_loaded_between_two_iterations_and_then_only(phase):
    shell = Recording()
    core = WorkerCore(Shell(*3 * [shell]), 10, 4)
    core.phase = phase
    assert core.enter()
    assert shell.calls == (["load"] if phase is IterationPhase.TAKEN else [])
    assert core.phase is (IterationPhase.OPEN if phase is IterationPhase.TAKEN else phase)


@pytest.mark.parametrize(("late", "moved", "seconds"), [(False, False, 1.0), (True, False, 3.0), (True, True, 1.0)])
def test_an_iteration_takes_from_update_to_update_unless_it_was_interrupted(late, moved, seconds):
    shell = Recording()
    core = WorkerCore(Shell(*3 * [shell]), 10, 4)
    core.membership = msgspec.structs.replace(wire.NOWHERE, epoch=1)
    core.phase = IterationPhase.REDUCED
    run(core.step())
    if moved:
        core.membership = msgspec.structs.replace(wire.NOWHERE, epoch=2)
    shell.at = 2.0  # the script has done something else meanwhile
    core.enter(late=late)
    shell.at, core.phase = 3.0, IterationPhase.REDUCED
    run(core.step())
    assert [each.seconds for each in shell.sent if isinstance(each, wire.Iterated)] == [0.0, seconds]


def test_from_every_phase_a_worker_comes_to_its_next_update_and_nothing_makes_it_new_again():
    for phase in IterationPhase:
        reached, moved = {phase}, True
        while moved:
            after = reached | {to for (start, _), to in MOVES.items() if start in reached}
            reached, moved = after, after != reached
        assert {IterationPhase.OPEN, IterationPhase.REDUCED, IterationPhase.BETWEEN, IterationPhase.TAKEN} <= reached
        assert (IterationPhase.NEW in reached) == (phase is IterationPhase.NEW)
    assert {move for _, move in MOVES} == set(Move)
    assert [start for start, move in MOVES if move is Move.UPDATE] == [IterationPhase.REDUCED]


def test_a_membership_from_before_layouts_counts_each_worker_as_a_replica():
    place = play(lambda place: meet(place, 0))
    assert place.workers["b"].core.seat == (1, 0)
    assert place.workers["b"].core.membership.layout == ParallelLayout(replicas=2)


def flipped_among(names, victim, then, layout=WHOLE):
    """Play workers of which one's parameters change, and `then` another membership in the next iteration."""

    async def script(place):
        await meet(place, 0, names, layout)
        place.workers[victim].flip(b"!")
        epoch = 1
        await meet(place, epoch, then, layout)
        while any(place.of(name, wire.Broken) for name in then) and epoch < 4:
            epoch += 1
            await meet(place, epoch, then, layout)

    return play(script)


def test_who_has_another_state_than_most_takes_theirs_and_what_it_computed_does_not_count():
    place = flipped_among("abc", victim="b", then="abcd")
    [told] = place.of("b", wire.Diverged)
    assert (told.replica, told.place, told.undecided, len(told.digests)) == (1, 0, False, 4)
    assert len(set(told.digests)) == 2
    assert not any(place.of(name, wire.Diverged) for name in "acd")
    again = place.of("b", wire.Joined)[2]
    assert (again.iteration, again.state_from != "") == (told.iteration, True)
    assert again.kept < SPEC.microbatches, "the sums with its gradient in them are dropped"
    assert [each.flaw for each in place.workers.values()] == [b""] * 4
    assert place.of("b", wire.Iterated)[-1].iteration > told.iteration


def test_of_two_that_differ_the_lowest_rank_counts_and_that_is_told():
    place = flipped_among("ab", victim="a", then="abc")
    told = [*place.of("b", wire.Diverged), *place.of("c", wire.Diverged)]
    assert told
    assert all(each.undecided for each in told)
    assert not place.of("a", wire.Diverged)
    assert [each.flaw for each in place.workers.values()] == [b"!"] * 3


def test_all_places_break_off_where_one_of_them_has_another_state():
    place = flipped_among("abcdef", victim="d", then="abcdgf", layout=PAIR)  # three replicas of two places
    [told] = place.of("d", wire.Diverged)
    assert (told.replica, told.place) == (1, 1)
    assert all(place.of(name, wire.Broken) for name in "abcdfg")
    assert not any(place.of(name, wire.Diverged) for name in "abcfg")
    assert [each.flaw for each in place.workers.values()] == [b""] * 7
    assert len({place.of(name, wire.Iterated)[-1].iteration for name in "abcdfg"}) == 1


def test_nobody_begins_anew_because_the_only_state_there_is_was_given_up():
    async def script(place):
        await meet(place, 0, "abc")
        doubted = place.workers["b"]
        doubted.flip(b"!")
        place.start("d")
        await elapse(1.0)
        place.regroup(1, "a", "b", "c", "d")
        while not place.of("b", wire.Diverged):
            await elapse(0.01)
        for name in "acd":
            place.workers[name].end(None, 9)
        await meet(place, 2, "eb")

    place = play(script)
    assert [each.broke for each in place.of("e", wire.Broken)][:1] == [Breakage.STATE]
    assert not place.of("e", wire.Joined)
    [raised] = place.of("b", wire.Raised)
    assert "StateLostError: nobody here has place 0" in raised.text


def test_of_replicas_that_broke_on_both_sides_of_an_update_who_is_behind_ends_so_that_copies_are_looked_for():
    async def script(place):
        await meet(place, 0, "abcd", PAIR)
        [a, _, c, d] = place.workers.values()
        while c.core.phase is not IterationPhase.REDUCED:
            await elapse(0.01)
        d.end(None, 9)  # before the update of its replica
        while a.core.iteration == c.core.iteration:
            await elapse(0.01)
        a.end(None, 9)  # behind that of the other
        await meet(place, 1, "cb", PAIR)
        assert not [name for name in "bc" if place.of(name, wire.Raised)], "others may be on their way"
        await meet(place, 2, "cbef", PAIR)

    place = play(script)
    assert [name for name in place.workers if place.of(name, wire.Raised)] == ["c"]
    assert "StateLostError: no iteration has the states of all places" in place.of("c", wire.Raised)[0].text
    assert all(place.of(name, wire.Broken)[-1].broke is Breakage.STATE for name in "bef")


# --- gradients that are not finite -----------------------------------------------------------------------------------


class Retrying(Trainer):
    """A worker whose script wants gradients that are not finite computed again."""

    def __init__(self, *given):
        super().__init__(*given, make_core=functools.partial(WorkerCore, rule="retry"))


class Faulty(Retrying):
    """One whose device computes what is not finite in one iteration."""

    @property
    def is_sum_finite(self):
        return self.core.iteration != 3 or not self._sums


def struck(at_s=None, victim="a", layout=WHOLE, size=3):
    """Play replicas of which b's is faulty; at a time the victim dies, and the others go on."""
    names = "abcdef"[: size * layout.replica_workers]

    async def script(place):
        kinds = dict.fromkeys(names, Retrying) | {"b": Faulty}
        await meet(place, 0, names, layout, kinds, trains_s=4.0 if at_s is None else at_s)
        if at_s is not None:
            place.workers[victim].end(None, 9)
            place.regroup(1, *(name for name in names if name != victim))
            await elapse(4.0)

    return play(script)


def test_what_a_faulty_device_spoilt_is_computed_by_the_others_and_it_is_named():
    place = struck()
    told = [(each.iteration, each.rank, each.microbatches, each.suspect) for each in place.of("b", wire.NotFinite)]
    assert told == [(3, 1, [1], False), (3, 1, [1], True)]
    assert not place.of("a", wire.NotFinite) + place.of("c", wire.NotFinite)
    assert [each.iteration for each in place.of("b", wire.Iterated)][:6] == list(range(6)), "nothing is left out"


def test_with_a_replica_of_two_all_of_it_is_computed_by_another():
    place = struck(layout=PAIR, size=2)
    assert [(each.rank, each.suspect) for each in place.of("b", wire.NotFinite)] == [(1, False), (1, True)]
    assert not any(place.of(name, wire.NotFinite) for name in "acd")
    for name in "abcd":
        assert [each.iteration for each in place.of(name, wire.Iterated)][:6] == list(range(6))


@pytest.mark.parametrize("victim", "abc")
def test_whoever_dies_meanwhile_each_update_is_whole_and_all_go_on(victim):
    for at_s in range(100, 260, 2):
        place = struck(at_s / 100, victim)
        made = [[each.iteration for each in place.of(name, wire.Iterated)] for name in set("abc") - {victim}]
        last = min(made[0][-1], made[1][-1])
        assert last > 6, at_s
        assert {*made[0], *made[1]} >= {*range(last)}, at_s


class Dying(Trainer):
    """A worker that ends while it takes a state, when the others have theirs."""

    async def fetch(self, sources):
        await elapse(30.0)
        self.end(None, 9)


def test_a_state_from_copies_is_tried_by_who_took_it_before_its_membership_broke():
    async def script(place):
        location = StateLocation(node="n9", worker="z", name="z.0.saved", address="")
        bad = StateRef(task="t", iteration=7, place=0, location=location, size=0, checksum=INFINITE, layout=WHOLE)
        place.lies[location.name] = bad
        shelf = ParkedSnapshot(layout=WHOLE, iteration=7, states=[bad])
        await meet(place, 0, kinds={"b": Dying}, trains_s=60.0, shelf=shelf)
        assert place.workers["a"].core.iteration == 7
        assert not place.of("a", wire.Joined)
        await meet(place, 1, "a")

    place = play(script)
    [told] = place.of("a", wire.Unusable)
    assert (told.epoch, told.iteration, told.copies) == (1, 7, "the memory of n9")
    assert not place.of("a", wire.Iterated)
