"""The transition service's state machine: messages in, commands out."""

import itertools

import msgspec
import pytest
from helpers.transition import failure, of, slot
from unicron_transition.core import TransitionCore
from unicron_transition.state import EARLY_S, TransitionState

from unicron.contracts import events
from unicron.contracts.base import CancelTimer, SetTimer, Started, TimerFired
from unicron.contracts.commands import DropStates, FindStates, Regroup, SaveStates, StartWorker, StopWorker
from unicron.contracts.failures import Severity
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.tasks import Healing, ParallelLayout, Slot, TaskSpec, TaskState, WorkerStatus


class TransitionHarness:
    """A core with three nodes, and what an honest cluster would answer it."""

    def __init__(self, **specs):
        self.core = TransitionCore()
        self.numbers = itertools.count(1)
        self.feed(Started(token=7))
        for node in ("n1", "n2", "n3"):
            self.feed(self.admitted(node))
        for name, fields in specs.items():
            spec = TaskSpec(name=name, command=["python", "t.py"], **{"max_workers": 4, "microbatches": 8, **fields})
            self.feed(events.TaskSubmitted(task=name, spec=spec))

    def feed(self, message):
        # what is remembered must survive being stored
        stored = msgspec.msgpack.encode(self.core.state)
        self.core = TransitionCore(msgspec.msgpack.decode(stored, type=TransitionState))
        return [each for message in self.core.handle(message) for each in self.taken(message)]

    def taken(self, message):
        """Save nothing, and find nothing that was saved; nodes that are gone do not come back for it."""
        match message:
            case SaveStates():
                return []
            case FindStates(node=node, task=task, search=search):
                return self.feed(events.StatesFound(node=node, task=task, search=search, states=[]))
            case SetTimer(name=name) if name.startswith("states."):
                return self.feed(TimerFired(name=name))
        return [message]

    def admitted(self, node, workers=(), incarnation="first"):
        there = {"host": node, "rendezvous": f"{node}:1", "state_server": f"{node}:2", "workers": list(workers)}
        return events.NodeAdmitted(node=node, incarnation=incarnation, slots=[Slot(index=0), Slot(index=1)], **there)

    def plan(self, at=0.0, **places):
        shares = [TaskShare(task=task, slots=[slot(text) for text in texts]) for task, texts in places.items()]
        plan = Plan(number=next(self.numbers), trigger="test", workers=6, shares=shares)
        return self.feed(events.PlanDecided(plan=plan, at=at))

    def run(self, task):
        return self.core.state.tasks[task]

    def ready(self, task, *workers):
        out = []
        for worker in workers or list(self.run(task).workers):
            at = self.run(task).workers[worker].slot
            out = self.feed(events.WorkerReady(node=at.node, slot=at.slot, task=task, worker=worker, pid=1))
        return out

    def join(self, task, at=0.0):
        out = []
        for worker in self.run(task).membership.group:
            out = self.join_one(task, worker, at)
        return out

    def join_one(self, task, worker, at=0.0):
        run = self.run(task)
        where, group = run.workers[worker].slot, run.membership.group
        place = {"node": where.node, "slot": where.slot, "task": task, "worker": worker}
        rank = {"epoch": run.membership.epoch, "rank": group.index(worker), "world_size": len(group)}
        return self.feed(events.Regrouped(**place, **rank, iteration=5, at=at))

    def killed(self, *workers):
        """Workers of task a end, one after the other."""
        out = []
        for worker in workers:
            at = self.run("a").workers[worker].slot
            out += self.feed(failure(Severity.SEV2, task="a", node=at.node, slot=at.slot, worker=worker))
        return out

    def running(self, **places):
        self.plan(**places)
        for task in places:
            self.ready(task)
            self.join(task)
        return self


def members(out):
    """Return the workers of the one new membership in rank order; each node must have been told of its own ones."""
    orders = of(Regroup, out)
    assert len({(order.epoch, order.rendezvous_id, order.world_size, order.rendezvous) for order in orders}) == 1
    assert len({order.node for order in orders}) == len(orders)
    assert all(member.node == order.node for order in orders for member in order.members)
    assert {order.token for order in orders} == {7}
    ranks = dict(sorted((rank, m.worker) for o in orders for rank, m in zip(o.ranks, o.members, strict=True)))
    assert list(ranks) == list(range(orders[0].world_size))
    assert orders[0].rendezvous_id == ranks[0]
    return list(ranks.values())


def test_a_new_task_starts_its_workers_and_groups_them_when_all_are_ready():
    scene = TransitionHarness(a={})
    out = scene.plan(a=["n1:0", "n2:0"])
    started = [(start.node, start.slot, start.worker, start.token) for start in of(StartWorker, out)]
    assert started == [("n1", 0, "a-1", 7), ("n2", 0, "a-2", 7)]
    assert of(events.TaskStateChanged, out)[0].state is TaskState.STARTING
    assert of(Regroup, scene.ready("a", "a-1")) == []
    out = scene.ready("a", "a-2")
    assert members(out) == ["a-1", "a-2"]
    assert of(Regroup, out)[0].rendezvous == "n1:1"
    out = scene.join("a")
    assert of(events.TaskStateChanged, out)[0].state is TaskState.RUNNING
    assert [recovered.workers for recovered in of(events.TaskRecovered, out)] == [2]


def test_a_node_that_a_plan_names_before_it_is_there_gets_its_worker_when_it_comes():
    scene = TransitionHarness(a={})
    core = scene.core  # one that nobody starts again meanwhile: it knows by heart which nodes concern whom
    plan = Plan(number=1, trigger="test", workers=2, shares=[TaskShare(task="a", slots=[slot("n1:0"), slot("n9:0")])])
    out = core.handle(scene.admitted("n3")) + core.handle(events.PlanDecided(plan=plan))
    assert [start.node for start in of(StartWorker, out)] == ["n1"]
    assert [start.node for start in of(StartWorker, core.handle(scene.admitted("n9")))] == ["n9"]


