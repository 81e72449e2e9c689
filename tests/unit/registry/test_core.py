"""The registry's core: what it knows of nodes and tasks, and what users order."""

import math
import re

import msgspec
import pytest
from helpers.unwalked import Unwalked
from unicron_registry.core import NO_PLAN_YET, RegistryCore
from unicron_registry.nodes import heartbeat_s
from unicron_registry.state import RegistryState

from unicron.contracts import events
from unicron.contracts.answers import SaverView
from unicron.contracts.base import SetTimer
from unicron.contracts.commands import SaveStates
from unicron.contracts.failures import Severity
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.queries import DrainNode, GetStatus, PauseTask, RemoveTask, RewindTask, SaveTask, SubmitTask
from unicron.contracts.slowdowns import SlowdownDetected, SlowdownEnded, SlowWorker
from unicron.contracts.states import Saver
from unicron.contracts.storage import StoredState
from unicron.contracts.stragglers import StragglerDetected
from unicron.contracts.tasks import Member, NodeState, ParallelLayout, Slot, SlotRef, TaskSpec, TaskState, WorkerStatus
from unicron.service.health import SILENT_S

SLOTS = [Slot(index=0), Slot(index=1)]
SIZES = {"max_workers": 4, "microbatches": 8, "iterations": 10, "flops_per_iteration": 6e9}
SPEC = TaskSpec(name="gpt", command=["train.py"], weight=2.0, **SIZES)
AT = {"host": "10.0.0.1", "slots": SLOTS, "rendezvous": "10.0.0.1:7", "state_server": "10.0.0.1:8"}


def joined(node="node-1", incarnation="a", at=1.0, **fields):
    said = {"source": node, "at": at, "id": f"{node}-{incarnation}"}
    return events.NodeJoined(**{"node": node, "incarnation": incarnation, **said, **AT, **fields})


def admitted(node="node-1", incarnation="a", **fields):
    return events.NodeAdmitted(node=node, incarnation=incarnation, **{**AT, **fields})


def test_rack_and_domain_of_a_node_are_passed_on_and_shown():
    core = RegistryCore()
    admission = next(
        each for each in core.handle(joined(rack="r1", domain="d1")) if isinstance(each, events.NodeAdmitted)
    )
    assert (admission.rack, admission.domain) == ("r1", "d1")
    view = core.state.nodes["node-1"]
    assert (view.rack, view.domain) == ("r1", "d1")


def lost(node, severity=Severity.SEV1):
    return events.FailureDetected(severity=severity, method="node_health", status="lost_connection", node=node, at=5.0)


def finished(iteration=3, epoch=1, seconds=2.0, loss=4.5):
    where = {"node": "node-1", "slot": 0, "task": "gpt", "worker": "w0", "world_size": 2}
    return events.IterationFinished(**where, epoch=epoch, iteration=iteration, seconds=seconds, loss=loss)


def changed(state, **fields):
    return events.TaskStateChanged(task="gpt", state=state, **fields)


MEMBERS = [Member(worker="w0", node="node-1", slot=0), Member(worker="w1", node="node-1", slot=1)]


@pytest.fixture
def registry():
    return RegistryCore()


@pytest.fixture
def running(registry):
    registry.answer(SubmitTask(spec=SPEC))
    registry.handle(changed(TaskState.RUNNING, epoch=1, members=MEMBERS))
    return registry


def node(registry, name="node-1"):
    return registry.state.nodes[name]


def task(registry, name="gpt"):
    return registry.state.tasks[name]


def refused(registry, query, says):
    before = dict(registry.state.tasks)
    reply, facts = registry.answer(query)
    assert re.search(says, reply.error)
    assert (facts, registry.state.tasks) == ([], before)


# --- nodes


