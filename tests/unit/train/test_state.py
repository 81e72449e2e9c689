"""A worker's state on its way out of the process."""

import resource

import msgspec
import pytest
import torch

from unicron.contracts.tasks import Member, ParallelLayout
from unicron.contracts.worker import NOWHERE
from unicron.errors import InvalidInputError, StateTransferError
from unicron.train import Session
from unicron.train.session.ranks import TorchRanks
from unicron.train.snapshots import state
from unicron.train.snapshots.gathering import collect_state
from unicron.train.worker.shell import run

MEMBERSHIP = msgspec.structs.replace(NOWHERE, epoch=3, world_size=1, member=Member(worker="t-1", node="node-1", slot=0))


@pytest.fixture
def memory(tmp_path, monkeypatch):
    monkeypatch.setenv("UNICRON_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("UNICRON_TASK", "t")
    return tmp_path


def snapshot():
    return collect_state(7, {"model": torch.nn.Linear(400, 400)})


def test_a_state_says_what_it_is(memory):
    ref = state.export(MEMBERSHIP, 0, snapshot())
    assert (ref.task, ref.iteration, ref.place, ref.location.worker) == ("t", 7, 0, "t-1")
    assert (memory / ref.location.name).stat().st_size == ref.size
    assert [path.name for path in memory.iterdir()] == ["t-1.3.state"]


def test_a_full_memory_is_told_as_such_and_nothing_is_left_there(memory):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, limits[1]))
    try:
        why = r"t-1 can't write its state to .* on node-1: .*File too large.*must fit there once"
        with pytest.raises(StateTransferError, match=why):
            state.export(MEMBERSHIP, 0, snapshot())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(memory.iterdir())


def test_a_script_with_a_whole_model_is_refused_in_a_task_of_parts():
    sharded = msgspec.structs.replace(MEMBERSHIP, world_size=4, layout=ParallelLayout(tensor=2, replicas=2))
    why = r"layout of the task: 2 x 1 x 1 workers share .* session.mesh, or set tensor"
    with pytest.raises(InvalidInputError, match=why):
        run(TorchRanks(None, 0).form(sharded))


def test_an_optimizer_whose_state_only_one_replica_has_is_refused():
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        pass

    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match="a lost one takes it along; spread it inside of a replica"):
        Session().protect(model=model, optimizer=ZeroRedundancyOptimizer(model.parameters()))