@pytest.fixture
def scene():
    """A task that computes on two nodes."""
    return TransitionHarness(a={}).running(a=["n1:0", "n2:0"])


def test_a_failure_of_a_task_that_is_over_or_never_was_leads_to_nothing(scene):
    scene.feed(events.TaskRemoved(task="a"))
    for task in "ab":
        assert scene.feed(failure(Severity.SEV2, task=task, node="n1", slot=0, worker=f"{task}-1")) == []


def test_severity_2_regroups_the_survivors_at_once_and_restarts_the_process_in_its_slot():
    scene = TransitionHarness(a={}).running(a=["n1:0", "n2:0", "n3:0"])
    killed = failure(Severity.SEV2, task="a", node="n2", slot=0, worker="a-2", at=100.0)
    out = scene.feed(killed)
    assert [stop.worker for stop in of(StopWorker, out)] == ["a-2"]
    assert members(out) == ["a-1", "a-3"]
    assert [(start.node, start.slot, start.worker) for start in of(StartWorker, out)] == [("n2", 0, "a-4")]
    assert of(events.TaskStateChanged, out)[0].state is TaskState.RECOVERING
    assert of(events.TaskRecovered, scene.join("a")) == []  # two of three
    assert members(scene.ready("a", "a-4")) == ["a-1", "a-3", "a-4"]
    assert scene.feed(killed) == [], "it was replaced"
    [recovered] = of(events.TaskRecovered, scene.join("a", at=103.0))
    assert (recovered.workers, recovered.seconds) == (3, 3.0)


def test_a_task_that_goes_on_smaller_says_what_it_waits_for_until_it_is_whole():
    scene = TransitionHarness(a={}).running(a=["n1:0", "n2:0", "n2:1"])
    lacks = failure(Severity.SEV2, task="a", node="n2", slot=0, worker="a-2")
    scene.feed(msgspec.structs.replace(lacks, wait_s=8.0, reason="n2 lacks room"))
    [smaller] = of(events.TaskStateChanged, scene.join("a"))
    assert (smaller.state, smaller.reason) == (
        TaskState.RUNNING,
        "2 workers compute; 1 more to come: n2 lacks room",
    )
    scene.ready("a")
    [whole] = of(events.TaskStateChanged, scene.join("a"))
    assert whole.reason == "3 workers compute"


def test_what_is_to_wait_is_ordered_so_until_the_task_computes_again():
    scene = TransitionHarness(a={}).running(a=["n1:0", "n2:0"])
    refused = failure(Severity.SEV2, task="a", node="n2", slot=0, worker="a-2")
    [order] = of(StartWorker, scene.feed(msgspec.structs.replace(refused, wait_s=8.0)))
    assert order.wait_s == 8.0
    scene.ready("a")
    scene.join("a")
    assert of(StartWorker, scene.feed(failure(Severity.SEV2, task="a", node="n1", slot=0, worker="a-1")))[0].wait_s == 0


def test_what_heals_by_restarts_waits_for_the_new_process_and_begins_once():
    scene = TransitionHarness(a={"heal": Healing.RESTART}).running(a=["n1:0", "n2:0", "n3:0"])
    out = scene.feed(failure(Severity.SEV2, task="a", node="n2", slot=0, worker="a-2", at=100.0))
    assert (of(Regroup, out), of(SaveStates, out)) == ([], [])
    assert [start.worker for start in of(StartWorker, out)] == ["a-4"]
    assert members(scene.ready("a", "a-4")) == ["a-1", "a-3", "a-4"]
    [recovered] = of(events.TaskRecovered, scene.join("a", at=101.0))
    assert recovered.workers == 3


def test_what_heals_by_restarts_looks_for_no_state_when_all_its_workers_are_gone():
    scene = TransitionHarness(a={"heal": Healing.RESTART}).running(a=["n1:0", "n2:0"])
    out = scene.killed("a-1", "a-2") + scene.ready("a", "a-3") + scene.ready("a", "a-4")
    assert (of(FindStates, out), of(SaveStates, out)) == ([], [])
    assert members(out) == ["a-3", "a-4"]


IN_PLACE = {"heal": Healing.IN_PLACE, "layout": ParallelLayout(shard=2), "drill": False}


@pytest.mark.parametrize("back", [(), ("n1", "n2")], ids=["", "agents came back"])
def test_what_is_healed_in_place_looks_for_states_when_all_who_saved_one_are_gone(back):
    scene = TransitionHarness(a=IN_PLACE).running(a=["n1:0", "n2:0"])
    for worker, node in (("a-1", "n1"), ("a-2", "n2")):
        keepers = next(iter(scene.core.state.tasks["a"].snapshots.saves.ordered[node])).keepers
        at = {"task": "a", "node": node, "slot": 0, "worker": worker}
        scene.feed(events.StateSecured(**at, iteration=3, nodes=[keeper.node for keeper in keepers]))
    for number, node in enumerate(back, 1):  # whose workers are told to save once more, and have not done so yet
        living = WorkerStatus(worker=f"a-{number}", task="a", slot=0, epoch=0, iteration=5, ready=True)
        scene.feed(scene.admitted(node, [msgspec.structs.replace(living, place=number - 1, layout=IN_PLACE["layout"])]))
    assert len(scene.core.state.tasks["a"].snapshots.saves.secured) == 2 - len(back)
    searches, alerts = [], []
    for worker in ("a-1", "a-2"):
        alerts += of(events.Alert, scene.killed(worker))
        searches.append(scene.core.state.tasks["a"].snapshots.searches)
    assert searches == [0, 1], "as long as one of them lives it has its state, or is about to end"
    assert "begins again, from a checkpoint of its own" in alerts[0].text, "nothing was found, which is told"


