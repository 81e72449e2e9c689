"""Journals made by hand for the accounts of GPU time: each line says when, and what."""

from msgspec.structs import replace

from unicron.contracts import commands, events, slowdowns
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.tasks import Member, Slot, SlotRef, TaskSpec, WorkerPhase
from unicron.observe.accounts.goodput import Goodput

SPEC = TaskSpec(name="gpt", command=["python", "train.py"], max_workers=4, microbatches=8, iterations=1000)
FOUR = (("w1", "n1", 0), ("w2", "n1", 1), ("w3", "n2", 0), ("w4", "n2", 1))
"""Workers of `gpt`, with node and slot."""

THREE = FOUR[:3]
NEW = (*THREE, ("w5", "n2", 1))
FAILED = "killed"
"""The chain of a failure."""

SUBMITTED = "submitted"
"""The chain of its beginning."""


def admitted(node, slots=2):
    return events.NodeAdmitted(
        node=node, incarnation="1", host="h", slots=[Slot(index=index, kind="gpu") for index in range(slots)]
    )


def plan(trigger, task="gpt", slots=()):
    share = TaskShare(task=task, slots=[SlotRef(node=node, slot=slot) for node, slot in slots])
    return events.PlanDecided(plan=Plan(number=1, trigger=trigger, workers=4, shares=[share]))


def place(worker, node, slot, task="gpt"):
    return {"worker": worker, "node": node, "slot": slot, "task": task}


def start(worker, node, slot, task="gpt"):
    return commands.StartWorker(**place(worker, node, slot, task), spec=SPEC)


def ready(worker, node, slot, task="gpt"):
    return events.WorkerReady(**place(worker, node, slot, task), pid=1)


def regroup(epoch, workers, task="gpt"):
    """Return the order to each node."""
    members, found = [Member(worker=name, node=at, slot=slot) for name, at, slot in workers], []
    for node in sorted({each.node for each in members}):
        here = [each for each in members if each.node == node]
        to = {"task": task, "epoch": epoch, "rendezvous": "h:1", "node": node}
        found.append(commands.Regroup(**to, world_size=len(workers), members=here))
    return found


def regrouped(epoch, workers, iteration, task="gpt", **more):
    more |= {"epoch": epoch, "world_size": len(workers), "iteration": iteration}
    return [events.Regrouped(**place(*where, task), rank=rank, **more) for rank, where in enumerate(workers)]


def finished(iteration, worker="w1", node="n1", slot=0, **more):
    """Return the telemetry of an iteration of `gpt`, in its first membership, that took a second."""
    told = {"task": "gpt", "epoch": 0, "world_size": 4, "seconds": 1.0, "loss": 0.5, **more}
    return events.IterationFinished(node=node, slot=slot, worker=worker, iteration=iteration, **told)


def exited(worker, node, slot, iteration, task="gpt", **more):
    return events.WorkerExited(**place(worker, node, slot, task), iteration=iteration, **more)


def stalled(worker, node, slot, iteration, waited_s):
    told = {"epoch": 0, "iteration": iteration, "phase": WorkerPhase.COMPUTE, "responsive": False}
    return events.WorkerStalled(**place(worker, node, slot), waited_s=waited_s, limit_s=1.0, **told)


def failure(worker="w4", node="n2", slot=1, status=FailureStatus.EXITED_ABNORMALLY, sev=2, task="gpt", **more):
    what = {"severity": Severity(sev), "method": DetectionMethod.PROCESS_SUPERVISION, "status": status}
    return events.FailureDetected(**what, **place(worker, node, slot, task), **more)


def began():
    """Return lines of a task that four workers begin in 11 s, and compute in from 21 on."""
    places = [(node, slot) for _, node, slot in FOUR]
    return [
        (0, admitted("n1"), admitted("n2")),
        (10, SUBMITTED, events.TaskSubmitted(task="gpt", spec=SPEC), plan("task_submitted:gpt", slots=places)),
        (10, SUBMITTED, *(start(*each) for each in FOUR)),
        (20, SUBMITTED, *(ready(*each) for each in FOUR), *regroup(0, FOUR)),
        (21, SUBMITTED, *regrouped(0, FOUR, iteration=0)),
    ]


def killed(status=FailureStatus.EXITED_ABNORMALLY):
    """From 121 on, when ten iterations are done in 100 s: w4 is killed, three go on at 130, and four at 150."""
    return [
        (121, FAILED, exited("w4", "n2", 1, iteration=10, signal=9)),
        (122, FAILED, failure(status=status)),
        (124, FAILED, commands.StopWorker(node="n2", slot=1, worker="w4", task="gpt"), *regroup(1, THREE)),
        (124, FAILED, start("w5", "n2", 1)),
        (130, FAILED, *regrouped(1, THREE, iteration=10, recomputed=2)),
        (141, FAILED, ready("w5", "n2", 1), *regroup(2, NEW)),
        (150, FAILED, *regrouped(2, NEW, iteration=11, seconds=5.0)),
    ]


def grown(*more):
    """From 50 on: a node joins, and a plan gives its two slots to the task, whose workers start up until 90."""
    six = (*FOUR, ("w5", "n3", 0), ("w6", "n3", 1))
    places = [(node, slot) for _, node, slot in six]
    return [
        (50, admitted("n3")),
        (60, "joined", plan("node_joined:n3", slots=places), *(start(*each) for each in six[4:])),
        (80, "joined", *(ready(*each) for each in six[4:]), *regroup(1, six)),
        (90, "joined", *regrouped(1, six, iteration=7, seconds=2.0), *more),
    ]


def slowed():
    """From 61 to 81: iterations that take 6 s take 10, by w3."""
    of_task = {"task": "gpt", "epoch": 0, "iteration": 5, "world_size": 4, "usual_s": 6.0}
    slow = slowdowns.SlowWorker(worker="w3", node="n2", rank=2, factor=2.0)
    return [
        (61, "slow", slowdowns.SlowdownDetected(**of_task, recent_s=10.0, workers=[slow])),
        (81, slowdowns.SlowdownEnded(**of_task, recent_s=6.0, reason="over")),
    ]


def journal(lines):
    """Return the messages of lines of (time, messages or chains of them); a tuple of messages is one chain."""
    found = []
    for number, (at, *messages) in enumerate(lines):
        chain = f"chain-{number}"
        for message in messages:
            if isinstance(message, str):
                chain = message
                continue
            found.append(replace(message, id=f"m{len(found)}", at=float(at), correlation=chain))
    return found


def account(lines, since=0.0):
    """Return the accounts after these lines."""
    return taken(journal(lines), since=since)


def taken(messages, **options):
    """Return the accounts after these messages."""
    goodput = Goodput(**options)
    for message in messages:
        goodput.handle(message)
    return goodput


def spent(row):
    """Return the phases that a row has, rounded."""
    return {phase: round(seconds, 6) for phase, seconds in row.seconds.items() if seconds}