def test_a_node_that_joins_is_admitted_with_its_workers(registry):
    workers = [WorkerStatus(worker="w0", task="gpt", slot=1)]
    assert registry.handle(joined(workers=workers)) == [admitted(workers=workers)]
    assert node(registry).state == NodeState.UP
    assert node(registry).slots == SLOTS


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"slots": []}, "slots"),
        ({"slots": [Slot(index=1), Slot(index=1)]}, "[1, 1]"),
        ({"slots": [Slot(index=-1)]}, "-1"),
        ({"slots": [Slot(index=0, kind="tpu")]}, "tpu"),
        ({"slots": [Slot(index=0, device="GPU-1"), Slot(index=1, device="GPU-1")]}, "GPU-1"),
        ({"incarnation": ""}, "incarnation"),
        ({"host": ""}, "host"),
        ({"node": "planner"}, "planner"),
        ({"workers": [WorkerStatus(worker="w", task="gpt", slot=7)]}, "7"),
        pytest.param({"source": "node-2"}, "node-2", id="in the name of another"),
    ],
)
def test_nonsense_makes_an_alert_and_no_node(registry, fields, named):
    [alert] = registry.handle(joined(**fields))
    assert isinstance(alert, events.Alert)
    assert named in alert.text
    assert registry.state.nodes == {}


def test_the_more_nodes_there_are_the_more_rarely_each_is_to_beat(registry):
    told, most = {}, 0
    for number in range(16384):
        facts = registry.handle(joined(f"node-{number}"))
        told |= {fact.node: fact.heartbeat_s for fact in facts}
        most = max(most, len(facts))
        if number in {999, 1000}:
            assert (told[f"node-{number}"] > 0) == (number == 1000), "until then as they like"
    assert told["node-16383"] == pytest.approx(8.2, abs=0.01)
    assert heartbeat_s(10**6) < SILENT_S
    assert most == 2, "facts for one that joins"
    assert sum(1 / between for between in told.values()) < 3000, "a second, as those that came first are told again"


def test_a_node_that_is_away_is_told_how_often_to_beat_when_it_is_back(registry):
    for number in range(1300):
        registry.handle(joined(f"node-{number}"))
    registry.state.paced.clear()
    registry.handle(joined("first"))
    registry.handle(events.NodeLeft(node="first", incarnation="a"))
    registry.state.paced = {"first": 0.5}
    assert [type(each) for each in registry.handle(joined("last"))] == [events.NodeAdmitted]
    assert "first" not in registry.state.paced
    [back, *_] = registry.handle(joined("first"))
    assert back.heartbeat_s > 0.6


def test_an_agent_that_joins_twice_is_admitted_once_and_one_that_was_restarted_is_marked_as_returned(registry):
    registry.handle(joined())
    assert registry.handle(joined(at=2.0)) == []
    assert registry.handle(joined(incarnation="b", at=9.0)) == [admitted(incarnation="b", returned=True)]
    assert node(registry).since == 1.0, "it never went away"


def test_a_second_node_of_a_name_is_refused_until_the_first_is_gone_and_one_that_was_restarted_is_not(registry):
    registry.handle(joined(home="there"))
    [refused] = registry.handle(joined(incarnation="b", host="10.0.0.2", home="elsewhere"))
    assert (type(refused), refused.incarnation) == (events.NodeRefused, "b")
    assert "10.0.0.1" in refused.reason
    assert node(registry).incarnation == "a"
    for incarnation, home in (("c", "there"), ("d", "")):
        assert registry.handle(joined(incarnation=incarnation, home=home)) == [
            admitted(incarnation=incarnation, returned=True)
        ]
    registry.handle(joined(incarnation="e", home="there"))
    registry.handle(lost("node-1"))
    assert registry.handle(joined(incarnation="f", home="elsewhere")) == [admitted(incarnation="f")]


def test_a_sev1_failure_loses_the_node_until_it_joins_again(registry):
    registry.handle(joined())
    assert registry.handle(lost("node-1")) == []
    assert (node(registry).state, node(registry).since) == (NodeState.LOST, 5.0)
    assert registry.handle(joined(at=8.0)) == [admitted()]
    assert (node(registry).state, node(registry).since) == (NodeState.UP, 8.0)


def test_lesser_failures_and_unknown_nodes_lose_nothing(registry):
    registry.handle(joined())
    registry.handle(lost("node-1", Severity.SEV2))
    registry.handle(lost(""))
    registry.handle(lost("node-9"))
    assert [(view.node, view.state) for view in registry.state.nodes.values()] == [("node-1", NodeState.UP)]