def test_what_is_healed_in_place_and_has_saved_nothing_yet_begins_again_and_says_so():
    scene = TransitionHarness(a=IN_PLACE).running(a=["n1:0", "n2:0"])
    out = scene.killed("a-1", "a-2")
    assert (of(events.Alert, out), of(FindStates, out)) == ([], [])
    [alert] = of(events.Alert, scene.ready("a", "a-3", "a-4"))
    assert "begins again, from a checkpoint of its own if it has one: no copy of its state is complete" in alert.text


NOBODY_CAN = "in a drill the gradient differs"


@pytest.mark.parametrize(
    ("fact", "fields"),
    [
        (events.StateUnusable, {"epoch": 0, "copies": "copies", "reason": NOBODY_CAN, "uncarried": True}),
        (events.ScriptDrilled, {"rank": 0, "problem": NOBODY_CAN}),
    ],
)
def test_of_a_script_that_nobody_can_go_on_with_nothing_is_saved_or_taken_any_more(fact, fields):
    scene = TransitionHarness(a=IN_PLACE).running(a=["n1:0", "n2:0"])
    at = {"task": "a", "node": "n1", "slot": 0, "worker": "a-1"}
    scene.feed(events.StateSecured(**at, iteration=3, nodes=["n2"]))
    out = scene.feed(fact(**at, iteration=2, **fields))
    assert ("n1", ["a-1.0.saved", "a-1.1.saved"]) in [(order.node, order.names) for order in of(DropStates, out)]
    out = scene.killed("a-1")
    assert [order.worker for order in of(StopWorker, out)] == ["a-1", "a-2"], "it would wait for one in vain"
    assert [order.uncarried for order in of(StartWorker, out)] == [NOBODY_CAN, NOBODY_CAN]
    out = scene.ready("a", "a-3", "a-4")
    assert ([order.shelf for order in of(Regroup, out)], of(SaveStates, out)) == ([None, None], [])


def test_as_long_as_no_drill_has_shown_that_a_rank_can_be_replaced_all_begin_anew_and_are_drilled_again():
    scene = TransitionHarness(a={**IN_PLACE, "drill": True})
    scene.running(a=["n1:0", "n2:0"])
    at = {"task": "a", "node": "n2", "slot": 0, "worker": "a-2", "rank": 1}
    out = scene.feed(events.ScriptDrilled(**at, iteration=10, unproven="no snapshot is taken here", undecided=True))
    out += scene.killed("a-1")
    assert [order.worker for order in of(StopWorker, out)] == ["a-1", "a-2"]
    assert [(order.spec.drill, order.anew_s) for order in of(StartWorker, out)] == [(True, 0.0), (True, 0.0)]
    [alert] = of(events.Alert, scene.ready("a", "a-3", "a-4"))
    assert "begins again, from a checkpoint of its own if it has one: no process has shown" in alert.text
    scene.join("a")
    assert scene.core.state.tasks["a"].snapshots.saves.ordered == {}
    proven = events.ScriptDrilled(task="a", node="n2", slot=0, worker="a-4", rank=1, iteration=2)
    scene.feed(proven)
    assert scene.core.state.tasks["a"].snapshots.saves.ordered.keys() == {"n1", "n2"}
    out = scene.killed("a-3")
    assert [order.worker for order in of(StopWorker, out)] == ["a-3"]
    assert [(order.worker, order.spec.drill) for order in of(StartWorker, out)] == [("a-5", False)]
    assert members(scene.ready("a", "a-5")) == ["a-5", "a-4"]


def on_trial(scene, worker="a-2", node="n2"):
    scene.feed(events.ScriptDrilled(task="a", node=node, slot=0, worker=worker, rank=1, iteration=2, under_way=True))


def of_trial(scene, **fields):
    """What came of it is told by the agent of the node that it is on, be the worker there or not."""
    return scene.feed(events.ScriptDrilled(task="a", node="n2", slot=0, worker="a-2", rank=1, iteration=2, **fields))


@pytest.fixture
def tried():
    """A task whose rank 1 has a process on trial in its place."""
    scene = TransitionHarness(a={**IN_PLACE, "drill": True})
    scene.plan(a=["n1:0", "n2:0"], at=70.0)
    scene.ready("a")
    scene.join("a", at=100.0)
    on_trial(scene)
    return scene


def lose(scene, worker, node, at=160.0):
    return scene.feed(failure(Severity.SEV2, task="a", node=node, slot=0, worker=worker, at=at))


@pytest.mark.parametrize(("lost", "node"), [("a-1", "n1"), ("a-2", "n2")])
def test_who_has_lost_a_rank_while_a_process_is_on_trial_waits_for_what_that_shows(tried, lost, node):
    out = lose(tried, lost, node)
    assert [order.worker for order in of(StopWorker, out)] == [lost]
    assert [(order.worker, order.anew) for order in of(StartWorker, out)] == [("a-3", False)]
    out = tried.ready("a", "a-3")
    assert of(Regroup, out) == [], "nobody knows yet"
    assert [(each.name, each.after_s) for each in of(SetTimer, out)] == [("trial.a", 90.0)], "as long as it had run"
    [alert] = of(events.Alert, out)
    assert "wait for the trial that is under way, for 90 s at most" in alert.text
    out = of_trial(tried)
    assert "trial.a" in [each.name for each in of(CancelTimer, out)]
    assert sorted(members(out)) == sorted({"a-1", "a-2", "a-3"} - {lost})


@pytest.mark.parametrize("ends", ["problem", "timer", "node"])
def test_where_a_trial_shows_that_nobody_can_or_nothing_in_time_all_begin_anew(tried, ends):
    lose(tried, "a-1", "n1")
    tried.ready("a", "a-3")
    if ends == "problem":
        out = of_trial(tried, problem=NOBODY_CAN)
    elif ends == "timer":
        out = tried.feed(TimerFired(name="trial.a"))
    else:
        out = tried.feed(failure(Severity.SEV1, node="n2", at=200.0))
    stopped = {order.worker for order in of(StopWorker, out)}
    assert stopped == ({"a-2", "a-3"} if ends != "node" else {"a-2"})
    begun = of(StartWorker, out)
    assert [order.anew for order in begun] == [True] * len(begun)
    if ends == "problem":
        assert [order.uncarried for order in begun] == [NOBODY_CAN, NOBODY_CAN]


