"""How states get from a GPU to the node's memory."""

import pytest
import torch

from unicron.train.snapshots.packed import Packing, map_file, unpack
from unicron.train.snapshots.side_stream import HALF_BYTES, SideStream, pieces


@pytest.mark.parametrize("shape", [(), (7,), (64, 33), (1024, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_pieces_are_small_and_make_the_whole(shape, dtype):
    source = torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape)
    turned = source.t() if len(shape) == 2 else source
    target = torch.zeros_like(turned, memory_format=torch.contiguous_format)
    for part, piece in pieces([target], [turned], most=4096):
        assert piece.nbytes <= 4096
        part.copy_(piece)
    assert torch.equal(target, turned)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_copied_is_what_comes_of_all_that_training_has_queued(tmp_path):
    values = torch.zeros(3 * HALF_BYTES // 4 + 5, device="cuda")
    small = torch.arange(5.0)
    side = SideStream(values.device)
    for _ in range(100):
        values += 1
    side.wait_for_training()
    packing = Packing({"values": values, "small": small}, side.copy)
    packing.write(map_file(tmp_path / "x", packing.size))
    found = unpack(tmp_path / "x", packing.size)
    assert (found["values"] == 100).all()
    assert torch.equal(found["small"], small)