def test_a_node_that_leaves_is_gone_once_and_an_earlier_incarnations_goodbye_is_ignored(registry):
    registry.handle(joined())
    assert registry.handle(events.NodeLeft(node="node-1", incarnation="an earlier one", at=3.0)) == []
    assert node(registry).state == NodeState.UP
    assert registry.handle(events.NodeLeft(node="node-1", incarnation="a", at=4.0)) == [events.NodeGone(node="node-1")]
    assert node(registry).state == NodeState.LEFT
    assert registry.handle(events.NodeLeft(node="node-1", incarnation="a", at=5.0)) == []


def test_draining_goes_there_and_back(registry):
    registry.handle(joined())
    _, facts = registry.answer(DrainNode(node="node-1"))
    assert facts == [events.NodeDrained(node="node-1")]
    assert node(registry).state == NodeState.DRAINING
    reply, facts = registry.answer(DrainNode(node="node-1"))
    assert (reply.error, facts) == ("", [])
    assert "nothing changed" in reply.text
    _, facts = registry.answer(DrainNode(node="node-1", drain=False))
    assert facts == [events.NodeDrained(node="node-1", drain=False)]
    assert node(registry).state == NodeState.UP


def test_a_drained_node_stays_so_when_its_agent_returns(registry):
    registry.handle(joined())
    registry.answer(DrainNode(node="node-1"))
    registry.handle(lost("node-1"))
    assert registry.handle(joined(incarnation="b")) == [admitted(incarnation="b"), events.NodeDrained(node="node-1")]
    assert node(registry).state == NodeState.DRAINING


def leaving(incarnation="a"):
    return events.NodeLeaving(node="node-1", incarnation=incarnation, seconds=20.0)


def test_a_node_that_is_to_go_is_drained_until_it_joins_again(registry):
    registry.handle(joined())
    assert registry.handle(leaving("an earlier one")) == []
    assert registry.handle(leaving()) == [events.NodeDrained(node="node-1")]
    assert node(registry).state == NodeState.DRAINING
    assert registry.handle(leaving()) == []
    assert registry.handle(joined()) == [], "it is the same agent, heard twice"
    assert node(registry).state == NodeState.DRAINING
    registry.handle(events.NodeLeft(node="node-1", incarnation="a"))
    facts = registry.handle(joined(incarnation="b"))
    assert facts == [events.NodeDrained(node="node-1", drain=False), admitted(incarnation="b", returned=False)]
    assert node(registry).state == NodeState.UP


def test_what_a_user_says_of_a_node_that_is_to_go_holds_when_it_is_back(registry):
    registry.handle(joined())
    registry.handle(leaving())
    registry.answer(DrainNode(node="node-1"))
    assert registry.handle(joined(incarnation="b"))[1:] == [events.NodeDrained(node="node-1")]
    assert registry.handle(leaving("b")) == [], "it is drained already"
    assert registry.handle(joined(incarnation="c"))[1:] == [events.NodeDrained(node="node-1")]


def died(deaths=8, *, helpless=True):
    return events.StandbyDied(node="node-1", how="is gone", deaths=deaths, wait_s=1.0, helpless=helpless)


REVIVED = events.StandbyRevived(node="node-1", seconds=90.0)


def test_a_node_whose_standby_dies_is_drained_where_that_goes_on_and_until_one_lives(registry):
    registry.handle(joined())
    assert registry.handle(died(1, helpless=False)) == []
    assert "the warm standby of node-1 is gone" in node(registry).problem
    drained, alert = registry.handle(died())
    assert drained == events.NodeDrained(node="node-1")
    assert "node-1 gets no more work until it can start workers" in alert.text
    assert registry.handle(died(9)) == [], "it is drained already"
    assert registry.handle(REVIVED) == [events.NodeDrained(node="node-1", drain=False)]
    assert (node(registry).state, node(registry).problem) == (NodeState.UP, "")
    assert registry.handle(REVIVED) == []


@pytest.mark.parametrize("keep", ["drained by a user", "to go"])
def test_a_standby_that_lives_again_puts_no_node_back_that_is_out_for_another_reason(registry, keep):
    registry.handle(joined())
    if keep == "to go":
        registry.handle(died())
        registry.handle(leaving())
    else:
        registry.answer(DrainNode(node="node-1"))
        assert registry.handle(died()) == []
    assert registry.handle(REVIVED) == []
    assert node(registry).state == NodeState.DRAINING