def test_with_the_last_who_waits_for_a_trial_those_end_that_were_to_go_on_with_what_it_has(tried):
    lose(tried, "a-1", "n1")
    out = lose(tried, "a-2", "n2", at=161.0)
    assert {order.worker for order in of(StopWorker, out)} == {"a-2", "a-3"}
    assert [order.anew for order in of(StartWorker, out)] == [True, True]


@pytest.mark.parametrize(("early", "told"), [(True, "as it did at first: up to"), (False, "from a checkpoint of")])
def test_what_was_trained_in_the_first_minutes_is_trained_once_more_from_the_top(early, told):
    scene = TransitionHarness(a={**IN_PLACE, "drill": True})
    scene.plan(a=["n1:0", "n2:0"], at=70.0)
    scene.ready("a")
    scene.join("a", at=100.0)
    lost = {"task": "a", "node": "n1", "slot": 0, "worker": "a-1"}
    out = scene.feed(failure(Severity.SEV2, **lost, at=160.0 if early else 100.0 + EARLY_S + 1))
    orders = of(StartWorker, out)
    assert [(each.anew, each.anew_s, each.trained_s) for each in orders] == [(early, 90.0 * early, 60.0 * early)] * 2
    [alert] = of(events.Alert, scene.ready("a", "a-3", "a-4"))
    assert told in alert.text


def test_a_rank_is_not_moved_to_another_node_either_before_a_drill_has_shown_that_it_can_be():
    scene = TransitionHarness(a={**IN_PLACE, "drill": True}).running(a=["n1:0", "n2:0"])
    out = scene.plan(a=["n1:0", "n3:0"]) + scene.ready("a", "a-3")
    assert sorted({order.worker for order in of(StopWorker, out)}) == ["a-1", "a-2"]
    assert members(scene.ready("a", "a-4")) in (["a-3", "a-4"], ["a-4", "a-3"])


def test_a_script_that_can_not_be_had_in_place_is_run_as_torchrun_would_from_then_on():
    scene = TransitionHarness(a=IN_PLACE).running(a=["n1:0", "n2:0"])
    at = {"task": "a", "iteration": 2, "problem": NOBODY_CAN, "as_is": True}
    told = [
        events.ScriptDrilled(**at, node=node, slot=0, worker=f"a-{number}", rank=number - 1)
        for number, node in enumerate(("n1", "n2"), 1)
    ]
    out = scene.feed(told[0])
    assert [order.worker for order in of(StopWorker, out)] == ["a-1", "a-2"]
    starts = of(StartWorker, out)
    assert [(order.worker, order.spec.heal, order.place) for order in starts] == [
        ("a-3", Healing.RESTART, 0),
        ("a-4", Healing.RESTART, 1),
    ]
    assert scene.feed(told[1]) == [], "its process is stopped already"
    scene.ready("a", "a-3", "a-4")
    scene.join("a")
    out = scene.killed("a-4")
    assert [order.worker for order in of(StopWorker, out)] == ["a-3", "a-4"], "all begin again, whichever is lost"
    assert {order.spec.heal for order in of(StartWorker, out)} == {Healing.RESTART}


def test_what_is_run_as_torchrun_would_before_it_has_computed_is_back_since_that_was_decided():
    scene = TransitionHarness(a=IN_PLACE)
    scene.plan(a=["n1:0", "n2:0"])
    scene.ready("a", "a-1", "a-2")
    at = {"task": "a", "iteration": 0, "problem": NOBODY_CAN, "as_is": True, "at": 110.0}
    scene.feed(events.ScriptDrilled(**at, node="n1", slot=0, worker="a-1", rank=0))
    scene.ready("a", "a-3", "a-4")
    [recovered] = of(events.TaskRecovered, scene.join("a", at=112.0))
    assert recovered.seconds == 2.0, "and not since the task was submitted"


def test_severity_3_forms_the_same_membership_again_once(scene):
    broken = failure(Severity.SEV3, task="a", node="n2", slot=0, worker="a-2", epoch=0)
    out = scene.feed(broken)
    assert members(out) == ["a-1", "a-2"]
    assert of(Regroup, out)[0].epoch == 1
    assert of(StopWorker, out) == []
    assert scene.feed(broken) == [], "an older membership is past"


def test_a_lost_node_regroups_all_its_tasks_before_any_plan():
    scene = TransitionHarness(a={}, b={}).running(a=["n1:0", "n2:0"], b=["n1:1", "n2:1", "n3:0"])
    out = scene.feed(failure(Severity.SEV1, node="n2"))
    by_task = {task: members([order for order in of(Regroup, out) if order.task == task]) for task in "ab"}
    assert by_task == {"a": ["a-1"], "b": ["b-1", "b-3"]}
    assert {type(message) for message in out if getattr(message, "node", "") == "n2"} == {StopWorker}


def test_in_a_slot_that_a_node_has_lost_nothing_is_started_until_the_plan_has_left_it():
    scene = TransitionHarness(a={}).running(a=["n1:0", "n2:0", "n2:1"])
    back = msgspec.structs.replace(scene.admitted("n2"), slots=[Slot(index=0)], returned=True)
    assert [order.slot for order in of(StartWorker, scene.feed(back))] == [0]
    assert of(StartWorker, scene.plan(a=["n1:0", "n2:0"])) == []


