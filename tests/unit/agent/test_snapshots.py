"""An agent's decisions about the states in its node's memory."""

import msgspec
import pytest
from unicron_agent.effects import AbandonCopies, RemoveState, SendCopy, SendToWorker, StorePart, UseStorage
from unicron_agent.snapshots.snapshots import AGAIN_S, TRIES, NodeSnapshots
from unicron_agent.stimuli import CopyReceived, CopySent, StateUnsound, StorageUsed
from unicron_agent.workers.workers import LocalWorker

from unicron.contracts import events
from unicron.contracts.commands import CopyState, DropStates, FindCheckpoint, FindStates, SaveStates, StoreState
from unicron.contracts.events import StateSecured, StateUnprotected
from unicron.contracts.states import Keeper, Saver, StateLocation, StateRef
from unicron.contracts.storage import Saving, StoreOrder
from unicron.contracts.tasks import ParallelLayout
from unicron.contracts.worker import Kept, Save, Saved, Secured

ABANDONED = AbandonCopies("gpt-1", frozenset({"n2"}))
N2, N3 = Keeper(node="n2", address="n2:1"), Keeper(node="n3", address="n3:1")
STORE = StoreOrder(root="/storage", every_s=9.0, run="1.0:0")
WHO = {"node": "n1", "slot": 1, "task": "gpt", "worker": "gpt-1"}
TO_NODE = {"node": "n1", "token": 1, "incarnation": "b.1"}


class Scene:
    """The states of node n1, where worker gpt-1 is."""

    def __init__(self):
        self.snapshots = NodeSnapshots("n1", "n1:2")
        self.workers = {"gpt-1": LocalWorker(worker="gpt-1", task="gpt", slot=1)}

    def order(self, *savers, task="gpt"):
        return self.snapshots.obey(SaveStates(**TO_NODE, task=task, savers=list(savers)), self.workers.values())

    def drop(self, *names, workers=()):
        command = DropStates(**TO_NODE, task="gpt", names=list(names), workers=list(workers))
        return self.snapshots.obey(command, self.workers.values())

    def find(self, task="gpt"):
        [answer] = self.snapshots.obey(FindStates(**TO_NODE, task=task, search=5), self.workers.values())
        assert isinstance(answer, events.StatesFound)
        assert (answer.node, answer.task, answer.search) == ("n1", task, 5)
        return answer.states

    def save(self, iteration=3, *, store=False, worker="gpt-1"):
        return self.snapshots.copy_saved(self.workers[worker], Saved(state=ref(iteration), epoch=2, store=store))

    def end(self):
        """Let the worker end; return what comes of that."""
        del self.workers["gpt-1"]
        return self.snapshots.worker_ended("gpt-1")

    def sent(self, iteration=3, node="n2", problem="", now=0.0, *, unsound=False):
        return self.snapshots.handle(CopySent(ref(iteration), node, problem, unsound), self.workers, now)

    def fail(self, times, iteration=3, now=0.0):
        """Let a copy not arrive several times in a row; return what comes of the last."""
        for _ in range(times):
            out = self.sent(iteration, problem="no room", now=now)
        return out


@pytest.fixture
def scene():
    return Scene()


@pytest.fixture
def copying(scene):
    """The worker has saved the state of iteration 3, and a copy of it is on its way to n2."""
    scene.order(copied())
    scene.save()
    return scene


def ref(iteration=3, worker="gpt-1", task="gpt", node="n1"):
    name = f"{worker}.{iteration % 2}.saved"
    location = StateLocation(node=node, worker=worker, name=name, address=f"{node}:2")
    return StateRef(task=task, iteration=iteration, place=0, location=location, size=1, checksum=b"x")


def alone(*, store=None):
    return Saver(worker="gpt-1", store=store)


def copied(*keepers):
    return Saver(worker="gpt-1", keepers=list(keepers or (N2,)))


def to_worker(message):
    return SendToWorker("gpt-1", message)


def secured(iteration=3):
    return to_worker(Secured(name=f"gpt-1.{iteration % 2}.saved", iteration=iteration))


def of(kind, out):
    return [each for each in out if isinstance(each, kind)]


# --- who saves -------------------------------------------------------------------------------------------------------


def test_a_worker_is_told_to_save_now_and_whenever_it_connects_again(scene):
    assert scene.order(alone(store=STORE)) == [to_worker(Save(on=True, store_s=9.0))]
    assert scene.snapshots.resend_order("gpt-1") == [to_worker(Save(on=True, store_s=9.0))]


