"""A worker's record of an iteration, and garbage collection at planned places."""

import gc
import socket
import time

import pytest
import torch

from unicron.contracts.frames import LENGTH, frame, length_of
from unicron.contracts.timings import MOST_OPS, OPERATIONS, period_of
from unicron.contracts.worker import Finished, Hello, Ping, Pong, Sample, to_agent
from unicron.train import Session
from unicron.train.worker.channel import AgentChannel
from unicron.train.worker.timing import BACKWARD, FORWARD, OPTIMIZER, REDUCE, PlannedCollection, Recorder


@pytest.fixture
def recorder():
    return Recorder(torch.device("cpu"))


def record(recorder, microbatches=(3, 7)):
    for microbatch in microbatches:
        recorder.start(FORWARD, microbatch)
        time.sleep(0.002)
        recorder.start(BACKWARD, microbatch)
        recorder.stop()
    recorder.start(REDUCE)
    recorder.start(OPTIMIZER)
    recorder.stop()


@pytest.mark.parametrize(("share", "period"), [(0, 0), (0.1, 10), (0.3, 3), (0.5, 2), (1, 1), (1e-6, 10**6)])
def test_the_share_says_which_iterations_are_recorded(recorder, share, period):
    assert period_of(share) == period
    chosen = []
    for iteration in range(12):
        recorder.begin(iteration, period_of(share))
        record(recorder, [0])
        if recorder.end(iteration, 0, 0, 1):
            chosen.append(iteration)
    assert chosen == ([iteration for iteration in range(12) if iteration % period == 0] if period else [])


def test_operations_follow_one_another_with_their_microbatches(recorder):
    before = time.time()
    recorder.begin(20, 10)
    record(recorder)
    timed = recorder.end(20, epoch=4, rank=1, world_size=3)
    assert (timed.iteration, timed.epoch, timed.rank, timed.world_size) == (20, 4, 1, 3)
    assert before <= timed.began <= time.time()
    names = [OPERATIONS[op.kind] for op in timed.ops]
    assert names == [*["forward-compute", "backward-compute"] * 2, "grads-reduce-scatter", "optimizer"]
    assert [op.microbatch for op in timed.ops] == [3, 3, 7, 7, -1, -1]
    assert timed.ops[0].start_us == 0
    assert all(op.duration_us >= 2000 for op in timed.ops if op.kind == FORWARD)
    ends = [op.start_us + op.duration_us for op in timed.ops]
    assert all(end <= op.start_us for end, op in zip(ends, timed.ops[1:], strict=False))


def test_a_dropped_record_and_one_that_is_too_long_are_not_sent(recorder):
    recorder.begin(0, 1)
    record(recorder)
    recorder.drop()
    record(recorder)
    assert recorder.end(0, 0, 0, 1) is None
    recorder.begin(1, 1)
    for microbatch in range(MOST_OPS):
        recorder.start(FORWARD, microbatch)
    recorder.stop()
    assert recorder.end(1, 0, 0, 1) is None


# --- on the way to the agent -----------------------------------------------------------------------------------------


def test_records_are_forgotten_while_the_agent_is_away_and_it_says_what_to_record(tmp_path, recorder):
    recorder.begin(0, 1)
    record(recorder)
    timed = recorder.end(0, 0, 0, 1)
    path = str(tmp_path / "agent.sock")
    channel = AgentChannel(path, "gpt-1")
    assert channel.period == 10
    channel.send(timed)
    channel.send(Finished(iterations=5))
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        agent, _ = listener.accept()
        with agent, agent.makefile("rb") as stream:

            def hear():
                return to_agent(stream.read(length_of(stream.read(LENGTH.size))))

            assert isinstance(hear(), Hello)
            assert hear() == Finished(iterations=5)
            agent.sendall(frame(Sample(period=4)) + frame(Ping()))
            assert hear() == Pong()
            assert channel.period == 4
            channel.send(timed)
            assert hear() == timed


# --- garbage collection ----------------------------------------------------------------------------------------------


@pytest.fixture
def collections():
    """The generations that were collected, and Python's own collection as it was, afterwards."""
    found = []

    def note(phase, info):
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)
    gc.unfreeze()
    gc.enable()


def train(iterations, **arguments):
    """Run a session alone; return what it yielded."""
    model = torch.nn.Linear(2, 1)
    session = Session(iterations=iterations, microbatches=2, **arguments)
    session.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for iteration in session.iterations():
        for _ in session.microbatches():
            session.backward(model(torch.ones(1, 2)).sum())
        session.step()
        yield iteration


@pytest.mark.slow
def test_planned_collection_takes_the_place_of_python_s_own(collections):
    running = train(6, gc_every=3)
    assert next(running) == 0
    assert not gc.isenabled()
    collections.clear()
    list(running)
    assert collections == [2, 2], "in the iterations 2 and 5"
    assert gc.isenabled()


def test_the_environment_goes_over_the_argument_and_without_both_python_collects(collections, monkeypatch):
    for _ in train(2):
        assert gc.isenabled()
    monkeypatch.setenv("UNICRON_GC_EVERY", "1")
    for _ in train(2, gc_every=0):
        assert not gc.isenabled()
    for wrong in ("-1", "often", "1.5", ""):
        monkeypatch.setenv("UNICRON_GC_EVERY", wrong)
        with pytest.raises(ValueError, match=f"UNICRON_GC_EVERY.* is {wrong!r}: give a number"):
            next(train(1))


def test_an_iteration_that_is_begun_again_is_not_collected_twice():
    planned = PlannedCollection(2)
    assert not planned.due(0)
    assert planned.due(1)
    planned.collect(1)
    assert not planned.due(1)
    assert planned.due(3)