def test_a_node_that_comes_back_is_used_when_the_plan_says_so(scene):
    scene.feed(failure(Severity.SEV1, node="n2"))
    scene.plan(a=["n1:0"])
    scene.join("a")
    assert scene.feed(scene.admitted("n2")) == []
    out = scene.plan(a=["n1:0", "n2:0"])
    assert [(start.node, start.worker) for start in of(StartWorker, out)] == [("n2", "a-3")]
    assert of(Regroup, out) == []  # the others go on meanwhile
    assert members(scene.ready("a", "a-3")) == ["a-1", "a-3"]


def test_workers_of_a_node_that_was_given_up_are_stopped_when_it_comes_back(scene):
    scene.feed(failure(Severity.SEV1, node="n2"))
    stale = WorkerStatus(worker="a-2", task="a", slot=0, ready=True)
    out = scene.feed(scene.admitted("n2", [stale]))
    assert [(stop.node, stop.worker) for stop in of(StopWorker, out)] == [("n2", "a-2")]


def status(worker, task="a", index=0, epoch=3):
    return WorkerStatus(worker=worker, task=task, slot=index, pid=1, epoch=epoch, iteration=8, ready=True)


def test_a_worker_given_up_with_its_node_is_taken_back_where_nobody_else_has_the_state():
    scene = TransitionHarness(a={}, b={}).running(a=["n1:0", "n1:1"])
    scene.feed(failure(Severity.SEV1, node="n1"))
    scene.plan(a=["n2:0", "n3:0"])
    out = scene.feed(scene.admitted("n1", [status("a-1"), status("a-2", index=1)], "second"))
    assert [order.worker for order in of(StopWorker, out)] == ["a-2"], "one is enough"
    assert of(StopWorker, scene.plan(b=["n1:0"], a=["n2:0", "n3:0"])) == []
    assert members(scene.ready("a", "a-3", "a-4")) == ["a-1", "a-3", "a-4"]
    out = scene.join("a")
    assert members([message for message in out if getattr(message, "task", "") == "a"]) == ["a-3", "a-4"]
    assert of(StopWorker, out) == [], "the two could be dying unseen"
    out = scene.join("a")
    assert [order.worker for order in of(StopWorker, out)] == ["a-1"]
    assert [order.worker for order in of(StartWorker, out)] == ["b-1"], "in the slot that it leaves"


def test_a_worker_that_comes_back_while_others_are_on_their_way_to_begin_anew_is_taken_in_before_they_do():
    scene = TransitionHarness(a={}).running(a=["n1:0", "n1:1"])
    scene.feed(failure(Severity.SEV1, node="n1"))
    scene.plan(a=["n2:0", "n3:0"])
    assert members(scene.ready("a", "a-3", "a-4")) == ["a-3", "a-4"], "nobody has the state as far as is known"
    out = scene.feed(scene.admitted("n1", [status("a-1"), status("a-2", index=1)], "second"))
    assert members(out) == ["a-1", "a-3", "a-4"]
    assert [order.worker for order in of(StopWorker, out)] == ["a-2"], "one that has the state is enough"


def test_a_worker_that_comes_back_before_the_plan_that_has_a_slot_for_it_is_kept(scene):
    for node in ("n1", "n2"):
        scene.feed(failure(Severity.SEV1, node=node))
    scene.plan(a=[])
    assert of(StopWorker, scene.feed(scene.admitted("n2", [status("a-2")], "second"))) == []
    assert members(scene.plan(a=["n2:0"])) == ["a-2"]


def test_a_worker_of_an_earlier_task_is_not_taken_back_by_that_of_its_name():
    scene = TransitionHarness(a={}).running(a=["n1:0"])
    scene.feed(failure(Severity.SEV1, node="n1"))
    scene.feed(events.TaskRemoved(task="a"))
    scene.feed(events.TaskSubmitted(task="a", spec=TaskSpec(name="a", command=["other"], max_workers=4)))
    scene.plan(a=["n2:0"])
    out = scene.feed(scene.admitted("n1", [status("a-1")], "second"))
    assert [order.worker for order in of(StopWorker, out)] == ["a-1"]


@pytest.mark.parametrize("heal", [Healing.SESSION, Healing.IN_PLACE])
def test_a_worker_that_failed_is_not_taken_back_though_its_agent_came_back_before_it_was_stopped(heal):
    layout = ParallelLayout(shard=2 if heal is Healing.IN_PLACE else 1)
    scene = TransitionHarness(a={"heal": heal, "layout": layout, "drill": False}).running(a=["n1:0", "n2:0"])
    scene.killed("a-1", "a-2")
    out = scene.feed(scene.admitted("n2", [status("a-2")], "second"))  # it has let the orders for "first" pass
    assert [order.worker for order in of(StopWorker, out)] == ["a-2"]
    assert [order.worker for order in of(StartWorker, out)] == ["a-5"]
    assert scene.core.state.tasks["a"].failed == {"a-1": "n1", "a-2": "n2"}
    scene.feed(events.WorkerExited(node="n2", slot=0, task="a", worker="a-2"))
    scene.feed(scene.admitted("n1", [], "second"))
    assert scene.core.state.tasks["a"].failed == {}


def test_an_agent_that_comes_back_keeps_its_workers(scene):
    alive = WorkerStatus(worker="a-2", task="a", slot=0, ready=True, epoch=0)
    assert scene.feed(scene.admitted("n2", [alive])) == []


def test_an_agent_that_missed_a_regroup_is_told_a_new_one():
    scene = TransitionHarness(a={}).running(a=["n1:0", "n2:0", "n3:0"])
    scene.killed("a-3")
    behind = WorkerStatus(worker="a-2", task="a", slot=0, ready=True, epoch=0)
    out = scene.feed(scene.admitted("n2", [behind]))
    assert members(out) == ["a-1", "a-2"]
    assert of(Regroup, out)[0].epoch == 2


def test_an_agent_that_comes_back_without_its_workers_gets_new_ones(scene):
    out = scene.feed(scene.admitted("n2"))
    assert members(out) == ["a-1"]
    assert [start.worker for start in of(StartWorker, out)] == ["a-3"]


