"""What ranks do with a state before they update it: who is in the wrong, and when something is due."""

import pytest

from unicron.contracts.states import Shelf, StateLocation, StateRef
from unicron.contracts.storage import StoredState
from unicron.contracts.tasks import Member, ParallelLayout
from unicron.contracts.worker import Diverged, Membership, Unusable
from unicron.errors import StateDivergedError, UnusableStateError
from unicron.train.duties import Duties, Vote, judge
from unicron.train.phases import Due
from unicron.train.redistribute import Standing, resume
from unicron.train.shell import run


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
    found = judge([Vote(ord(each[0]), each.endswith("+")) for each in votes.split()])
    assert (found.wrong, found.undecided) == (frozenset(map(int, wrong)), undecided)


NOTHING, TO_STORAGE = frozenset(), frozenset({Due.STORE})


class Shell:
    """A rank of replica 1 of three, in an iteration that takes a second."""

    def __init__(self, *told):
        self.told, self.done, self.time, self.store_s, self.store_asked = told, [], 0.0, 0.0, 0
        self.saves, self.save_cost_s = False, 0.0

    def now(self):
        return self.time

    def digest(self):
        return 7

    async def tally(self, *numbers):
        self.done.append(numbers)
        return [self.told[0], numbers, self.told[1]]

    def say(self, message):
        self.done.append(message)

    def announce(self, due):
        self.done.append(due)

    def store(self):
        self.done.append("stores")


def standing(**fields):
    return Standing(
        **{"node": "n", "iteration": 3, "has_state": True, "done": frozenset(), "todo": (), "buckets": (), **fields}
    )


def joined(duties, *standings, taken=False):
    duties.join(resume(standings, 4, ParallelLayout(replicas=len(standings))), standings, taken=taken)


def membership(replicas=3):
    member = Member(worker="w", node="n", slot=0)
    place = {"rank": 1, "world_size": replicas, "layout": ParallelLayout(replicas=replicas)}
    return Membership(epoch=2, rendezvous="", rendezvous_id="", member=member, **place)


def test_states_are_compared_once_somebody_took_one_and_not_otherwise():
    shell = Shell((7, 0), (7, 0))
    duties = Duties(shell)
    joined(duties, standing(), standing(), standing())
    run(duties.compare(membership(), 3))
    assert shell.done == []
    joined(duties, standing(), standing(), standing(has_state=False))
    run(duties.compare(membership(), 3))
    assert shell.done == [(7, 0)]
    duties.fulfil(saved=True, announced=NOTHING)
    run(duties.compare(membership(), 4))
    assert shell.done == [(7, 0)]


def test_what_is_due_to_one_member_is_due_to_all_until_it_is_done():
    duties = Duties(Shell())
    joined(duties, standing(), standing(due=frozenset({Due.STORE})))
    assert duties.due == {Due.SAVE, Due.STORE}
    joined(duties, standing(due=duties.due), standing(has_state=False))
    joined(duties, standing(due=duties.due), standing())
    assert duties.due == {Due.SAVE, Due.STORE, Due.COMPARE}


def test_who_is_in_the_wrong_says_so_and_all_break_off():
    shell = Shell((9, 0), (9, 0))
    duties = Duties(shell)
    joined(duties, standing(), standing(), standing(has_state=False))
    with pytest.raises(StateDivergedError, match="replica 1 has another state of place 0 than most") as raised:
        run(duties.compare(membership(), 3))
    assert raised.value.own
    [_, told] = shell.done
    digests = ["0" * 15 + each for each in "979"]
    assert told == Diverged(epoch=2, iteration=3, place=0, replica=1, digests=digests)


def test_who_is_in_the_right_breaks_off_and_keeps_its_state():
    shell = Shell((7, 0), (-1, 0))
    duties = Duties(shell)
    joined(duties, standing(), standing(), standing(has_state=False))
    with pytest.raises(StateDivergedError, match="replica 2") as raised:
        run(duties.compare(membership(), 3))
    assert not raised.value.own
    assert shell.done == [(7, 0)]


def test_who_has_just_taken_its_state_says_so_until_that_was_compared():
    shell = Shell((7, 0), (7, 1))
    duties = Duties(shell)
    joined(duties, standing(), standing(has_state=False), standing(), taken=True)
    joined(duties, standing(due=duties.due), standing(), standing())  # broken off before
    run(duties.compare(membership(), 3))
    duties.fulfil(saved=True, announced=TO_STORAGE)
    run(duties.compare(membership(), 4))
    assert shell.done == [(7, 1), (7, 0)]


def saved_on(*nodes):
    places = [StateLocation(node=node, worker="w", name=name) for node, name in nodes]
    refs = [StateRef(task="t", iteration=3, place=0, location=each, size=1, checksum=b"") for each in places]
    return Shelf(layout=ParallelLayout(), iteration=3, states=refs)


STORED = StoredState(root="/r", folder="t/step-3", iteration=3, layout=ParallelLayout())