def test_another_agent_has_another_standby(registry):
    registry.handle(joined())
    registry.handle(died())
    assert registry.handle(joined(incarnation="b"))[0] == events.NodeDrained(node="node-1", drain=False)
    assert node(registry).problem == ""


def test_a_lost_node_can_be_kept_out_for_when_it_returns(registry):
    registry.handle(joined())
    registry.handle(lost("node-1"))
    reply, _ = registry.answer(DrainNode(node="node-1"))
    assert "lost" in reply.text
    assert node(registry).state == NodeState.LOST
    assert registry.handle(joined(incarnation="b"))[1:] == [events.NodeDrained(node="node-1")]


@pytest.mark.parametrize(
    ("source", "node", "drain", "facts"),
    [
        pytest.param("straggler", "node-1", True, [events.NodeDrained(node="node-1")], id="told to"),
        pytest.param("straggler", "node-1", False, [], id="not told to"),
        pytest.param("straggler", "node-7", True, [], id="no such node"),
        pytest.param("node-2", "node-1", True, [], id="said by another"),
    ],
)
def test_a_slow_node_is_drained_when_the_straggler_service_may_ask_for_it(registry, source, node, drain, facts):
    registry.handle(joined())
    seen = {"task": "gpt", "epoch": 1, "world_size": 2, "first": 0, "last": 90, "steps": 20}
    slow = {"slowdown": 1.5, "waste": 0.33, "diagnosis": "slow-worker"}
    found = StragglerDetected(**seen, **slow, node=node, drain=drain, source=source)
    assert registry.handle(found) == facts
    assert registry.handle(found) == [], "it is drained already"


def test_what_happens_to_a_node_costs_no_walk_through_all_nodes(registry):
    registry.state.nodes = Unwalked()
    assert registry.handle(joined()) == [admitted()]
    registry.handle(admitted())
    registry.handle(lost("node-1"))
    assert node(registry).state == NodeState.LOST
    assert registry.handle(joined(incarnation="b")) == [admitted(incarnation="b")]
    gone, alert = registry.handle(events.NodeLeft(node="node-1", incarnation="b", reason="its clock is off"))
    assert gone == events.NodeGone(node="node-1")
    text = "node node-1 was not taken in: its clock is off"
    assert alert == events.Alert(text=text, node="node-1")


def test_an_unknown_node_of_a_large_cluster_is_told_with_a_few_of_the_known_ones(registry):
    for number in range(30):
        registry.handle(joined(f"node-{number:02}"))
    known = ", ".join(f"node-{number:02}" for number in range(10))
    refused(registry, DrainNode(node="node-99"), f"no node 'node-99'; the known ones are {known} and 20 more")


# --- orders about tasks


def test_a_submitted_task_waits_and_says_why(registry):
    reply, facts = registry.answer(SubmitTask(spec=SPEC))
    assert facts == [events.TaskSubmitted(task="gpt", spec=SPEC), SetTimer(name="idle:gpt", after_s=1800.0)]
    assert "gpt" in reply.text
    assert (task(registry).state, task(registry).reason) == (TaskState.WAITING, NO_PLAN_YET)


@pytest.mark.parametrize("commit", ["", "1c2d3e4f5a6b"])
def test_the_same_spec_again_changes_nothing(running, commit):
    before = task(running)
    reply, facts = running.answer(SubmitTask(spec=msgspec.structs.replace(SPEC, commit=commit)))
    assert facts == []
    assert "nothing changed" in reply.text
    assert task(running) is before


def test_another_spec_under_a_living_name_is_refused_and_says_what_differs(running):
    refused(running, SubmitTask(spec=msgspec.structs.replace(SPEC, weight=1.0)), r"weight 2.0 -> 1.0")
    assert task(running).spec == SPEC