def test_what_was_ordered_before_a_node_joined_anew_is_ordered_again(scene):
    # n2's agent has just come back without workers: the detector knows it from its NodeJoined, we do not yet
    out = scene.killed("a-2")
    assert {start.incarnation for start in of(StartWorker, out)} == {"first"}  # so the new agent lets it pass
    out = scene.feed(scene.admitted("n2", incarnation="second"))
    assert [(start.worker, start.incarnation) for start in of(StartWorker, out)] == [("a-4", "second")]
    assert members(scene.ready("a", "a-4")) == ["a-1", "a-4"]


def test_a_slot_goes_from_one_task_to_another_when_those_that_stay_have_met_stop_before_start():
    scene = TransitionHarness(a={}, b={}).running(a=["n1:0"], b=["n1:1", "n2:0"])
    out = scene.plan(a=["n1:0", "n2:0"], b=["n1:1"])
    assert members(out) == ["b-1"]
    assert of(StopWorker, out) == of(StartWorker, out) == [], "b-1 may be dying unseen, and b-2 has the state too"
    out = scene.join("b")
    kinds = [(type(message).__name__, message.worker) for message in of(StartWorker | StopWorker, out)]
    assert kinds == [("StopWorker", "b-2"), ("StartWorker", "a-2")]


def test_what_a_shrinking_task_gives_up_saves_its_state_when_those_that_stay_are_gone():
    scene = TransitionHarness(a={}, b={}).running(a=["n1:0", "n2:0"], b=["n3:0"])
    scene.plan(a=["n1:0"], b=["n3:0", "n2:0"])
    out = scene.killed("a-1")
    assert [start.worker for start in of(StartWorker, out)] == ["a-3"]
    assert members(scene.ready("a", "a-3")) == ["a-2", "a-3"], "a-2 hands the state over"
    assert members(scene.join("a")) == ["a-3"]
    out = scene.join("a")
    assert [order.worker for order in of(StopWorker, out)] == ["a-2"]
    assert [start.slot for start in of(StartWorker, out)] == [0]
    assert [start.task for start in of(StartWorker, out)] == ["b"]


def test_what_has_no_state_is_stopped_at_once_when_its_slot_is_given_up(scene):
    scene.plan(a=["n1:0", "n2:0", "n3:0"])
    assert [order.worker for order in of(StopWorker, scene.plan(a=["n1:0", "n2:0"]))] == ["a-3"]


def test_below_its_minimum_a_task_waits_for_the_restart():
    scene = TransitionHarness(a={"min_workers": 2}).running(a=["n1:0", "n2:0"])
    out = scene.killed("a-2")
    assert of(Regroup, out) == []
    assert members(scene.ready("a", "a-3")) == ["a-1", "a-3"]


def test_workers_come_in_units():
    scene = TransitionHarness(a={"unit": 2, "min_workers": 2}).running(a=["n1:0", "n1:1", "n2:0", "n2:1"])
    out = scene.killed("a-4")
    assert members(out) == ["a-1", "a-2"]


def test_a_broken_task_fails_with_its_traceback_and_nothing_starts_again(scene):
    out = scene.feed(events.TaskBroken(task="a", reason="twice", traceback="Traceback ..."))
    assert sorted(stop.worker for stop in of(StopWorker, out)) == ["a-1", "a-2"]
    [changed] = of(events.TaskStateChanged, out)
    assert (changed.state, changed.reason, changed.traceback) == (TaskState.FAILED, "twice", "Traceback ...")
    assert scene.feed(failure(Severity.SEV2, task="a", node="n1", slot=0, worker="a-1")) == []
    assert scene.plan(a=["n1:0"]) == []


def test_a_removed_task_is_stopped_and_its_name_can_be_used_again():
    scene = TransitionHarness(a={}).running(a=["n1:0"])
    assert [stop.worker for stop in of(StopWorker, scene.feed(events.TaskRemoved(task="a")))] == ["a-1"]
    scene.feed(events.TaskSubmitted(task="a", spec=TaskSpec(name="a", command=["python", "t.py"])))
    assert [start.worker for start in of(StartWorker, scene.plan(a=["n1:0"]))] == ["a-2"]  # names are never used twice


def through(number):
    return events.WorkerFinished(node=f"n{number}", slot=0, task="a", worker=f"a-{number}", iterations=9)


def test_a_task_is_finished_when_all_its_members_are(scene):
    assert of(events.TaskStateChanged, scene.feed(through(1))) == []
    out = scene.feed(through(2))
    assert of(events.TaskStateChanged, out)[0].state is TaskState.FINISHED
    assert of(StopWorker, out) == []  # they may still be writing their results


@pytest.mark.parametrize("loss", ["worker", "node", "agent"])
@pytest.mark.parametrize("order", ["finished first", "lost first"])
def test_a_task_that_loses_its_last_member_when_the_others_are_through_is_finished(loss, order):
    scene = TransitionHarness(a={"iterations": 9}).running(a=["n1:0", "n2:0"])
    lost = {
        "worker": failure(Severity.SEV2, task="a", node="n2", slot=0, worker="a-2"),
        "node": failure(Severity.SEV1, node="n2"),
        "agent": scene.admitted("n2", incarnation="second"),
    }[loss]
    told = [through(1), lost] if order == "finished first" else [lost, through(1)]
    out = [message for each in told for message in scene.feed(each)]
    (end,) = [change for change in of(events.TaskStateChanged, out) if change.state.ended]
    assert end.state is TaskState.FINISHED
    said = "; a-2 ended without saying so: what it was to write then may be missing" * (order == "finished first")
    assert end.reason == "all 9 iterations are done" + said
    assert scene.run("a").workers == {}


