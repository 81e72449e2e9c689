import pytest
import torch

from unicron.train.inplace.parameter_data import ParameterData


@pytest.fixture
def watched(monkeypatch):
    data, parameter = ParameterData(), torch.nn.Parameter(torch.zeros(4))
    monkeypatch.setattr(torch.nn.Parameter, "data", property(data.read, data.write), raising=False)
    data.watch([parameter])
    return data, parameter


WRITES = {
    "a copy": lambda parameter: parameter.data.copy_(torch.ones(4)),
    "a part": lambda parameter: parameter.data[1:].fill_(2.0),
    "many at once": lambda parameter: torch._foreach_mul_([parameter.data], 2.0),
    "an argument out": lambda parameter: torch.add(parameter.data, 1, out=parameter.data),
    "inference": torch.inference_mode()(lambda parameter: parameter.data.add_(1)),
    "another tensor": lambda parameter: setattr(parameter, "data", torch.ones(4)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_each_write_counts(watched, write):
    data, parameter = watched
    for _ in range(2):
        before = data.writes
        write(parameter)
        assert data.writes > before
        assert torch.equal(parameter.data, parameter.detach())


def test_a_write_by_way_of_what_was_handed_out_before_counts(watched):
    data, parameter = watched
    held = parameter.data
    before = data.writes
    held.add_(1)
    assert data.writes > before


@torch.no_grad()
def test_a_parameter_that_was_given_other_memory_has_that_as_its_data(watched):
    data, parameter = watched
    before = data.writes
    parameter.data.add_(1)
    parameter.set_(torch.full((3,), 5.0))
    assert torch.equal(parameter.data, torch.full((3,), 5.0))
    assert data.writes > before


def test_reading_does_not_count_nor_does_what_is_written_to_another_parameter(watched):
    data, parameter = watched
    other, before = torch.nn.Parameter(torch.zeros(2)), data.writes
    parameter.data.norm(), parameter.data.clone(), parameter.data.numpy().sum()
    other.data.add_(1)
    other.data = torch.ones(2)
    assert data.writes == before


def test_a_frozen_parameter_is_read_and_written_in_one_forward_pass_as_in_torch(watched):
    _, trained = watched
    codes = torch.nn.Parameter(torch.ones(4), requires_grad=False)
    found = (codes.data * trained).sum()
    codes.data.add_(1)
    found.backward()
    assert torch.equal(trained.grad, torch.full((4,), 2.0))
