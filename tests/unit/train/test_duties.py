"""The ranks' duties before an update: comparing digests, and saving when it is due."""

import pytest

from unicron.contracts.states import ParkedSnapshot, StateLocation, StateRef
from unicron.contracts.storage import StoredState
from unicron.contracts.tasks import Member, ParallelLayout
from unicron.contracts.worker import Diverged, Membership, Unusable
from unicron.errors import StateDivergedError, UnusableStateError
from unicron.train.worker.duties import Duties, Vote, compare_votes
from unicron.train.worker.phases import Due
from unicron.train.worker.redistribute import Standing, resume
from unicron.train.worker.shell import run


@pytest.mark.parametrize(
    ("votes", "wrong", "undecided"),
    [
        ("a a a", "", False),
        ("a a b", "2", False),
        ("b a a", "0", False),
        ("a b", "1", True),
        ("a b c", "12", True),
        ("a b b c", "03", True),
        ("a b b", "0", False),
        ("a b b+", "12", True),
        ("a a b+", "2", False),
        ("b a+ a+", "12", False),
        ("a+ b+ b+", "0", False),
        ("a", "", False),
    ],
)
def test_most_of_those_who_have_it_of_themselves_are_right(votes, wrong, undecided):
    """A plus marks who has taken it from another since the last comparison."""
    found = compare_votes([Vote(ord(each[0]), each.endswith("+")) for each in votes.split()])
    assert (found.wrong, found.undecided) == (frozenset(map(int, wrong)), undecided)


NOTHING, TO_STORAGE = frozenset(), frozenset({Due.STORE})


class Shell:
    """A rank of replica 1 of three, in an iteration that takes a second, and its duties."""

    def __init__(self, *told, store_s=0.0, saves=False, save_cost_s=0.0, finite=True):
        self.told, self.done, self.time, self.store_s, self.store_asked = told, [], 0.0, store_s, 0
        self.saves, self.save_cost_s, self.finite = saves, save_cost_s, finite
        self.duties = Duties(self, self, self)

    def join(self, *standings, taken=False):
        found = resume(standings, 4, ParallelLayout(replicas=len(standings)))
        self.duties.join(found, standings, taken=taken)

    def compare(self, iteration, replicas=3):
        member = Member(worker="w", node="n", slot=0)
        place = {"rank": 1, "world_size": replicas, "layout": ParallelLayout(replicas=replicas)}
        told = Membership(epoch=2, rendezvous="", rendezvous_id="", member=member, **place)
        run(self.duties.compare(told, iteration))

    def iterate(self, saved, announced=NOTHING):
        """Finish an iteration; return what it announces, after which it does also what others have announced."""
        self.done = []
        self.duties.announce(saved=saved)
        told = list(self.done)
        self.duties.carry_out(saved=saved, announced=announced.union(told))
        return told

    def now(self):
        return self.time

    def digest(self):
        return 7

    async def gather_across_replicas(self, *numbers):
        self.done.append(numbers)
        return [self.told[0], numbers, self.told[1]]

    def send(self, message):
        self.done.append(message)

    def announce(self, due):
        self.done.append(due)

    def store(self):
        self.done.append("stores")


def standing(**fields):
    whole = {"node": "n", "iteration": 3, "has_state": True, "done": frozenset(), "todo": (), "buckets": ()}
    return Standing(**whole | fields)


def test_states_are_compared_once_somebody_took_one_and_not_otherwise():
    shell = Shell((7, 0), (7, 0))
    shell.join(standing(), standing(), standing())
    shell.compare(3)
    assert shell.done == []
    shell.join(standing(), standing(), standing(has_state=False))
    shell.compare(3)
    assert shell.done == [(7, 0)]
    shell.duties.carry_out(saved=True, announced=NOTHING)
    shell.compare(4)
    assert shell.done == [(7, 0)]


def test_what_is_due_to_one_member_is_due_to_all_until_it_is_done():
    shell = Shell()
    shell.join(standing(), standing(due=TO_STORAGE))
    assert shell.duties.due == {Due.SAVE, Due.STORE}
    shell.join(standing(due=shell.duties.due), standing(has_state=False))
    shell.join(standing(due=shell.duties.due), standing())
    assert shell.duties.due == {Due.SAVE, Due.STORE, Due.COMPARE}


def test_who_is_in_the_wrong_says_so_and_all_break_off():
    shell = Shell((9, 0), (9, 0))
    shell.join(standing(), standing(), standing(has_state=False))
    with pytest.raises(StateDivergedError, match="replica 1 has another state of place 0 than most") as raised:
        shell.compare(3)
    assert raised.value.own
    [_, told] = shell.done
    digests = ["0" * 15 + each for each in "979"]
    assert told == Diverged(epoch=2, iteration=3, place=0, replica=1, digests=digests)


def test_who_is_in_the_right_breaks_off_and_keeps_its_state():
    shell = Shell((7, 0), (-1, 0))
    shell.join(standing(), standing(), standing(has_state=False))
    with pytest.raises(StateDivergedError, match="replica 2") as raised:
        shell.compare(3)
    assert not raised.value.own
    assert shell.done == [(7, 0)]