def test_a_task_is_finished_though_those_that_were_through_are_forgotten_with_their_nodes():
    scene = TransitionHarness(a={}).running(a=["n1:0", "n2:0", "n3:0"])
    scene.feed(through(1))
    out = scene.feed(scene.admitted("n1", incarnation="second"))
    assert members(out) == ["a-2", "a-3"], "who missed the end finishes it"
    scene.join("a")
    out = scene.feed(through(3))
    assert of(events.TaskStateChanged, out) == []
    out = scene.feed(failure(Severity.SEV1, node="n2"))
    assert of(events.TaskStateChanged, out)[0].state is TaskState.FINISHED
    assert of(StartWorker, out) == []


def test_who_sat_the_last_membership_out_does_not_keep_a_finished_task_alive():
    scene = TransitionHarness(a={"min_workers": 2, "unit": 2}).running(a=["n1:0", "n2:0", "n1:1", "n3:0"])
    scene.killed("a-4")
    scene.join("a")
    assert scene.run("a").membership.group == ["a-1", "a-2"], "a-3 waits for another: they come in twos"
    scene.ready("a", "a-5")
    scene.feed(through(1))
    assert "a-3" in scene.run("a").membership.group, "the newest membership has one who was in an older one"
    (end,) = of(events.TaskStateChanged, scene.feed(through(2)))
    assert end.state is TaskState.FINISHED


def test_the_slot_of_a_worker_that_is_through_and_gone_can_be_used_by_who_must_finish():
    scene = TransitionHarness(a={"min_workers": 2, "unit": 2}).running(a=["n1:0", "n2:0"])
    scene.feed(failure(Severity.SEV3, task="a", epoch=0))
    scene.feed(through(1))
    out = scene.feed(events.WorkerExited(node="n1", slot=0, task="a", worker="a-1", finished=True))
    (start,) = of(StartWorker, out)
    assert (start.node, start.slot) == ("n1", 0)
    assert members(scene.ready("a", start.worker)) == ["a-2", start.worker]


def test_who_missed_the_end_of_the_last_iteration_finishes_it_without_those_that_are_through():
    scene = TransitionHarness(a={}).running(a=["n1:0", "n2:0", "n3:0"])
    scene.killed("a-3")
    out = scene.feed(through(1))
    assert members(out) == ["a-2"]


@pytest.mark.parametrize("kind", ["start", "regroup"])
def test_what_takes_too_long_is_an_attempt_that_failed(kind):
    scene = TransitionHarness(a={})
    out = scene.plan(a=["n1:0", "n2:0"])
    if kind == "regroup":
        out = scene.ready("a")
    names = [timer.name for timer in of(SetTimer, out) if timer.name.startswith(kind)]
    failed, *verdict = scene.feed(TimerFired(name=names[0]))
    assert [timer.name for timer in verdict] == ([] if kind == "start" else ["verdict.a.0"])
    assert isinstance(failed, events.AttemptFailed)
    assert (failed.task, failed.action, failed.worker) == ("a", "restart" if kind == "start" else "regroup", "a-1")


@pytest.mark.parametrize("meanwhile", ["nothing", "joined", "another epoch"])
def test_a_worker_that_does_not_join_and_of_which_the_detector_has_nothing_to_say_is_replaced(meanwhile):
    # it may have ended before its node was admitted, on a word from before that
    scene = TransitionHarness(a={})
    scene.plan(a=["n1:0", "n2:0"])
    scene.ready("a")
    [verdict] = of(SetTimer, scene.feed(TimerFired(name="regroup.a")))
    if meanwhile == "joined":
        scene.join("a")
    if meanwhile == "another epoch":
        scene.feed(failure(Severity.SEV3, task="a", epoch=0))
    out = scene.feed(TimerFired(name=verdict.name))
    assert [stop.worker for stop in of(StopWorker, out)] == (["a-1"] if meanwhile == "nothing" else [])
    assert [start.slot for start in of(StartWorker, out)] == ([0] if meanwhile == "nothing" else [])


def away(scene, worker, epoch):
    at = scene.run("a").workers[worker].slot
    place = {"node": at.node, "slot": at.slot, "task": "a", "worker": worker}
    return scene.feed(events.WorkerAway(**place, epoch=epoch, iteration=5, waited_s=10.0))


def test_a_member_whose_script_evaluates_is_waited_for_but_one_that_did_before_may_be_back_since():
    scene = TransitionHarness(a={}).running(a=["n1:0", "n2:0", "n3:0"])
    scene.feed(failure(Severity.SEV2, task="a", worker="a-3", node="n3", slot=0))
    away(scene, "a-1", epoch=0)
    away(scene, "a-2", epoch=1)
    assert scene.feed(TimerFired(name="regroup.a")) == [SetTimer(name="regroup.a", after_s=30.0)]
    assert scene.feed(TimerFired(name="regroup.a")) == [SetTimer(name="regroup.a", after_s=30.0)]
    scene.join_one("a", "a-2")
    [failed, _] = scene.feed(TimerFired(name="regroup.a"))
    assert (failed.worker, failed.reason) == ("a-1", "a-1 did not join membership 1 in time")


def test_a_refused_start_is_an_attempt_that_failed():
    scene = TransitionHarness(a={})
    scene.plan(a=["n1:0"])
    refused = {"command": "c", "reason": "slot 0 is taken", "task": "a", "worker": "a-1"}
    [failed] = scene.feed(events.CommandRefused(node="n1", **refused))
    assert (failed.action, failed.node, failed.reason) == ("restart", "n1", "slot 0 is taken")


def test_a_start_that_came_late_from_an_earlier_instance_is_ordered_again_and_held_against_nobody():
    scene = TransitionHarness(a={})
    scene.feed(Started(token=11))
    [first] = of(StartWorker, scene.plan(a=["n1:0"]))
    scene.feed(Started(token=12))
    refused = {"command": "c", "reason": "12 has been seen", "task": "a", "worker": "a-1", "token": first.token}
    [again] = scene.feed(events.CommandRefused(node="n1", **refused))
    assert again == msgspec.structs.replace(first, token=12)
    assert scene.feed(events.CommandRefused(node="n1", **refused)) == [], "once"