@pytest.mark.parametrize("end", [TaskState.FINISHED, TaskState.FAILED])
def test_the_name_of_an_ended_task_may_be_used_again(running, end):
    running.handle(finished())
    running.handle(changed(end, reason="over"))
    other = msgspec.structs.replace(SPEC, weight=1.0)
    _, facts = running.answer(SubmitTask(spec=other))
    assert facts[0] == events.TaskSubmitted(task="gpt", spec=other)
    view = task(running)
    assert (view.state, view.iteration, view.loss, view.members) == (TaskState.WAITING, -1, None, [])


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "a.b"},
        {"command": []},
        {"weight": 0.0},
        {"weight": math.nan},
        {"min_workers": 5},
        {"min_workers": 0},
        {"min_workers": 3, "max_workers": 3, "unit": 2},
        {"iterations": 0},
        {"flops_per_iteration": math.inf},
        {"throughput": {2: -1.0}},
        {"env": {"A=B": "1"}},
        {"layout": ParallelLayout(shard=0)},
        {"layout": ParallelLayout(pipeline=0)},
    ],
)
def test_a_spec_that_can_not_run_is_refused(registry, fields):
    [(field, value)] = list(fields.items())[-1:]
    refused(registry, SubmitTask(spec=msgspec.structs.replace(SPEC, **fields)), field)
    assert registry.state.tasks == {}, value


def test_a_layout_that_makes_no_whole_replicas_says_so(registry):
    spec = msgspec.structs.replace(SPEC, min_workers=5, max_workers=7, layout=ParallelLayout(tensor=2, pipeline=2))
    error = registry.answer(SubmitTask(spec=spec))[0].error
    assert "no multiple of it that makes whole replicas of 4 workers lies between" in error


def test_a_node_given_up_between_its_joining_and_its_admission_is_up_as_it_is_to_all_others(registry):
    (told,) = registry.handle(joined())
    registry.handle(lost("node-1"))
    assert registry.state.nodes["node-1"].state is NodeState.LOST
    assert registry.handle(told) == []
    assert registry.state.nodes["node-1"].state is NodeState.UP
    registry.handle(lost("node-1"))
    assert registry.state.nodes["node-1"].state is NodeState.LOST


@pytest.mark.parametrize("end", [TaskState.REMOVED, TaskState.FINISHED])
def test_a_removed_task_is_forgotten_when_its_end_is_told(running, end):
    _, facts = running.answer(RemoveTask(task="gpt"))
    assert facts == [events.TaskRemoved(task="gpt")]
    running.handle(changed(TaskState.RUNNING, epoch=2))
    running.handle(finished(epoch=2))
    assert (task(running).state, task(running).waf) == (TaskState.REMOVED, 0.0)
    running.handle(changed(end))
    assert running.state.tasks == {}


def test_the_name_of_a_removed_task_is_free_when_its_end_is_told(running):
    running.answer(RemoveTask(task="gpt"))
    # once more: the end that is yet to be told would be taken for the new task's
    again, facts = running.answer(RemoveTask(task="gpt"))
    assert (again.text, facts) == ("task gpt is just being removed; nothing changed", [])
    refused(running, SubmitTask(spec=SPEC), "just being removed")
    running.handle(changed(TaskState.REMOVED))
    running.answer(SubmitTask(spec=SPEC))
    running.handle(finished())
    assert (task(running).state, task(running).iteration) == (TaskState.WAITING, -1)


def test_an_ended_task_is_removed_at_once(running):
    running.handle(changed(TaskState.FINISHED))
    assert running.answer(RemoveTask(task="gpt"))[1] == [events.TaskRemoved(task="gpt")]
    assert running.state.tasks == {}


# --- facts about tasks


def test_a_waiting_task_tells_the_plans_reason(registry):
    registry.answer(SubmitTask(spec=SPEC))
    share = TaskShare(task="gpt", reason="needs 4 workers, 2 are healthy")
    registry.handle(events.PlanDecided(plan=Plan(number=2, trigger="launch:gpt", workers=2, shares=[share])))
    assert task(registry).reason == share.reason
    place = TaskShare(task="gpt", slots=[SlotRef(node="node-1", slot=0)])
    registry.handle(events.PlanDecided(plan=Plan(number=3, trigger="node_joined:node-2", workers=4, shares=[place])))
    assert task(registry).reason == ""


def test_the_status_shows_the_whole_plan_though_only_what_is_new_travels(registry):
    shares = [TaskShare(task=name, slots=[SlotRef(node=name, slot=0)], before=1) for name in ("a", "b")]
    whole = Plan(number=1, trigger="node_joined:n1", workers=2, shares=shares, tasks=["a", "b"])
    registry.handle(events.PlanDecided(plan=whole))
    news = msgspec.structs.replace(whole, number=2, shares=[msgspec.structs.replace(shares[1], slots=[])])
    registry.handle(events.PlanDecided(plan=news))
    plan = registry.answer(GetStatus())[0].status.plan
    assert (plan.number, plan.shares) == (2, [shares[0], *news.shares])


