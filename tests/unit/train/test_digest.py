"""Digests of states: what they see, and what they leave out."""

import pytest
import torch
from torch import nn

from unicron.train.snapshots.digest import CHUNK, digest, named_tensors

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64)


def values(dtype, count=CHUNK + 77):
    torch.manual_seed(3)
    return (torch.rand(count) * 100 - 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bit_that_flips_changes_it(dtype):
    tensor = values(dtype)
    before, seen = digest([("w", tensor)]), set()
    bits = tensor.view(torch.uint8)
    for byte in (0, 5, bits.numel() // 2, bits.numel() - 1):
        for bit in range(1 if dtype is torch.bool else 8):
            bits[byte] ^= 1 << bit
            seen.add(digest([("w", tensor)]))
            bits[byte] ^= 1 << bit
    assert len(seen - {before}) == 4 * (1 if dtype is torch.bool else 8)
    assert digest([("w", tensor)]) == before


def test_two_signs_that_change_and_two_values_that_change_places_are_seen():
    tensor = values(torch.float32)
    found = {digest([("w", tensor)])}
    for first, second in ((1, 3), (1, CHUNK + 1), (2 * CHUNK // 3, 5)):
        turned, swapped = tensor.clone(), tensor.clone()
        turned[[first, second]] *= -1
        swapped[[first, second]] = tensor[[second, first]]
        found |= {digest([("w", turned)]), digest([("w", swapped)])}
    assert len(found) == 7


def test_names_types_and_shapes_count_and_their_order_does_not():
    one, two = values(torch.float32, 60), values(torch.float32, 30)
    here = digest([("a", one), ("b", two)])
    assert here == digest([("b", two), ("a", one)])
    others = [[("a", each), ("b", two)] for each in (one.view(6, 10), one.view(torch.int32))]
    others += [[("b", one), ("a", two)], [("a", one), ("b", two), ("c", torch.empty(0))]]
    assert len({here, *(digest(each) for each in others)}) == 5


def test_only_what_a_tensor_holds_counts_and_not_where_it_lies():
    tensor = values(torch.float32, 1001)
    padded = torch.cat([torch.zeros(1), tensor])[1:]  # begins at no multiple of eight bytes
    spread = torch.stack([tensor, tensor], 1)[:, 0]
    assert digest([("w", tensor)]) == digest([("w", spread)])
    even = values(torch.float32, 1000)
    for skipped in (1, 2):
        assert digest([("w", even)]) == digest([("w", torch.cat([torch.zeros(skipped), even])[skipped:])])
    assert digest([("w", padded)]) == digest([("w", tensor)])


def test_it_is_64_bits_as_torch_has_them():
    found = [digest([("w", torch.tensor([float(number)]))]) for number in range(64)]
    assert all(-(1 << 63) <= each < 1 << 63 for each in found)
    assert min(found) < 0 < max(found)
    assert torch.tensor(found, dtype=torch.int64).tolist() == found


def protected():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(8, 4)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def test_of_a_state_parameters_and_moments_count_and_buffers_of_a_replica_do_not():
    state = protected()
    before = digest(named_tensors(state))
    assert before == digest(named_tensors(protected()))
    state["model"](torch.rand(8, 4))  # its mean and variance run on
    assert digest(named_tensors(state)) == before
    moment = next(iter(state["optimizer"].state.values()))["exp_avg"]
    moment.view(-1)[0] += 1
    changed = digest(named_tensors(state))
    assert changed != before
    with torch.no_grad():
        state["model"][0].bias[2] += 1e-6
    assert digest(named_tensors(state)) not in {before, changed}