@pytest.mark.parametrize(
    ("shelf", "source"),
    [
        (saved_on(("n2", "w.0.saved"), ("n1", "w.0.saved")), "the memory of n1, n2"),
        (Shelf(layout=ParallelLayout(), iteration=3, states=[], stored=STORED), "/r/t/step-3"),
    ],
)
def test_a_state_from_copies_is_tried_and_told_of_where_it_is_no_good(shelf, source):
    shell = Shell()
    duties = Duties(shell)
    joined(duties, standing(has_state=False, shelf=shelf), taken=True)
    shell.finite = True
    duties.check()
    shell.finite = False
    joined(duties, standing(due=duties.due), standing(has_state=False))  # broken off before it was tried
    with pytest.raises(UnusableStateError, match="not finite") as raised:
        duties.check()
    duties.reject(2, 3, raised.value)
    assert shell.done == [Unusable(epoch=2, iteration=3, copies=source, reason=str(raised.value))]
    duties.fulfil(saved=False, announced=NOTHING)
    duties.check()


@pytest.mark.parametrize("kind", ["living", "left behind"])
def test_what_somebody_has_gone_on_from_is_not_tried(kind):
    shell = Shell()
    duties = Duties(shell)
    shell.finite = False
    if kind == "living":
        joined(duties, standing(), standing(has_state=False))
    else:
        joined(duties, standing(has_state=False, shelf=saved_on(("n1", "w.3.kept"))), taken=True)
    assert duties.due == {Due.COMPARE, Due.SAVE}
    duties.check()


def test_one_replica_has_nothing_to_compare_with():
    shell = Shell()
    duties = Duties(shell)
    joined(duties, standing(due=frozenset({Due.COMPARE})))
    run(duties.compare(membership(replicas=1), 3))
    assert shell.done == []


def test_a_state_goes_to_storage_when_that_was_announced_and_it_is_saved_and_compared():
    shell = Shell()
    shell.store_s = 2.0
    duties, saved, stored = Duties(shell), [True, True, True, False, True, True], []
    for iteration, is_saved in enumerate(saved):
        shell.time, shell.done = float(iteration + 1), []
        duties.announce(saved=is_saved)
        announced = frozenset(shell.done) & {Due.STORE}
        duties.fulfil(saved=is_saved, announced=announced)
        stored.append((bool(announced), "stores" in shell.done))
    # due after 2 s; not saved when it should have been: announced once more, at once
    assert stored == [(False, False), (False, False), (True, False), (True, False), (False, True), (True, False)]


def test_who_does_not_write_to_storage_announces_nothing_and_stores_nothing():
    shell = Shell()
    duties = Duties(shell)
    shell.time = 100.0
    duties.announce(saved=True)
    duties.fulfil(saved=True, announced=TO_STORAGE)
    assert duties.due == {Due.COMPARE, Due.STORE, Due.SAVE}
    duties.fulfil(saved=True, announced=NOTHING)
    assert (shell.done, duties.due) == ([], frozenset())


def test_a_state_that_is_asked_for_goes_to_storage_once_whenever_the_next_would():
    shell = Shell()
    shell.store_s = 1000.0
    duties, stored = Duties(shell), []
    for asked in (0, 1, 1, 1, 0, 2, 2, 2):
        shell.store_asked, shell.done = asked, []
        duties.announce(saved=True)
        duties.fulfil(saved=True, announced=TO_STORAGE if Due.STORE in shell.done else NOTHING)
        stored.append("stores" in shell.done)
    assert stored == [False, False, True, False, False, False, True, False]


@pytest.mark.parametrize(
    ("iteration_s", "cost_s", "saved"),
    [
        (0.4, 0.02, [1, 0, 0, 1, 0, 0, 1, 0, 0]),  # once a second is enough, though it takes more than its share
        (1.5, 3.0, [1] * 9),
        (0.01, 0.0001, [1] * 9),  # it takes no more than its share
        (0.01, 0.0015, [1] * 9),  # or next to nothing
        (0.1, 0.0035, [1, 0, 0, 0, 1, 0, 0, 0, 1]),
        (0.01, 0.02, [1] + [0] * 8),
    ],
)
def test_states_of_short_iterations_are_saved_as_often_as_that_takes_its_share(iteration_s, cost_s, saved):
    shell, found = Shell(), []
    shell.saves, shell.save_cost_s, shell.time, duties = True, cost_s, 100.0, Duties(shell)
    joined(duties, standing())
    for _ in saved:
        shell.time, shell.done = shell.time + iteration_s, []
        found.append(Due.SAVE in duties.due)
        duties.announce(saved=found[-1])
        duties.fulfil(saved=found[-1], announced=frozenset(shell.done))
    assert found == saved


def test_a_state_that_should_have_been_saved_and_was_not_is_followed_by_the_next():
    shell, asked = Shell(), []
    shell.saves, shell.save_cost_s, duties = True, 1.0, Duties(shell)
    joined(duties, standing())
    for saved in (False, False, True, False):
        shell.done = []
        duties.announce(saved=saved)
        duties.fulfil(saved=saved, announced=frozenset(shell.done))
        asked.append(shell.done)
    assert asked == [[Due.SAVE], [Due.SAVE], [], []]