def test_an_older_plan_changes_nothing(registry):
    newer = Plan(number=3, trigger="t", workers=2)
    registry.handle(events.PlanDecided(plan=newer))
    registry.handle(events.PlanDecided(plan=Plan(number=2, trigger="t", workers=1)))
    assert registry.answer(GetStatus())[0].status.plan == newer


def test_a_task_that_shrinks_to_nothing_tells_the_plans_reason(running):
    share = TaskShare(task="gpt", reason="needs 2 workers, 1 is healthy")
    running.handle(events.PlanDecided(plan=Plan(number=1, trigger="t", workers=1, shares=[share])))
    assert task(running).reason == ""
    running.handle(changed(TaskState.WAITING))
    assert task(running).reason == share.reason


def test_waf_is_weight_times_flops_per_second_while_it_runs(running):
    running.handle(finished(iteration=3, seconds=2.0, loss=4.5))
    view = task(running)
    assert (view.iteration, view.loss, view.iteration_s, view.waf) == (3, 4.5, 2.0, 2.0 * 6e9 / 2.0)
    assert view.recent_s == [2.0]
    running.handle(changed(TaskState.RECOVERING, epoch=2, members=MEMBERS))
    assert task(running).waf == 0.0
    running.handle(finished(iteration=4, epoch=2, seconds=3.0))
    assert (task(running).waf, task(running).recent_s) == (4e9, [3.0]), "other workers need other times"
    running.handle(changed(TaskState.RUNNING, epoch=2))
    assert task(running).waf == 4e9


def test_an_iteration_without_duration_does_not_break_it(running):
    running.handle(finished(seconds=0.0))
    assert (task(running).iteration, task(running).waf) == (3, 0.0)


def test_telemetry_of_an_older_epoch_is_ignored(running):
    running.handle(changed(TaskState.RUNNING, epoch=5))
    running.handle(finished(epoch=4))
    assert task(running).iteration == -1


def test_iterations_are_believed_of_tasks_that_there_are(running):
    assert running.is_credible(finished())
    assert not RegistryCore().is_credible(finished())
    assert RegistryCore().is_credible(events.NodeHeartbeat(node="n1", incarnation="a"))


def test_a_finished_task_shows_its_last_iteration_even_if_telemetry_was_lost(running):
    running.handle(finished(iteration=7))
    running.handle(changed(TaskState.FINISHED))
    assert (task(running).iteration, task(running).waf) == (SPEC.iterations - 1, 0.0)


def test_who_is_slow_is_shown_until_it_is_over(running):
    told = {"task": "gpt", "epoch": 0, "iteration": 9, "world_size": 2, "usual_s": 1.0, "recent_s": 1.5}
    workers = [SlowWorker(worker="gpt-2", node="n2", rank=1, factor=1.48)]
    running.handle(SlowdownDetected(**told, workers=workers))
    who = "computing takes gpt-2 (rank 1 on n2) 1.48 times as long"
    assert task(running).slow == f"an iteration takes 1.5 s, not 1 s: {who}"
    running.handle(changed(TaskState.RECOVERING))
    assert task(running).slow
    running.handle(SlowdownEnded(**told, reason="back in its band"))
    assert task(running).slow == ""
    running.handle(SlowdownDetected(**told, computing=1.3))
    assert task(running).slow.endswith("all compute 1.30 times as long as usual")
    running.handle(changed(TaskState.FINISHED))
    assert task(running).slow == ""
    running.handle(SlowdownDetected(**told))
    assert task(running).slow == ""


def test_a_broken_task_keeps_its_traceback(running):
    running.handle(events.TaskBroken(task="gpt", reason="ValueError at iteration 3, twice", traceback="Traceback ..."))
    running.handle(changed(TaskState.FAILED))
    view = task(running)
    assert (view.state, view.reason) == (TaskState.FAILED, "ValueError at iteration 3, twice")
    assert view.traceback == "Traceback ..."


def secured(worker, *nodes, node="node-1", iteration=3):
    return events.StateSecured(node=node, slot=0, task="gpt", worker=worker, iteration=iteration, nodes=list(nodes))


