"""The format of a checkpoint: read by Unicron as it was, by torch.distributed.checkpoint in any layout."""

import io
import os
import pickle
import traceback
import warnings
from collections import OrderedDict
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.layouts import FORKSERVER, as_rank, filled, plain_state, same
from helpers.stored import TASK, alter, of_model, save, save_trained, spread, trained
from msgspec.structs import replace
from torch import distributed
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from unicron.contracts.storage import StoredFile
from unicron.contracts.tasks import ParallelLayout
from unicron.errors import CheckpointError
from unicron.snapshots.storage import catalog, check
from unicron.snapshots.storage.manifest import Index, checksum_of, joint_checksum
from unicron.snapshots.storage.root import Storage, begin
from unicron.train.snapshots.gathering import collect_state, load_state
from unicron.train.snapshots.stored.commit import commit
from unicron.train.snapshots.stored.parts import PieceWriter, working_folder, write_part
from unicron.train.snapshots.stored.pieces import StatePiece
from unicron.train.snapshots.stored.reading import gather_state, read

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def load(state, stored):
    """Have torch alone load a checkpoint, in one process."""
    dcp.load(state, checkpoint_id=stored.address)
    return state


def test_a_whole_state_comes_back_as_it_was(tmp_path):
    state = collect_state(3, trained(1))
    state["objects"]["odd"] = {
        1: "a number as key",
        "empty": {},
        "none": None,
        "pair": (1, 2.5),
        "nested": [torch.arange(3), {"deep": [torch.ones(()), []]}],
        "seen": OrderedDict(a=[1, [2, 3]]),
        "few": torch.arange(1 << 20)[:4],
        "across": torch.arange(12).view(3, 4)[:, 1],
        "bytes": torch.zeros(0, dtype=torch.uint8),
    }
    stored = save(tmp_path, 3, [state])
    found = read(Storage(str(tmp_path)), stored, 0)
    assert found["iteration"] == 3
    assert same(found["objects"], state["objects"])
    assert found["objects"]["odd"]["nested"][1]["deep"][0].dtype == torch.float32
    assert stored.manifest.size < 1 << 20, "of a tensor that is a view of another, what it shows is written"
    other = trained(2)
    load_state(gather_state(Storage(str(tmp_path)), stored, ParallelLayout(), 0, other), other)
    assert same(plain_state(other)["optimizer"], state["objects"]["optimizer"])
    assert same(plain_state(other)["model"], state["objects"]["model"])


def test_torch_alone_loads_it_by_its_own_names(tmp_path):
    stored, state = save_trained(tmp_path, 7, seed=1)
    other = trained(2)
    model, optimizer = other["model"], other["optimizer"]
    found = load(
        {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer), "iteration": 0}, stored
    )
    model.load_state_dict(found["model"])
    set_optimizer_state_dict(model, optimizer, found["optimizer"])
    assert found["iteration"] == 7
    assert same(collect_state(7, other)["objects"], state["objects"])
    dcp_to_torch_save(stored.address, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert same(whole["model"], state["objects"]["model"])
    assert same(whole["optimizer"], state["objects"]["optimizer"])


@pytest.mark.parametrize(("parts", "axis"), [(2, 0), (4, 0), (2, 1), (4, 1)])
def test_parts_of_a_tensor_are_one_tensor_for_torch(tmp_path, parts, axis):
    whole = torch.arange(48.0).view(6, 8)
    shards = spread(whole, parts, axis)
    plain = torch.rand(5)
    states = [of_model(0, w=each, b=plain) for each in shards]
    found = load({"model": {"w": torch.zeros(6, 8), "b": torch.zeros(5)}}, save(tmp_path, 0, states))
    assert torch.equal(found["model"]["w"], whole)
    assert torch.equal(found["model"]["b"], plain)


def test_what_is_whole_in_one_place_and_spread_in_another_is_one_tensor(tmp_path):
    whole = torch.arange(48.0).view(6, 8)
    states = [of_model(0, w=each) for each in (*spread(whole, 2), whole)]
    found = load({"model": {"w": torch.zeros(6, 8)}}, save(tmp_path, 0, states))
    assert torch.equal(found["model"]["w"], whole)


def test_a_tensor_that_nobody_has_a_part_of_is_refused_by_name(tmp_path):
    whole = torch.arange(48.0).view(6, 8)
    first, _, third = spread(whole, 3)
    with pytest.raises(CheckpointError, match=r"model\.w of \[6, 8\] is not whole"):
        save(tmp_path, 0, [of_model(0, w=first), of_model(0, w=third)])
    assert catalog.newest(Storage(str(tmp_path)), TASK).stored is None


def test_different_tensors_of_one_name_are_refused(tmp_path):
    states = [of_model(0, w=torch.zeros(size)) for size in (3, 4)]
    with pytest.raises(CheckpointError, match=r"model\.w is float32 of \[3\] in __0_0\.distcp and float32 of \[4\]"):
        save(tmp_path, 0, states)
    states[1]["objects"]["model"]["w"] = 3
    with pytest.raises(CheckpointError, match=r"model\.w is a tensor in one place and none in another"):
        save(tmp_path, 0, states)


def test_two_values_of_one_name_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"two values called model\.a\.b"):
        save(tmp_path, 0, [of_model(0, **{"a.b": 1, "a": {"b": 2}})])


