"""A storm's invariants, on journals that are written for them."""

from unicron_simulator.storms.invariants import Invariants
from unicron_simulator.storms.liars import Liars

from unicron import codec, subjects
from unicron.contracts.commands import StartWorker, StopWorker
from unicron.contracts.events import (
    CommandRefused,
    FailureDetected,
    NodeAdmitted,
    NodeJoined,
    NodeLeft,
    PlanDecided,
    WorkerReady,
)
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.tasks import SlotRef, TaskSpec, TaskState, WorkerStatus


def lost(node, correlation, severity=Severity.SEV1):
    status = FailureStatus.LOST_CONNECTION
    method = DetectionMethod.NODE_HEALTH
    return FailureDetected(severity=severity, method=method, status=status, node=node, correlation=correlation)


def plan(*shares):
    return Plan(number=1, trigger="x", workers=1, shares=list(shares), waf=1.0, reward=1.0)


def test_a_loss_wants_a_plan_of_its_own():
    found = Invariants()
    found.messages += [lost("n1", "a"), lost("n2", "b", Severity.SEV2)]
    assert found.unplanned() == "no plan answers the loss of n1"
    found.messages.append(PlanDecided(plan=plan(), correlation="b"))
    assert found.unplanned()
    found.messages.append(PlanDecided(plan=plan(), correlation="a"))
    assert found.unplanned() == ""


def test_a_plan_gives_no_slots_to_a_task_that_ended():
    found = Invariants()
    found.plan = plan(TaskShare(task="gpt", slots=[SlotRef(node="n1", slot=0)]), TaskShare(task="bert"))
    found.ended["bert"] = TaskState.FAILED
    assert found.unplanned() == ""
    found.ended["gpt"] = TaskState.FAILED
    assert found.unplanned().startswith("gpt ended")


def said(lie_tracker, message, name, speaker):
    return lie_tracker.record_lie(subjects.for_message(message), codec.encode(message), name, speaker)


def start(worker, node="n1"):
    spec = TaskSpec(name="gpt", command=["x"])
    return StartWorker(node=node, slot=0, worker=worker, task="gpt", spec=spec)


def test_one_nobody_had_heard_of_needs_no_answer_where_its_node_joins_anew_without_it():
    there = WorkerStatus(worker="gpt-1", task="gpt", slot=0)
    ready = WorkerReady(node="n1", slot=0, task="gpt", worker="gpt-1", pid=1)
    for heard, workers in (([], []), ([ready], []), ([], [there])):
        found = Invariants()
        found.messages += [start("gpt-1"), *heard]
        found.struck("gpt-1", "n1", "gpt")
        found.messages.append(NodeAdmitted(node="n1", incarnation="b", host="n1", slots=[], workers=workers))
        found.all_answered()
        assert bool(found.violation) == bool(heard or workers)


def test_who_is_struck_needs_an_answer_and_one_from_before_counts_only_where_its_node_has_lied():
    for lied in (False, True):
        found = Invariants()
        found.messages += [lost("n1", "earlier"), start("gpt-1")]
        if lied:
            said(found.lie_tracker, NodeLeft(node="n1", source="n1", at=1_000.0, incarnation="a"), "lie-1", "n1")
        found.messages.append(lost("n1", "x", Severity.SEV2))  # of nobody in particular
        found.struck("gpt-1", "n1", "gpt")
        found.all_answered()
        assert found.violation == "nothing was done about gpt-1 on n1", "the loss before it was started is no answer"
        found = Invariants()
        found.messages.append(start("gpt-1"))
        if lied:
            said(found.lie_tracker, NodeLeft(node="n1", source="n1", at=1_000.0, incarnation="a"), "lie-1", "n1")
        found.messages.append(lost("n1", "x"))
        found.struck("gpt-1", "n1", "gpt")
        found.all_answered()
        assert bool(found.violation) is not lied


def test_a_command_that_nobody_gave_makes_no_liar_of_the_node_that_it_is_for():
    found = Invariants()
    said(found.lie_tracker, StopWorker(node="n1", slot=0, worker="gpt-1", task="gpt", at=1_000.0), "lie-1", "n1")
    found.messages += [start("gpt-1"), lost("n1", "x")]
    found.struck("gpt-1", "n1", "gpt")
    found.all_answered()
    assert found.violation == "nothing was done about gpt-1 on n1"


def test_a_lie_is_of_a_chain_of_its_own_where_it_claims_one_that_nobody_may_believe():
    found = Invariants()
    said(found.lie_tracker, StopWorker(node="n1", slot=0, worker="gpt-1", task="gpt", at=1_000.0), "lie-1", "n1")
    liars = Liars(None, None, {}, found)
    for claimed, kept in (("lie-1", "lie-2"), ("lie-9", "lie-9"), ("advisory-1", "advisory-1")):
        lie = NodeJoined(node="n1", source="n1", incarnation="a", host="h", slots=[], correlation=claimed)
        assert codec.decode_message(liars._apart(codec.encode(lie), "lie-2")).correlation == kept
    assert liars._apart(b"no message", "lie-2") == b"no message"
    assert found.lie_tracker.problem(CommandRefused(node="n1", command="x", reason="", correlation="lie-1")) == ""
    assert found.lie_tracker.problem(NodeLeft(node="n1", incarnation="a", correlation="lie-1"))