def unprotected(worker, reason="no room"):
    return events.StateUnprotected(node="node-1", slot=0, task="gpt", worker=worker, reason=reason)


def test_who_saves_and_where_copies_are_is_told_until_it_is_no_longer_so(running):
    savers = [Saver(worker="w0"), Saver(worker="w1")]
    assert running.handle(SaveStates(node="node-1", task="gpt", savers=savers)) == []
    assert running.handle(secured("w0", "node-2")) == []
    assert running.handle(unprotected("w1")) == []
    assert task(running).savers == {"w0": SaverView(nodes=["node-1", "node-2"]), "w1": SaverView(problem="no room")}
    running.handle(secured("w1"))
    assert task(running).savers["w1"] == SaverView(nodes=["node-1"]), "it can again"
    running.handle(unprotected("w0"))
    assert task(running).savers["w0"] == SaverView(problem="no room")
    only = [Member(worker="w1", node="node-1", slot=1)]
    running.handle(changed(TaskState.RECOVERING, epoch=2, members=only))
    assert task(running).savers == {"w1": SaverView(nodes=["node-1"])}
    running.handle(changed(TaskState.FINISHED))
    running.handle(secured("w1"))
    assert task(running).savers == {}


def test_what_came_of_a_drill_is_told_as_a_node_of_the_task_says(running):
    at = {"slot": 0, "task": "gpt", "worker": "w", "iteration": 2, "rank": 1}
    for node, problem in (("node-1", ""), ("elsewhere", "a lie")):
        assert running.handle(events.ScriptDrilled(node=node, **at, problem=problem)) == []
    assert "take the place of rank 1: on trial from iteration 2 on it computed the same" in task(running).drill
    [alert] = running.handle(events.ScriptDrilled(node="node-1", **at, problem="it has a lock"))
    assert alert.text.startswith("whenever task gpt loses a rank, all its ranks begin again: in its drill another")


def test_news_of_unknown_tasks_and_other_facts_change_nothing(registry):
    before = msgspec.msgpack.encode(registry.state)
    for message in (
        finished(),
        changed(TaskState.RUNNING),
        events.TaskBroken(task="gpt", reason="r"),
        events.WorkerReady(node="node-1", slot=0, task="gpt", worker="w", pid=1),
        lost("node-1"),
    ):
        assert registry.handle(message) == []
    assert msgspec.msgpack.encode(registry.state) == before


def test_status_lists_nodes_by_name_and_tasks_by_submission(registry):
    for name in ("node-2", "node-1"):
        registry.handle(joined(name))
    for name in ("b", "a"):
        registry.answer(SubmitTask(spec=msgspec.structs.replace(SPEC, name=name)))
    status = registry.answer(GetStatus())[0].status
    assert [view.node for view in status.nodes] == ["node-1", "node-2"]
    assert [view.spec.name for view in status.tasks] == ["b", "a"]


def test_the_state_survives_the_bus(running):
    running.handle(joined())
    running.answer(DrainNode(node="node-1"))
    running.handle(finished())
    running.handle(events.PlanDecided(plan=Plan(number=1, trigger="t", workers=2, shares=[TaskShare(task="gpt")])))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(running.state), type=RegistryState)
    assert again == running.state
    assert RegistryCore(again).answer(GetStatus()) == running.answer(GetStatus())


# --- orders about tasks that have a storage --------------------------------------------------------------------------


@pytest.fixture
def storing():
    """A running task with a storage, whose iteration 6 is done, and one without."""
    core = RegistryCore()
    for name, root in (("gpt", "/storage"), ("bare", "")):
        core.answer(SubmitTask(spec=TaskSpec(name=name, command=["t.py"], iterations=10, checkpoints=root)))
        members = [Member(worker=f"{name}-1", node="n1", slot=0)]
        core.handle(events.TaskStateChanged(task=name, state=TaskState.RUNNING, epoch=1, members=members, reason=""))
    where = {"node": "n1", "slot": 0, "worker": "gpt-1", "epoch": 1, "world_size": 1}
    core.handle(events.IterationFinished(task="gpt", iteration=6, seconds=1.0, loss=1.0, **where))
    return core


def view(storing):
    return storing.state.tasks["gpt"]