def test_only_what_a_rank_needs_is_read(tmp_path):
    storage, whole = Storage(str(tmp_path)), torch.arange(64.0).view(8, 8)
    stored = save(tmp_path, 0, [of_model(0, weight=each) for each in spread(whole, 4)])
    alter(Path(stored.address) / "__0_0.distcp", at=1000)
    half = as_rank(ParallelLayout(shard=2), 1, reads_half, storage, stored, whole[4:])
    assert half == "", "it needs the parts of places 2 and 3 alone"
    plain_state = as_rank(ParallelLayout(shard=2), 0, reads_half, storage, stored, whole[:4])
    assert "__0_0.distcp: model.weight is not as it was written" in plain_state


def test_of_a_part_only_what_a_rank_needs_is_read(tmp_path):
    storage, whole = Storage(str(tmp_path)), torch.arange(64.0).view(8, 8)
    another, weights, biases = torch.zeros(3), spread(whole, 2), spread(whole[0], 2)[::-1]
    parts = zip(weights, biases, strict=True)
    stored = save(tmp_path, 0, [of_model(0, another=another, weight=weight, bias=bias) for weight, bias in parts])
    # place 1 needs of part 0 the bias, which is last, and of part 1 the weight
    alter(Path(stored.address) / "__0_0.distcp", at=700)
    index = check.index_of(storage, (TASK, stored.folder), stored.manifest.parts[0])
    alter(Path(stored.address) / "__0_0.distcp", at=index.pieces[1].offset + 700)
    assert [piece.path[1] for piece in index.pieces[:3]] == ["another", "weight", "bias"]
    assert as_rank(ParallelLayout(shard=2), 1, reads_half, storage, stored, whole[4:], whole[0][4:]) == ""
    plain_state = as_rank(ParallelLayout(shard=2), 0, reads_half, storage, stored, whole[:4], whole[0][:4])
    assert "__0_0.distcp: model.weight is not as it was written" in plain_state


def reads_half(_, storage, stored, weight, bias=None):
    mesh = init_device_mesh("cpu", (2,))
    model = torch.nn.Linear(8, 8, bias=bias is not None)
    for name, parameter in list(model.named_parameters()):
        empty = distribute_tensor(torch.zeros_like(parameter.detach()), mesh, [Shard(0)], src_data_rank=None)
        setattr(model, name, torch.nn.Parameter(empty))
    found = gather_state(storage, stored, ParallelLayout(shard=2), distributed.get_rank(), {"model": model})
    assert torch.equal(found["objects"]["model"]["weight"]["shard"], weight)
    assert bias is None or torch.equal(found["objects"]["model"]["bias"]["shard"], bias)


class Bomb:
    def __init__(self, folder):
        self.folder = str(folder)

    def __reduce__(self):
        return os.mkdir, (self.folder,)


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    state = collect_state(0, trained())
    state["objects"]["bomb"] = {"value": Bomb(tmp_path / "ran")}
    with pytest.raises(
        CheckpointError, match=r"the state is more than tensors and plain values, and is not loaded: .*mkdir"
    ):
        save(tmp_path, 0, [state])
    assert not (tmp_path / "ran").exists()
    assert not list((tmp_path / TASK).glob("step-*"))


def forged(folder, part, taken):
    """Let the first tensor of a part be another value, with all checksums as they should be."""
    index = msgspec.json.decode((folder / part.index.name).read_bytes(), type=Index)
    old = (folder / part.data.name).read_bytes()
    stream = io.BytesIO()
    pieces = PieceWriter(stream)
    pieces.add(taken)
    first = replace(index.pieces[0], length=pieces.written[0].length, checksum=pieces.written[0].checksum)
    moved = first.length - index.pieces[0].length
    every = [first, *(replace(each, offset=each.offset + moved) for each in index.pieces[1:])]
    (folder / part.data.name).write_bytes(stream.getvalue() + old[index.pieces[0].length :])
    content = msgspec.json.encode(replace(index, pieces=every))
    (folder / part.index.name).write_bytes(content)
    data = StoredFile(name=part.data.name, size=len(old) + moved, checksum=joint_checksum(every))
    plain_state = StoredFile(name=part.index.name, size=len(content), checksum=checksum_of(content))
    return replace(part, data=data, index=plain_state)