def test_a_worker_that_is_in_no_order_for_its_task_is_told_to_save_no_more_once(scene):
    scene.order(alone())
    assert scene.order(task="bert") == []
    assert scene.snapshots.resend_order("gpt-1") == [to_worker(Save(on=True))]
    assert scene.order() == [to_worker(Save(on=False))]
    assert scene.order() == []
    assert scene.snapshots.resend_order("gpt-1") == []


def test_what_nobody_ordered_to_save_is_removed_and_its_saver_told_to_cease(scene):
    assert scene.save() == [RemoveState("gpt-1.1.saved"), to_worker(Save(on=False))]
    assert scene.find() == []


@pytest.mark.parametrize("wrong", [ref(worker="gpt-2"), ref(task="bert")])
def test_a_worker_can_save_in_its_own_name_only(scene, wrong):
    scene.order(alone())
    assert scene.snapshots.copy_saved(scene.workers["gpt-1"], Saved(state=wrong, epoch=2)) == []
    assert scene.find() == []


# --- copies ----------------------------------------------------------------------------------------------------------


def test_what_needs_no_copies_is_safe_at_once_and_told_of_once(scene):
    scene.order(alone())
    assert scene.save(3) == [secured(3), StateSecured(**WHO, iteration=3, nodes=[])]
    assert scene.save(4) == [secured(4)]
    scene.order(alone())
    assert of(StateSecured, scene.save(5)), "another order, another word"


def test_what_needs_copies_is_safe_when_all_have_arrived(scene):
    scene.order(copied(N2, N3))
    assert scene.save() == [SendCopy(ref(), N2), SendCopy(ref(), N3)]
    assert scene.sent(node="n3") == []
    assert scene.sent(node="n2") == [secured(), StateSecured(**WHO, iteration=3, nodes=["n2", "n3"])]


def test_a_copy_of_an_older_state_makes_no_newer_one_safe_nor_holds_it_up_by_its_next_try(copying):
    copying.save(4)
    assert copying.sent(3) == []
    assert secured(4) in copying.sent(4)
    copying.save(5)
    copying.sent(5, problem="unreachable")
    assert copying.save(6) == [SendCopy(ref(6), N2)]
    assert copying.snapshots.tick(99.0) == []


def test_a_copy_that_does_not_arrive_is_sent_again_after_a_while(scene):
    scene.order(copied(N2, N3))
    scene.save()
    scene.sent(node="n3")
    assert scene.sent(node="n2", problem="unreachable", now=7.0) == []
    assert scene.snapshots.tick(7.0 + AGAIN_S - 0.1) == []
    assert scene.snapshots.tick(7.0 + AGAIN_S) == [SendCopy(ref(), N2)]
    assert scene.snapshots.tick(99.0) == [], "it is on its way"
    assert secured() in scene.sent(node="n2")


def test_where_copies_never_arrive_the_worker_goes_on_alone_and_that_is_told_once(copying):
    assert copying.fail(TRIES - 1) == []
    assert copying.fail(1) == [secured(3), StateUnprotected(**WHO, reason="n2 keeps no copy: no room")]
    assert copying.save(4) == [SendCopy(ref(4), N2)], "it is still tried"
    assert copying.fail(1, 4) == [secured(4)]


def test_a_worker_that_has_copies_again_is_told_of_again(copying):
    assert of(StateSecured, copying.sent(3))
    copying.save(4)
    assert of(StateUnprotected, copying.fail(TRIES, 4))
    copying.save(5)
    assert of(StateSecured, copying.sent(5))
    copying.save(6)
    assert of(StateUnprotected, copying.fail(TRIES, 6)), "and if they cease again, of that"


def test_a_worker_that_can_save_again_is_told_of_again(scene):
    scene.order(alone())
    scene.save(3)
    scene.snapshots.record_unprotected("gpt-1")
    assert of(StateSecured, scene.save(4))
    assert not of(StateSecured, scene.save(5))


def test_copies_for_nodes_that_keep_none_any_more_are_abandoned(copying):
    assert copying.order(copied(N3)) == [ABANDONED, to_worker(Save(on=True))]
    assert copying.sent(node="n2") == [], "what arrived all the same counts for nothing"
    assert copying.save(4) == [SendCopy(ref(4), N3)]


def test_copies_for_nodes_that_stay_keepers_go_on_and_those_that_arrived_are_not_abandoned(copying):
    assert copying.order(copied(N2)) == [to_worker(Save(on=True))]
    copying.sent()
    assert copying.order() == [to_worker(Save(on=False))]


def test_what_is_not_what_was_saved_is_named_and_saved_anew(copying):
    rejected, again = copying.sent(problem="wrong checksum", unsound=True)
    assert rejected == events.StateRejected(node="n1", task="gpt", state=ref(), reason="wrong checksum")
    assert again == to_worker(Save(on=True)), "then its next one need not wait for this one's copies"


