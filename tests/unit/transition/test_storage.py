"""Checkpoints on storage as the transition service sees them: how often, when complete, and the search for them."""

import msgspec
import pytest
from helpers.transition import Cluster, failure, of, slot, spec
from unicron_transition.snapshots.storage import ATTEMPTS, CHANGE, LEAST_S, PRIOR_S
from unicron_transition.state import TransitionState

from unicron.contracts import events
from unicron.contracts.commands import CommitCheckpoint, FindCheckpoint, Regroup, SaveStates, StartWorker, StopWorker
from unicron.contracts.failures import Severity
from unicron.contracts.storage import Saving, StoredFile, StoredPart, StoredState
from unicron.contracts.tasks import ParallelLayout, TaskState
from unicron.snapshots.interval import daly

ROOT = "s3://bucket/folder"
PAIR = ParallelLayout(tensor=2, replicas=1)


class Stage(Cluster):
    """A task "a" that computes on n1 and n2, with a storage; n3 is there for it, too.

    Attributes:
        told: what the core has said.
    """

    def __init__(self, **fields):
        self.told = []
        super().__init__({"n1": 1, "n2": 1, "n3": 1}, [spec("a", **{"checkpoints": ROOT, "max_workers": 2, **fields})])
        self.settle(a=[slot("n1:0"), slot("n2:0")])

    def take(self, message):
        self.told.append(message)
        super().take(message)

    def take_in_memory(self, message):
        super().take_in_memory(message)
        if isinstance(message, SaveStates):  # the honest cluster ends each of them by itself
            self.told.append(message)

    def of(self, kind, since=0):
        return of(kind, self.told[since:])

    @property
    def storage(self):
        return self.run("a").snapshots.storage

    def stored(self, place=0, attempt="11111111", iteration=4, node="n1", seconds=3.0, layout=None):
        index, data = (StoredFile(name=f"{attempt}-{place}-{each}", size=1, checksum="x") for each in ("i", "d"))
        saving = Saving(root=ROOT, task="a", iteration=iteration, layout=layout or self.layout, attempt=attempt)
        part = StoredPart(place=place, index=index, data=data)
        return self.tell(events.PartStored(node=node, task="a", saving=saving, part=part, seconds=seconds))

    @property
    def layout(self):
        return self.run("a").membership.layout

    def lose_all_memory(self):
        """Lose n1 and n2, where all copies are, and wait in vain for them."""
        self.lose("n1")
        self.lose("n2")
        self.settle(a=[slot("n3:0")])

    def unusable(self, iteration):
        first, epoch = self.processes[self.group("a")[0]], self.run("a").membership.epoch
        told = {"epoch": epoch, "iteration": iteration, "copies": ROOT, "reason": "not finite"}
        return self.tell(events.StateUnusable(**first.who, **told))

    def answers(self, order, stored=None):
        found = {"search": order.search, "stored": stored, "skipped": []}
        return self.tell(events.CheckpointFound(node=order.node, task="a", **found))


@pytest.fixture
def stage():
    return Stage()


@pytest.fixture
def pair():
    return Stage(layout=PAIR, min_workers=2)


def checkpoint(iteration=4, layout=None):
    layout = layout or ParallelLayout(replicas=2)
    return StoredState(root=ROOT, folder=f"step-{iteration:06}", iteration=iteration, layout=layout)


# --- how often -------------------------------------------------------------------------------------------------------


def test_those_of_the_first_replica_are_told_where_and_how_often(stage):
    savers = [saver for order in stage.of(SaveStates) for saver in order.savers]
    [store] = [saver.store for saver in savers if saver.worker == stage.group("a")[0]][-1:]
    assert store.root == ROOT
    assert store.every_s == pytest.approx(daly(30.0, PRIOR_S))
    assert not [saver for saver in savers if saver.store and saver.worker != stage.group("a")[0]]


def test_the_users_own_interval_is_kept_to_whatever_fails():
    stage = Stage(checkpoint_s=7.0)
    run = stage.run("a")
    run.snapshots.storage.failures, run.snapshots.storage.write_s = 50, 900.0
    assert run.snapshots.storage.interval(run, 1e6) == 7.0


