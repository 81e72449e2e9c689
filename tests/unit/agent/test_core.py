"""The agent's decisions: fencing, what a worker's words become, and who has stalled."""

import pytest
from unicron_agent.core import AgentCore, StallLimits, Worker

from unicron.contracts import worker as wire
from unicron.contracts.commands import StopWorker
from unicron.contracts.events import (
    CollectiveFailed,
    FailureDetected,
    IterationFinished,
    RecordingSwitched,
    Regrouped,
    Severity,
    StepTimed,
    WorkerExited,
    WorkerRaised,
    WorkerReady,
    WorkerStalled,
)
from unicron.contracts.timings import Op
from unicron.errors import InvalidInputError, StaleTokenError

PLACE = {"node": "n1", "slot": 1, "task": "gpt", "worker": "gpt-1"}


@pytest.fixture
def core():
    core = AgentCore(node="n1", limits=StallLimits(factor=3, unresponsive_s=0.5, hang_s=20))
    core.workers["gpt-1"] = Worker(worker="gpt-1", task="gpt", slot=1, pid=42)
    return core


def compute(core, *times, done=1):
    """Let the worker finish a microbatch at each of `times`."""
    for offset, time in enumerate(times):
        core.said("gpt-1", wire.Progress(iteration=3, phase="compute", done=done + offset), time)


def stop(token, node="n1"):
    return StopWorker(node=node, token=token, slot=1, worker="gpt-1", task="gpt")


def test_a_command_with_an_older_token_is_refused(core):
    core.admit(stop(5))
    core.admit(stop(5))
    core.admit(stop(7))
    with pytest.raises(StaleTokenError, match="token 6; 7"):
        core.admit(stop(6))
    assert core.token == 7


def test_a_command_for_another_node_is_refused_and_its_token_forgotten(core):
    with pytest.raises(StaleTokenError, match="'n2'"):
        core.admit(stop(9, node="n2"))
    assert core.token == 0


@pytest.mark.parametrize(
    ("method", "node", "joined", "sequence", "rejoins"),
    [
        pytest.param("node_health", "n1", 7, 8, True, id="given up after it joined"),
        pytest.param("node_health", "n1", 7, 6, False, id="joined since"),
        pytest.param("node_health", "n1", None, 8, False, id="joining already"),
        pytest.param("process_supervision", "n1", 7, 8, False, id="given up for what happens on it"),
        pytest.param("node_health", "n2", 7, 8, False, id="another node, or a task of the same name"),
    ],
)
def test_a_node_that_lives_joins_again_when_it_is_given_up_for_its_silence(
    core, method, node, joined, sequence, rejoins
):
    core.joined = joined
    core.read(FailureDetected(severity=Severity.SEV1, method=method, status="lost_connection", node=node), sequence)
    assert core.wrongly_given_up == rejoins


def test_a_node_given_up_before_it_knows_where_it_joined_joins_again_when_it_does(core):
    core.read(FailureDetected(severity=Severity.SEV1, method="node_health", status="s", node="n1"), 8)
    assert not core.wrongly_given_up
    core.joined = 9
    assert not core.wrongly_given_up
    core.joined = 7
    assert core.wrongly_given_up


def test_a_command_from_before_the_node_joined_anew_passes_without_effect(core):
    core.incarnation = "new"
    assert core.admit(StopWorker(node="n1", token=1, incarnation="new", slot=1, worker="gpt-1", task="gpt"))
    assert core.admit(stop(1))
    assert not core.admit(StopWorker(node="n1", token=1, incarnation="old", slot=1, worker="gpt-1", task="gpt"))


def test_what_a_worker_says_becomes_a_fact_with_its_place(core):
    assert core.said("gpt-1", wire.Ready(), 1.0) == [WorkerReady(**PLACE, pid=42)]
    joined = wire.Joined(
        epoch=2, rank=0, world_size=3, iteration=7, kept=4, recomputed=2, state_from="gpt-2", seconds=0.1
    )
    assert core.said("gpt-1", joined, 2.0) == [
        Regrouped(
            **PLACE, epoch=2, rank=0, world_size=3, iteration=7, kept=4, recomputed=2, state_from="gpt-2", seconds=0.1
        )
    ]
    assert core.said("gpt-1", wire.Broken(epoch=2, iteration=7, error="reset"), 3.0) == [
        CollectiveFailed(**PLACE, epoch=2, iteration=7, error="reset")
    ]
    raised = wire.Raised(iteration=7, exception="ValueError", text="no", traceback="...")
    assert core.said("gpt-1", raised, 4.0) == [
        WorkerRaised(**PLACE, iteration=7, exception="ValueError", text="no", traceback="...")
    ]