def stored(iteration):
    return events.CheckpointStored(node="n1", task="gpt", iteration=iteration, address="/storage/gpt/step", removed=[])


def test_pausing_goes_there_and_back(storing):
    reply, facts = storing.answer(PauseTask(task="gpt"))
    assert (reply.error, facts, view(storing).paused) == ("", [events.TaskPaused(task="gpt", paused=True)], True)
    assert storing.answer(PauseTask(task="gpt"))[1] == [], "it is paused already"
    _, facts = storing.answer(PauseTask(task="gpt", pause=False))
    assert (facts, view(storing).paused) == ([events.TaskPaused(task="gpt", paused=False)], False)


def test_saving_is_ordered_after_the_last_iteration_that_is_done(storing):
    _, facts = storing.answer(SaveTask(task="gpt"))
    assert facts == [events.CheckpointOrdered(task="gpt", after=6)]
    assert storing.handle(stored(7)) == []
    assert not view(storing).state.ended, "it was not to be stopped"


def test_who_stops_a_task_with_its_state_saved_has_it_removed_when_that_is_on_storage(storing):
    _, facts = storing.answer(SaveTask(task="gpt", stop=True))
    assert facts == [events.CheckpointOrdered(task="gpt", after=6)]
    assert storing.handle(stored(6)) == [], "that one was on its way before"
    assert storing.handle(stored(8)) == [events.TaskRemoved(task="gpt")]
    assert view(storing).state is TaskState.REMOVED
    assert "iteration 8 in /storage/gpt/step" in view(storing).reason


def test_a_task_that_has_gone_back_is_stopped_with_an_earlier_state_than_it_had(storing):
    found = StoredState(root="/storage", folder="step-000003", iteration=3, layout=ParallelLayout())
    storing.handle(events.CheckpointFound(node="n1", task="gpt", search=1, stored=found, skipped=[]))
    assert storing.answer(SaveTask(task="gpt", stop=True))[1] == [events.CheckpointOrdered(task="gpt", after=2)]
    assert storing.handle(stored(4)) == [events.TaskRemoved(task="gpt")]


def test_what_can_not_be_saved_is_not_stopped(storing):
    storing.answer(SaveTask(task="gpt", stop=True))
    [alert] = storing.handle(events.CheckpointFailed(node="n1", task="gpt", reason="the disk is full"))
    assert isinstance(alert, events.Alert)
    assert re.search("not stopped.*the disk is full.*unicron task stop gpt", alert.text)
    assert storing.handle(stored(8)) == [], "nor later, when nobody expects it any more"


def test_whoever_pauses_it_meanwhile_does_not_have_it_stopped(storing):
    storing.answer(SaveTask(task="gpt", stop=True))
    storing.answer(PauseTask(task="gpt"))
    assert storing.handle(stored(8)) == []


def test_going_back_is_told_with_its_iteration(storing):
    _, facts = storing.answer(RewindTask(task="gpt", iteration=4))
    assert facts == [events.TaskRewound(task="gpt", iteration=4)]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        (PauseTask(task="other"), "no task 'other'; the known ones are bare, gpt"),
        (RemoveTask(task="other"), "no task 'other'; the known ones are bare, gpt"),
        (SaveTask(task="bare"), "bare has no storage"),
        (RewindTask(task="bare", iteration=1), "bare has no storage"),
        (RewindTask(task="gpt", iteration=10), "iterations 0 to 9, not 10"),
        (RewindTask(task="gpt", iteration=-1), "iterations 0 to 9, not -1"),
    ],
)
def test_what_can_not_be_done_is_refused(storing, query, says):
    refused(storing, query, says)


def test_nothing_is_ordered_of_a_task_that_does_not_run(storing):
    storing.handle(events.TaskStateChanged(task="gpt", state=TaskState.WAITING, epoch=1, members=[], reason=""))
    refused(storing, SaveTask(task="gpt"), "gpt is waiting.*wait until it runs")
    storing.handle(events.TaskStateChanged(task="gpt", state=TaskState.FINISHED, epoch=1, members=[], reason=""))
    for query in (PauseTask(task="gpt"), SaveTask(task="gpt"), RewindTask(task="gpt", iteration=1)):
        refused(storing, query, "gpt is finished")