# --- workers that end ------------------------------------------------------------------------------------------------


def test_what_a_worker_saved_outlives_it(scene):
    scene.order(alone())
    scene.save()
    assert scene.snapshots.worker_ended("gpt-1") == []
    assert scene.find() == [ref()]


def test_of_a_worker_that_is_no_more_nothing_stays_nor_comes(copying):
    both = [RemoveState("gpt-1.0.saved"), RemoveState("gpt-1.1.saved")]
    assert copying.drop(workers=["gpt-1"]) == [ABANDONED, *both]
    assert copying.find() == []
    assert copying.save(4) == [], "its last words, maybe"
    assert copying.snapshots.worker_ended("gpt-1") == both, "what it wrote meanwhile"
    assert copying.find() == []


@pytest.mark.parametrize("gone", [False, True])
def test_copies_on_their_way_are_abandoned_when_their_worker_is_to_leave_nothing(scene, gone):
    scene.order(copied(N2, N3))
    scene.save()
    scene.sent(node="n3")
    if gone:
        assert scene.end() == [], "what it saved may still be needed, and so may its copies"
    assert scene.drop(workers=["gpt-2", "gpt-1"])[2] == ABANDONED
    assert not of(AbandonCopies, scene.drop(workers=["gpt-1"])), "once is enough"
    assert scene.snapshots.tick(AGAIN_S) == []


@pytest.mark.parametrize("savers", [[], [copied(N3)]])
def test_an_order_that_comes_after_its_worker_abandons_copies_for_nodes_that_it_does_not_name(copying, savers):
    copying.end()
    assert copying.order(copied(N2)) == []
    assert copying.order(*savers, task="bert") == []
    assert copying.order(*savers) == [ABANDONED]


@pytest.mark.parametrize("problem", ["", "no room"])
def test_a_copy_that_came_to_its_end_after_its_worker_is_not_abandoned(copying, problem):
    copying.end()
    copying.sent(problem=problem)
    assert not of(AbandonCopies, copying.drop(workers=["gpt-1"]))


def test_copies_that_are_on_their_way_since_an_earlier_order_are_abandoned_by_a_later_one(copying):
    copying.order(copied())
    assert copying.order(alone())[0] == ABANDONED


def test_a_copy_of_a_worker_that_is_no_more_is_removed_when_it_comes(scene):
    scene.drop(workers=["bert-4"])
    name = "bert-4.1.saved"
    late = CopyReceived(name, ref(worker="bert-4", task="bert"))
    assert scene.snapshots.handle(late, scene.workers, 0.0) == [RemoveState(name)]
    assert scene.find("bert") == []


# --- what is here ----------------------------------------------------------------------------------------------------


def test_a_copy_that_is_written_over_is_none(scene):
    here = ref(3, worker="bert-4", task="bert").at("n1", "n1:1")
    assert scene.snapshots.handle(CopyReceived(here.location.name, here), scene.workers, 0.0) == []
    assert scene.find("bert") == [here]
    assert scene.snapshots.handle(CopyReceived(here.location.name, None), scene.workers, 0.0) == []
    assert scene.find("bert") == []


def test_only_the_states_of_the_task_that_is_asked_for_are_named_and_what_is_dropped_by_name_is_removed(scene):
    mine, other = ref(), ref(worker="bert-1", task="bert")
    scene.snapshots.adopt(["gpt-7.4.kept"], [mine, other])
    assert scene.find() == [mine]
    assert scene.find("bert") == [other]
    assert set(scene.snapshots.present) == {"gpt-7.4.kept", "gpt-1.1.saved", "bert-1.1.saved"}
    assert scene.drop("gpt-7.4.kept", "gpt-8.4.kept") == [RemoveState("gpt-7.4.kept")]
    assert set(scene.snapshots.present) == {"gpt-1.1.saved", "bert-1.1.saved"}


def test_what_is_here_is_had_from_this_agent_whichever_it_was_made_under(scene):
    scene.order(alone())
    earlier = ref(4).at("n1", "n1:1")
    scene.snapshots.adopt([], [ref(3).at("n1", "n1:1")])
    scene.snapshots.copy_saved(scene.workers["gpt-1"], Saved(state=earlier, epoch=1))
    assert {each.location.address for each in scene.find()} == {"n1:2"}
    assert len(scene.find()) == 2


def test_a_copy_that_a_taker_finds_unsound_is_told_of(scene):
    bad = ref().at("n2", "n2:1")
    told = scene.snapshots.handle(StateUnsound(bad, "wrong checksum"), scene.workers, 0.0)
    assert told == [events.StateRejected(node="n1", task="gpt", state=bad, reason="wrong checksum")]


# --- storage ---------------------------------------------------------------------------------------------------------