def test_only_rank_0_tells_of_iterations(core):
    def iterated(rank):
        return wire.Iterated(iteration=7, epoch=2, rank=rank, world_size=3, seconds=0.5, loss=2.5)

    assert core.said("gpt-1", iterated(1), 1.0) == []
    assert core.said("gpt-1", iterated(0), 1.0) == [
        IterationFinished(**PLACE, epoch=2, iteration=7, world_size=3, seconds=0.5, loss=2.5)
    ]


def test_a_worker_nobody_knows_says_nothing(core):
    assert core.said("gpt-9", wire.Ready(), 1.0) == []


def test_a_silent_worker_stalls_after_three_times_its_microbatch(core):
    compute(core, 10.0, 10.4, 10.8, 11.2)
    assert core.stalled(12.3) == []
    [fact] = core.stalled(12.5)
    assert fact == WorkerStalled(
        **PLACE,
        epoch=-1,
        iteration=3,
        phase="compute",
        waited_s=pytest.approx(1.3),
        limit_s=pytest.approx(1.2),
        responsive=False,
    )
    assert core.stalled(12.6) == []  # once an iteration


def test_a_worker_that_answers_is_given_longer(core):
    compute(core, 10.0, 10.1, 10.2)
    core.said("gpt-1", wire.Pong(), 30.0)
    assert core.stalled(30.1) == []
    core.said("gpt-1", wire.Pong(), 30.4)
    [fact] = core.stalled(30.5)
    assert fact.responsive
    assert fact.limit_s == 20


def test_what_a_worker_recorded_is_passed_on_of_every_rank(core):
    op = Op(kind=1, microbatch=3, start_us=10, duration_us=20)
    timed = wire.Timed(iteration=20, epoch=2, rank=1, world_size=3, began=5.5, ops=[op])
    fields = {"epoch": 2, "iteration": 20, "rank": 1, "world_size": 3, "began": 5.5, "ops": [op]}
    assert core.said("gpt-1", timed, 1.0) == [StepTimed(**PLACE, **fields)]


def test_workers_are_told_what_to_record_now_and_when_they_connect_later(core):
    assert core.sample_of("gpt-1") is None
    assert core.switch(RecordingSwitched(task="gpt", share=0.25)) == ["gpt-1"]
    assert core.switch(RecordingSwitched(task="bert", share=0.0)) == []
    core.workers["gpt-2"] = Worker(worker="gpt-2", task="gpt", slot=0, pid=43)
    core.workers["bert-1"] = Worker(worker="bert-1", task="bert", slot=2, pid=44)
    assert [core.sample_of(name) for name in ("gpt-2", "bert-1", "gone")] == [
        wire.Sample(period=4),
        wire.Sample(period=0),
        None,
    ]
    with pytest.raises(InvalidInputError, match="share 2"):
        core.switch(RecordingSwitched(task="gpt", share=2.0))
    assert core.sample_of("gpt-2") == wire.Sample(period=4)


def test_who_waits_for_others_or_has_not_begun_does_not_stall(core):
    assert core.stalled(1000.0) == []
    compute(core, 10.0, 10.1)
    core.said("gpt-1", wire.Progress(iteration=3, phase="waiting", done=2), 10.2)
    assert core.stalled(1000.0) == []


def test_the_first_microbatch_after_a_wait_is_no_measure(core):
    compute(core, 10.0, 10.1)
    core.said("gpt-1", wire.Progress(iteration=3, phase="reduce", done=2), 10.2)
    compute(core, 50.0, 50.1, done=0)
    assert core.workers["gpt-1"].interval_s == pytest.approx(0.1)


def test_an_exit_carries_where_the_worker_was(core):
    compute(core, 10.0, 10.1)
    assert core.exited("gpt-1", None, 9, ["last words"]) == [
        WorkerExited(
            **PLACE, exit_code=None, signal=9, iteration=3, microbatches_done=2, stderr=["last words"], expected=False
        )
    ]
    assert core.workers == {}
    assert core.exited("gpt-1", None, 9, []) == []
