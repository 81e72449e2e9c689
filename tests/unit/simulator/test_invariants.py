"""What a storm looks for in the journal, on journals that are written for it."""

from unicron_simulator.invariants import Invariants

from unicron.contracts.events import FailureDetected, PlanDecided
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.tasks import SlotRef, TaskState


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