def test_who_has_just_taken_its_state_says_so_until_that_was_compared():
    shell = Shell((7, 0), (7, 1))
    shell.join(standing(), standing(has_state=False), standing(), taken=True)
    shell.join(standing(due=shell.duties.due), standing(), standing())  # broken off before
    shell.compare(3)
    shell.duties.carry_out(saved=True, announced=TO_STORAGE)
    shell.compare(4)
    assert shell.done == [(7, 1), (7, 0)]


def saved_on(*nodes):
    places = [StateLocation(node=node, worker="w", name=name) for node, name in nodes]
    refs = [StateRef(task="t", iteration=3, place=0, location=each, size=1, checksum=b"") for each in places]
    return ParkedSnapshot(layout=ParallelLayout(), iteration=3, states=refs)


STORED = StoredState(root="/r", folder="t/step-3", iteration=3, layout=ParallelLayout())


@pytest.mark.parametrize(
    ("shelf", "source"),
    [
        (saved_on(("n2", "w.0.saved"), ("n1", "w.0.saved")), "the memory of n1, n2"),
        (ParkedSnapshot(layout=ParallelLayout(), iteration=3, states=[], stored=STORED), "/r/t/step-3"),
    ],
)
def test_a_state_from_copies_is_tried_and_told_of_where_it_is_no_good(shelf, source):
    shell = Shell()
    duties = shell.duties
    shell.join(standing(has_state=False, shelf=shelf), taken=True)
    duties.check()
    shell.finite = False
    shell.join(standing(due=duties.due), standing(has_state=False))  # broken off before it was tried
    with pytest.raises(UnusableStateError, match="not finite") as raised:
        duties.check()
    duties.reject(2, 3, raised.value)
    assert shell.done == [Unusable(epoch=2, iteration=3, copies=source, reason=str(raised.value))]
    duties.carry_out(saved=False, announced=NOTHING)
    duties.check()


@pytest.mark.parametrize("kind", ["living", "left behind"])
def test_what_somebody_has_gone_on_from_is_not_tried(kind):
    shell = Shell(finite=False)
    if kind == "living":
        shell.join(standing(), standing(has_state=False))
    else:
        shell.join(standing(has_state=False, shelf=saved_on(("n1", "w.3.kept"))), taken=True)
    assert shell.duties.due == {Due.COMPARE, Due.SAVE}
    shell.duties.check()


def test_one_replica_has_nothing_to_compare_with():
    shell = Shell()
    shell.join(standing(due=frozenset({Due.COMPARE})))
    shell.compare(3, replicas=1)
    assert shell.done == []


def test_a_state_goes_to_storage_when_that_was_announced_and_it_is_saved_and_compared():
    shell, stored = Shell(store_s=2.0), []
    for is_saved in (True, True, True, False, True, True):
        shell.time += 1.0
        announced = shell.iterate(is_saved)
        stored.append((Due.STORE in announced, "stores" in shell.done))
    # due after 2 s; not saved when it should have been: announced once more, at once
    assert stored == [(False, False), (False, False), (True, False), (True, False), (False, True), (True, False)]


def test_who_does_not_write_to_storage_announces_nothing_and_stores_nothing():
    shell = Shell()
    shell.time = 100.0
    assert shell.iterate(saved=True, announced=TO_STORAGE) == []
    assert shell.duties.due == {Due.COMPARE, Due.STORE, Due.SAVE}
    shell.duties.carry_out(saved=True, announced=NOTHING)
    assert (shell.done, shell.duties.due) == ([], frozenset())


def test_a_state_that_is_asked_for_goes_to_storage_once_whenever_the_next_would():
    shell, stored = Shell(store_s=1000.0), []
    for shell.store_asked in (0, 1, 1, 1, 0, 2, 2, 2):
        shell.iterate(saved=True)
        stored.append("stores" in shell.done)
    assert stored == [False, False, True, False, False, False, True, False]


@pytest.mark.parametrize(
    ("iteration_s", "cost_s", "saved"),
    [
        (0.4, 0.02, [1, 0, 0, 1, 0, 0, 1, 0, 0]),  # once a second is enough, though it takes more than its share
        (1.5, 3.0, [1] * 9),
        (0.01, 0.0015, [1] * 9),  # it takes next to nothing
        (0.9, 0.0035, [1] * 9),  # or no more than its share
        (0.25, 0.0035, [1, 0, 0, 0, 1, 0, 0, 0, 1]),
        (0.01, 0.02, [1] + [0] * 8),
    ],
)
def test_states_of_short_iterations_are_saved_as_often_as_that_takes_its_share(iteration_s, cost_s, saved):
    shell, found = Shell(saves=True, save_cost_s=cost_s), []
    shell.time = 100.0
    shell.join(standing())
    for _ in saved:
        shell.time += iteration_s
        found.append(Due.SAVE in shell.duties.due)
        shell.iterate(found[-1])
    assert found == saved


def test_a_state_that_should_have_been_saved_and_was_not_is_followed_by_the_next():
    shell = Shell(saves=True, save_cost_s=1.0)
    shell.join(standing())
    asked = [shell.iterate(saved) for saved in (False, False, True, False)]
    assert asked == [[Due.SAVE], [Due.SAVE], [], []]