def test_an_older_plan_changes_nothing():
    scene = TransitionHarness(a={}).running(a=["n1:0"])
    old = Plan(number=1, trigger="late", workers=6, shares=[TaskShare(task="a", slots=[slot("n3:1")])])
    assert scene.feed(events.PlanDecided(plan=old)) == []


def test_a_later_instance_uses_its_own_token():
    scene = TransitionHarness(a={})
    scene.feed(Started(token=12))
    assert {start.token for start in of(StartWorker, scene.plan(a=["n1:0"]))} == {12}


def test_a_plan_that_is_taken_back_before_anybody_moved_leaves_the_task_running():
    scene = TransitionHarness(gpt={}).running(gpt=["n1:0", "n2:0"])
    assert of(events.TaskStateChanged, scene.plan(gpt=["n1:0", "n2:0", "n3:0"]))[0].state is TaskState.RECONFIGURING
    out = scene.plan(gpt=["n1:0", "n2:0"])
    assert [change.state for change in of(events.TaskStateChanged, out)] == [TaskState.RUNNING]
    assert of(events.TaskRecovered, out)
    assert not of(Regroup, out)


def test_a_task_whose_members_were_through_before_a_new_worker_came_is_finished():
    scene = TransitionHarness(gpt={}).running(gpt=["n1:0", "n2:0"])
    scene.plan(gpt=["n1:0", "n2:0", "n3:0"])
    old, other, new = scene.run("gpt").workers
    where = scene.run("gpt").workers[old].slot
    scene.feed(events.WorkerFinished(node="n2", slot=0, task="gpt", worker=other, iterations=1))
    # the news of the first is late: it is ordered into a membership with the new worker, and can't come
    scene.run("gpt").membership.broken = True
    scene.ready("gpt", new)
    assert scene.run("gpt").membership.group == [old, new]
    out = scene.feed(events.WorkerFinished(node=where.node, slot=where.slot, task="gpt", worker=old, iterations=1))
    assert [change.state for change in of(events.TaskStateChanged, out)] == [TaskState.FINISHED]
    assert [order.worker for order in of(StopWorker, out)] == [new]


def test_a_task_that_moves_to_other_slots_altogether_takes_its_state_along():
    scene = TransitionHarness(a={"max_workers": 1}).running(a=["n1:0"])
    out = scene.plan(a=["n2:0"])
    assert of(Regroup, out) == of(StopWorker, out) == [], "the old worker computes until the new one is ready"
    assert members(scene.ready("a", "a-2")) == ["a-1", "a-2"], "the old one gives its state"
    out = scene.join("a")
    assert members(out) == ["a-2"]
    out = scene.join("a")
    assert [stop.worker for stop in of(StopWorker, out)] == ["a-1"]
    assert of(Regroup, out) == []
    assert scene.run("a").state is TaskState.RUNNING


def test_a_worker_that_nobody_started_is_stopped_when_it_is_ready():
    cluster = TransitionHarness(gpt={})
    cluster.plan(gpt=["n1:0"])
    [order] = cluster.feed(events.WorkerReady(node="n2", slot=1, task="gpt", worker="forged-1", pid=1))
    assert isinstance(order, StopWorker)
    assert (order.node, order.slot, order.worker, order.token) == ("n2", 1, "forged-1", 7)
    assert cluster.feed(events.WorkerReady(node="n9", slot=1, task="gpt", worker="forged-1", pid=1)) == []
    assert cluster.run("gpt").workers.keys() == {"gpt-1"}


def causes(kind, out):
    return {order.cause for order in of(kind, out)}


def test_who_begins_again_is_told_why_and_who_begins_is_told_nothing():
    scene = TransitionHarness(a={"heal": Healing.RESTART})
    assert causes(StartWorker, scene.plan(a=["n1:0", "n2:0"])) == {""}
    assert causes(Regroup, scene.ready("a")) == {""}
    scene.join("a")
    at = {"task": "a", "node": "n2", "slot": 0, "worker": "a-2"}
    killed = "a-2 was ended by SIGKILL"
    assert causes(StartWorker, scene.feed(failure(Severity.SEV2, **at, reason=killed))) == {killed}
    echo = failure(Severity.SEV2, task="a", node="n1", slot=0, worker="a-1", reason="connection reset")
    assert causes(StartWorker, scene.feed(echo)) == {killed}, "what came first"
    assert causes(Regroup, scene.ready("a", "a-3") + scene.ready("a", "a-4")) == {killed}
    scene.join("a")
    out = scene.feed(failure(Severity.SEV3, task="a", node="n1", slot=0, worker="a-4", reason="all wait"))
    assert causes(Regroup, out) == {"all wait"}
    scene.join("a")
    raised = failure(Severity.SEV2, task="a", node="n1", slot=0, worker="a-4", reason="ValueError: " + "x" * 600)
    [told] = causes(StartWorker, scene.feed(raised))
    assert (told[:20], len(told)) == ("a-4: ValueError: xxx", 500)


@pytest.mark.parametrize(
    ("fields", "waits"),
    [
        ({}, {"start": 180.0, "regroup": 30.0}),
        ({"heal": Healing.RESTART, "stop_grace_s": 20.0}, {"start": 200.0, "regroup": 50.0}),
        ({**IN_PLACE, "silence_s": 100.0}, {"start": 200.0, "regroup": 200.0}),
        ({**IN_PLACE, "silence_s": 0.0}, {}),
    ],
)
def test_a_script_may_take_as_long_as_it_says_to_end_and_in_place_before_its_loop(fields, waits):
    scene = TransitionHarness(a=fields)
    out = scene.plan(a=["n1:0", "n2:0"]) + scene.ready("a")
    assert {each.name.partition(".")[0]: each.after_s for each in of(SetTimer, out)} == waits