def test_what_is_to_be_stored_is_written_as_the_same_attempt_by_all_places(scene):
    scene.order(alone(store=STORE))
    scene.save(4)
    [one] = of(UseStorage, scene.save(4, store=True))
    assert isinstance(one.job, StorePart)
    assert one.job.ref == ref(4)
    assert (one.job.saving.root, one.job.saving.task, one.job.saving.iteration) == ("/storage", "gpt", 4)
    for order, is_same in ((STORE, True), (msgspec.structs.replace(STORE, run="2.0:7"), False)):
        place = Scene()
        place.order(alone(store=order))
        place.save(4)
        [other] = of(UseStorage, place.save(4, store=True))
        assert (other.job.saving == one.job.saving) == (other.job.saving.attempt == one.job.saving.attempt) == is_same
    assert not of(UseStorage, scene.save(6))


def test_what_is_to_be_stored_where_nothing_is_said_of_a_storage_is_only_saved(scene):
    scene.order(alone())
    scene.save(4)
    assert not of(UseStorage, scene.save(4, store=True))


def test_the_storage_is_looked_at_and_its_answer_told(scene):
    command = FindCheckpoint(**TO_NODE, task="gpt", search=5, root="/storage", since=0.0)
    assert scene.snapshots.obey(command, ()) == [UseStorage(command)]
    fact = events.CheckpointFailed(node="n1", task="gpt", reason="not mounted")
    assert scene.snapshots.handle(StorageUsed(fact), scene.workers, 0.0) == [fact]


def test_what_is_to_leave_memory_is_written_whether_its_worker_lives_or_not(scene):
    saving = Saving(root="/storage", task="gpt", iteration=3, layout=ParallelLayout(), attempt="12345678")
    command = StoreState(**TO_NODE, task="gpt", state=left_behind(), saving=saving)
    job = StorePart(ref=left_behind(), saving=saving, ordered=True)
    assert scene.snapshots.obey(command, ()) == [UseStorage(job)]


def left_behind():
    location = StateLocation(node="n1", worker="gpt-1", name="gpt-1.2.kept")
    return StateRef(task="gpt", iteration=3, place=0, location=location, size=1, checksum=b"x")


@pytest.fixture
def leaving(scene):
    """The node is to go, and n2 to have what gpt-1 left behind."""
    scene.snapshots.record_left_behind("gpt-1", Kept(epoch=2, state=left_behind()))
    scene.end()
    return scene


def copy(scene, keeper=N2):
    return scene.snapshots.obey(CopyState(**TO_NODE, task="gpt", state=left_behind(), keeper=keeper), ())


def handed_over(problem=""):
    return events.StateCopied(node="n1", task="gpt", state=left_behind().at("n2", "n2:1"), problem=problem)


def test_what_was_left_here_is_copied_elsewhere_when_ordered_and_that_is_told(leaving):
    assert copy(leaving) == [SendCopy(left_behind(), N2, paced=False)]
    assert copy(leaving) == [], "it is on its way"
    assert leaving.snapshots.handle(CopySent(left_behind(), "n2"), {}, 0.0) == [handed_over()]
    assert copy(leaving) == [SendCopy(left_behind(), N2, paced=False)], "whoever orders it again may have lost it"


def test_a_copy_that_does_not_get_there_is_tried_again_and_given_up_in_the_end(leaving):
    copy(leaving)
    for attempt in range(1, TRIES):
        assert leaving.snapshots.handle(CopySent(left_behind(), "n2", "no room"), {}, float(attempt)) == []
        assert leaving.snapshots.tick(attempt + AGAIN_S - 0.1) == []
        assert leaving.snapshots.tick(attempt + AGAIN_S) == [SendCopy(left_behind(), N2, paced=False)]
    assert leaving.snapshots.handle(CopySent(left_behind(), "n2", "no room"), {}, 9.0) == [handed_over("no room")]
    assert leaving.snapshots.tick(99.0) == []


def test_a_copy_of_what_is_dropped_meanwhile_is_abandoned(leaving):
    copy(leaving)
    assert leaving.drop("gpt-1.2.kept") == [ABANDONED, RemoveState("gpt-1.2.kept")]
    assert leaving.snapshots.handle(CopySent(left_behind(), "n2", "it is gone"), {}, 0.0) == []


def test_one_that_is_not_what_it_should_be_is_told_of_and_not_sent_again(leaving):
    copy(leaving)
    [rejected] = leaving.snapshots.handle(CopySent(left_behind(), "n2", "wrong checksum", unsound=True), {}, 0.0)
    assert isinstance(rejected, events.StateRejected)
    assert rejected.state == left_behind()
    assert leaving.snapshots.tick(99.0) == []