def test_nothing_that_is_read_can_run_code(tmp_path):
    state, ran, storage = collect_state(0, trained()), tmp_path / "ran", Storage(str(tmp_path))
    saving = begin(str(tmp_path), TASK, 0, ParallelLayout())
    part = write_part(saving, 0, state)
    folder = tmp_path / TASK / working_folder(storage, saving)
    stored = commit(saving, [forged(folder, part, StatePiece(("model", "0.weight"), Bomb(ran), None))])
    assert catalog.newest(storage, TASK).skipped == [], "its checksums are right"
    with pytest.raises(CheckpointError, match=r"model\.0\.weight is more than tensors"):
        read(storage, stored, 0)
    (Path(stored.address) / ".metadata").write_bytes(pickle.dumps(Bomb(ran)))
    [skipped] = catalog.newest(storage, TASK).skipped
    assert skipped.faults[0].startswith(".metadata: cut short")
    assert not ran.exists()


WRITERS = [ParallelLayout(), ParallelLayout(pipeline=2), ParallelLayout(shard=3), ParallelLayout(tensor=2, shard=2)]


# --- layouts ---------------------------------------------------------------------------------------------------------


def leave(protected, saving, place, pipe):
    pipe.send(write_part(saving, place, collect_state(3, filled(protected))))


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """A checkpoint of each layout, each part written by a process of its own."""
    root = tmp_path_factory.mktemp("left")
    found = {}
    for number, layout in enumerate(WRITERS):
        saving, parts = begin(str(root), f"task-{number}", 3, layout), []
        for place in range(layout.replica_workers):
            there, here = FORKSERVER.Pipe()
            assert as_rank(layout, place, leave, saving, place, here) == ""
            parts.append(there.recv())
        found[layout] = commit(saving, parts[::-1])
    return Storage(str(root)), found


def takes_all(protected, layout, place, left):
    storage, every = left
    for stored in every.values():
        load_state(gather_state(storage, stored, layout, place, protected), protected)
        found = plain_state(protected)
        assert same(found, plain_state(filled(protected)))
        with torch.no_grad():
            for each in protected["model"].parameters():
                each.zero_()


@pytest.mark.parametrize(
    ("layout", "place"),
    [(ParallelLayout(shard=2), 1), (ParallelLayout(tensor=2, pipeline=2), 2), (ParallelLayout(tensor=2, shard=2), 3)],
    ids=str,
)
def test_a_rank_gets_its_part_of_a_checkpoint_of_any_layout(layout, place, left):
    assert as_rank(layout, place, takes_all, layout, place, left) == ""


@pytest.mark.parametrize("layout", WRITERS[1:], ids=str)
def test_torch_alone_loads_a_checkpoint_of_any_layout_into_a_whole_model(layout, left):
    _, every = left
    assert as_rank(ParallelLayout(), 0, loads_whole, every[layout]) == ""


def loads_spread(rank, rendezvous, stored, pipe):
    """Have torch alone load what three places wrote into a tensor that two processes share by columns."""
    try:
        warnings.simplefilter("ignore")
        store = distributed.FileStore(str(rendezvous), 2)
        distributed.init_process_group("gloo", rank=rank, world_size=2, store=store)
        mesh = init_device_mesh("cpu", (2,))
        found = {"model": {"w": distribute_tensor(torch.zeros(6, 8), mesh, [Shard(1)], src_data_rank=None)}}
        dcp.load(found, checkpoint_id=stored.address)
        pipe.send(found["model"]["w"].to_local().tolist())
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


def test_torch_alone_loads_it_in_several_processes_of_another_layout(tmp_path):
    whole = torch.arange(48.0).view(6, 8)
    stored = save(tmp_path, 0, [of_model(0, w=each) for each in spread(whole, 3)])
    there, processes = [], []
    for rank in range(2):
        one, other = FORKSERVER.Pipe()
        there.append(one)
        processes.append(FORKSERVER.Process(target=loads_spread, args=(rank, tmp_path / "store", stored, other)))
        processes[-1].start()
    assert [each.recv() for each in there] == [whole[:, :4].tolist(), whole[:, 4:].tolist()]
    for each in processes:
        each.join()


def loads_whole(protected, stored):
    distributed.destroy_process_group()
    warnings.simplefilter("ignore")
    model, optimizer = protected["model"], protected["optimizer"]
    expected = plain_state(filled(protected))
    for each in optimizer.state.values():
        each["exp_avg"] = torch.zeros_like(each["exp_avg"])
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    found = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    listed = [sorted(group["params"]) for group in found["optimizer"]["param_groups"]]
    dcp.load(found, checkpoint_id=stored.address)
    assert [sorted(group["params"]) for group in found["optimizer"]["param_groups"]] == listed, "those of all stages"
    model.load_state_dict(found["model"])
    set_optimizer_state_dict(model, optimizer, found["optimizer"])
    assert same(plain_state(protected)["model"], expected["model"])
    assert same(plain_state(protected)["optimizer"], expected["optimizer"])