def test_the_more_fails_the_more_often_and_the_longer_it_takes_the_less(stage):
    run, storage = stage.run("a"), stage.storage
    calm = storage.interval(run, 0.0)
    storage.failures = 20
    assert storage.interval(run, 0.0) == pytest.approx(daly(30.0, PRIOR_S / 21))
    assert storage.interval(run, 0.0) < calm
    assert storage.interval(run, 100 * PRIOR_S) == pytest.approx(daly(30.0, 101 * PRIOR_S / 21)), "rates, not counts"
    storage.write_s = 300.0
    assert storage.interval(run, 0.0) == pytest.approx(daly(300.0, PRIOR_S / 21))
    storage.write_s, storage.failures = 1.0, 10_000
    assert storage.interval(run, 0.0) == LEAST_S


def test_failures_of_the_task_and_of_its_nodes_count_once_each(stage):
    stage.report(stage.group("a")[0])
    assert stage.storage.failures == 1
    stage.lose("n1")
    assert stage.storage.failures == 2
    stage.tell(failure(Severity.SEV1, node="n3"))
    assert stage.storage.failures == 2, "it had nobody there"


def test_another_interval_is_ordered_when_it_is_worth_it_and_a_checkpoint_is_complete(stage):
    before, run = stage.storage.every_s, stage.run("a")
    stage.stored(seconds=30.0 * (CHANGE - 0.05) ** 2)
    complete = events.CheckpointStored(node="n1", task="a", iteration=4, address="x", removed=[])
    stage.tell(complete)
    assert run.snapshots.storage.every_s == before
    stage.stored(attempt="22222222", seconds=120.0)
    since = len(stage.told)
    stage.tell(complete)
    assert stage.storage.every_s == pytest.approx(daly(120.0, PRIOR_S), rel=1e-3)
    stores = [saver.store for order in stage.of(SaveStates, since) for saver in order.savers if saver.store]
    assert {store.every_s for store in stores} == {stage.storage.every_s}


# --- when one is complete --------------------------------------------------------------------------------------------


def test_a_checkpoint_is_completed_by_the_node_of_its_last_part_and_one_told_twice_counts_once(pair):
    assert pair.stored(0, node="n1") == pair.stored(0, node="n1") == []
    [order] = of(CommitCheckpoint, pair.stored(1, node="n2"))
    assert (order.node, order.task) == ("n2", "a")
    assert sorted(part.place for part in order.parts) == [0, 1]
    assert pair.storage.parts == {}


def test_parts_of_two_attempts_are_never_put_together(pair):
    assert pair.stored(0, "11111111", node="n1") == []
    assert pair.stored(1, "22222222", node="n2") == []
    [order] = of(CommitCheckpoint, pair.stored(1, "11111111", node="n2"))
    assert {part.data.name[:8] for part in order.parts} == {order.saving.attempt} == {"11111111"}


def test_parts_that_nothing_comes_of_are_forgotten(pair):
    for number in range(3 * ATTEMPTS):
        pair.stored(0, f"{number:08}")
    assert len(pair.storage.parts) == ATTEMPTS
    assert pair.stored(1, "00000000") == [], "that one was given up"


def test_how_long_writing_takes_is_that_of_the_slowest_place_of_the_newest_checkpoint(pair):
    pair.stored(0, seconds=50.0)
    pair.stored(1, seconds=40.0)
    assert pair.storage.write_s == 50.0
    pair.stored(0, "22222222", seconds=2.0)
    pair.stored(1, "22222222", seconds=5.0)
    assert pair.storage.write_s == 5.0


def test_nobody_that_is_gone_completes_a_checkpoint(pair):
    pair.stored(0, node="n1")
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(pair.core.state), type=TransitionState)
    state.nodes["n2"].alive = False
    saving = Saving(root=ROOT, task="a", iteration=4, layout=pair.layout, attempt="11111111")
    file = StoredFile(name="f", size=1, checksum="x")
    part = StoredPart(place=1, index=file, data=file)
    fact = events.PartStored(node="n2", task="a", saving=saving, part=part, seconds=1.0)
    run = state.tasks["a"]
    assert run.snapshots.storage.add_part(state, run, fact) == []


# --- the look there --------------------------------------------------------------------------------------------------


def test_the_storage_is_looked_at_once_no_memory_has_the_state_and_what_lies_there_is_taken(stage):
    assert not stage.of(FindCheckpoint)
    stage.lose_all_memory()
    [order] = stage.of(FindCheckpoint)
    assert (order.node, order.root, order.task) == ("n3", ROOT, "a")
    assert not [each for each in stage.of(Regroup) if each.node == "n3"], "nothing begins before the answer"
    stage.answers(order, checkpoint(4))
    [regroup] = [each for each in stage.of(Regroup) if each.node == "n3"]
    assert regroup.shelf.stored == checkpoint(4)
    assert (regroup.shelf.iteration, regroup.shelf.states) == (4, [])


def test_where_nothing_lies_there_the_task_begins_anew(stage):
    stage.lose_all_memory()
    [order] = stage.of(FindCheckpoint)
    stage.answers(order)
    stage.rest()
    [regroup] = [each for each in stage.of(Regroup) if each.node == "n3"]
    assert regroup.shelf is None
    assert stage.anew == {"a"}
    [alert] = [each.text for each in stage.of(events.Alert) if "begins again at iteration 0" in each.text]
    assert f"and {ROOT} has no checkpoint of it" in alert


def test_a_task_without_storage_whose_nodes_come_back_with_nothing_says_that_it_begins_anew():
    stage = Stage(checkpoints="")
    stage.lose_all_memory()
    stage.rest()
    assert stage.anew == {"a"}
    [alert] = [each.text for each in stage.of(events.Alert)]
    assert "and it has no `checkpoints` in its task file: it begins again at iteration 0" in alert
    assert not Stage(checkpoints="").of(events.Alert), "who has not begun is told nothing"


def test_a_storage_that_can_not_be_read_is_looked_at_again_and_nothing_begins_anew(stage):
    stage.lose_all_memory()
    for looks in (1, 2, 3):
        assert len(stage.of(FindCheckpoint)) == looks
        stage.tell(events.CheckpointFailed(node="n3", task="a", reason="not mounted"))
        stage.join("n2")
        stage.lose("n2")
        assert stage.timers, "after a while"
        assert len(stage.of(FindCheckpoint)) == looks, "not at each occasion"
        stage.rest()
    assert stage.anew == set()
    stage.answers(stage.of(FindCheckpoint)[-1], checkpoint(4))
    assert next(each for each in stage.of(Regroup) if each.node == "n3").shelf.stored == checkpoint(4)


def test_a_failure_to_write_elsewhere_and_an_answer_to_an_earlier_look_count_for_nothing(stage):
    stage.lose_all_memory()
    [order] = stage.of(FindCheckpoint)
    stage.tell(events.CheckpointFailed(node="n2", task="a", reason="full"))
    stage.answers(msgspec.structs.replace(order, search=order.search - 1))
    stage.answers(msgspec.structs.replace(order, node="n2"))
    assert stage.run("a").snapshots.search.looking == "n3"
    assert not stage.timers
    assert stage.anew == set()


def test_where_the_looking_node_is_lost_another_looks(stage):
    stage.lose_all_memory()
    [first] = stage.of(FindCheckpoint)
    stage.lose("n3")
    stage.rest()
    assert len(stage.of(FindCheckpoint)) == 1, "nobody is there"
    stage.join("n2")
    stage.settle(a=[slot("n2:0")])
    [_, second] = stage.of(FindCheckpoint)
    assert second.node == "n2"
    stage.answers(first)
    assert stage.anew == set(), "that was the lost one's answer"
    stage.answers(second, checkpoint(4))
    assert [each for each in stage.of(Regroup) if each.node == "n2"][-1].shelf.stored == checkpoint(4)


def test_the_looking_node_that_comes_back_looks_again(stage):
    stage.lose_all_memory()
    stage.lose("n3")
    stage.join("n3")
    stage.settle(a=[slot("n3:0")])
    assert [order.node for order in stage.of(FindCheckpoint)] == ["n3", "n3"]
    assert stage.anew == set()


def test_a_node_that_nobody_knew_looks_where_all_others_are_gone(stage):
    stage.slots["n4"] = 1
    for node in ("n1", "n2", "n3"):
        stage.lose(node)
    stage.rest()
    assert not stage.of(FindCheckpoint)
    stage.join("n4")
    stage.settle(a=[slot("n4:0")])
    [order] = stage.of(FindCheckpoint)
    assert order.node == "n4"


def test_without_a_storage_nobody_looks():
    stage = Stage(checkpoints="")
    stage.lose_all_memory()
    assert not stage.of(FindCheckpoint)
    assert stage.anew == {"a"}


# --- orders of users -------------------------------------------------------------------------------------------------


def asked(stage):
    """Return what the first worker was last told of orders to store its state."""
    told = [saver.store for order in stage.of(SaveStates) for saver in order.savers if saver.store]
    return told[-1].asked


def test_an_order_to_store_stands_until_a_later_iteration_is_on_storage(stage):
    assert asked(stage) == 0
    stage.tell(events.CheckpointOrdered(task="a", after=6))
    assert asked(stage) == 1
    stage.tell(events.CheckpointStored(node="n1", task="a", iteration=6, address="x", removed=[]))
    assert asked(stage) == 1, "that one was on its way before"
    stage.tell(events.CheckpointStored(node="n1", task="a", iteration=7, address="x", removed=[]))
    assert asked(stage) == 0
    stage.tell(events.CheckpointOrdered(task="a", after=7))
    assert asked(stage) == 2, "another number, so that it is another order"
    stage.tell(events.CheckpointFailed(node="n1", task="a", reason="full"))
    assert asked(stage) == 0


def test_going_back_is_done_when_the_checkpoint_is_there_and_sound(stage):
    out = stage.tell(events.TaskRewound(task="a", iteration=4))
    [order] = of(FindCheckpoint, out)
    assert order.iteration == 4
    assert not of(StopWorker, out), "it computes on until then"
    stage.stored(iteration=9)
    assert not stage.of(CommitCheckpoint), "a later one would count as newer"
    out = stage.answers(order, checkpoint(4))
    assert len(of(StopWorker, out)) == 2
    assert len(of(StartWorker, out)) == 2
    assert [each for each in stage.saved.values() if each.location.worker in {"a-1", "a-2"}] == []
    stage.rest()
    told = [each.shelf for each in stage.of(Regroup) if each.shelf]
    assert {each.stored for each in told} == {checkpoint(4)}
    assert stage.said["a"] is TaskState.RUNNING


def test_what_was_ruled_out_counts_for_nothing_once_a_user_goes_back_to_it(stage):
    stage.saving = False  # each state is found to be no good before anything is saved
    for earlier in (2, 1):
        [order] = of(FindCheckpoint, stage.tell(events.TaskRewound(task="a", iteration=4)))
        stage.answers(order, checkpoint(4))
        stage.rest()
        stage.unusable(4)
        stage.rest()
        [order] = [each for each in stage.of(FindCheckpoint)[-1:] if each.before == 4]
        stage.answers(order, checkpoint(earlier))
        stage.rest()
        assert [each.shelf.stored for each in stage.of(Regroup) if each.shelf][-1] == checkpoint(earlier)


def test_where_it_is_not_there_the_task_goes_on_and_the_user_is_told(stage):
    [order] = of(FindCheckpoint, stage.tell(events.TaskRewound(task="a", iteration=4)))
    out = stage.answers(order)
    [alert] = of(events.Alert, out)
    assert "not from iteration 4" in alert.text
    assert not of(StopWorker, out)
    assert stage.answers(order, checkpoint(4)) == [], "it was answered"


def test_an_answer_to_an_earlier_order_to_go_back_counts_for_nothing(stage):
    [first] = of(FindCheckpoint, stage.tell(events.TaskRewound(task="a", iteration=4)))
    [second] = of(FindCheckpoint, stage.tell(events.TaskRewound(task="a", iteration=2)))
    assert (first.node, stage.answers(first, checkpoint(4))) == (second.node, [])
    assert of(StopWorker, stage.answers(second, checkpoint(2)))


def test_where_the_looking_node_is_lost_or_can_not_read_the_user_is_told(stage):
    [order] = of(FindCheckpoint, stage.tell(events.TaskRewound(task="a", iteration=4)))
    [alert] = of(events.Alert, stage.tell(events.CheckpointFailed(node=order.node, task="a", reason="no such bucket")))
    assert "no such bucket" in alert.text
    [order] = of(FindCheckpoint, stage.tell(events.TaskRewound(task="a", iteration=4)))
    [alert] = of(events.Alert, stage.lose(order.node))
    assert f"{order.node}, which looked for it, is gone" in alert.text


@pytest.mark.parametrize("found", [checkpoint(4), None], ids=["found", "where there is none"])
def test_a_task_that_takes_up_an_earlier_ones_checkpoint_looks_for_it_once_before_anybody_computes(found):
    stage = Stage(resume=True)
    [order] = stage.of(FindCheckpoint)
    assert order.since == 0.0
    assert not stage.of(Regroup)
    stage.answers(order, found)
    stage.rest()
    assert len(stage.of(FindCheckpoint)) == 1
    shelves = [each.shelf for each in stage.of(Regroup) if each.shelf]
    assert [each.stored for each in shelves[:1]] == ([found] if found else [])
    assert stage.said["a"] is TaskState.RUNNING
