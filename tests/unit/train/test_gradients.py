"""Gradients, added up by the backward pass, and their buckets, begun in it as soon as it has made them."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unicron.errors import GroupBrokenError
from unicron.train.session import gradients
from unicron.train.session.gradients import TorchGradients
from unicron.train.session.ranks import TorchRanks
from unicron.train.worker.phases import ANNOUNCED
from unicron.train.worker.shell import run
from unicron.train.worker.timing import PlannedCollection


class Twice:
    """A group of two ranks that do the same: a sum is twice what one has. It notes what is begun and awaited."""

    on_streams = False

    def __init__(self, breaks_at=None):
        self.calls, self._breaks_at = [], breaks_at

    def begin_all_reduce(self, tensor):
        if self._breaks_at == len(self.calls):
            raise GroupBrokenError("a peer is gone")
        self.calls.append("begin")
        tensor *= 2
        return self

    def finish(self, work):
        assert work is self
        self.calls.append("finish")


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    monkeypatch.setattr(gradients, "BUCKET_BYTES", 40 * 4)


def layers():
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))


def gradients_of(model, dtype=None, group=None):
    """Return the gradients of a model, as a rank of `group` has them."""
    ranks = TorchRanks(None, 0)
    ranks.prepare(torch.device("cpu"))
    ranks.group = group or Twice()
    found = TorchGradients(ranks, dtype, 1, PlannedCollection(0))
    found.prepare(model.parameters(), torch.optim.SGD(model.parameters()))
    return found


def looked(breaks_at=None):
    """Return a model, a group and gradients that have seen one backward pass, and so begin to reduce in the next."""
    model, group = layers(), Twice(breaks_at)
    found = gradients_of(model, group=group)
    backward(model, found, group)
    found.clear()
    return model, group, found


def backward(model, found, group=None, inputs=None):
    """Run a backward pass, which may begin to reduce; return what was begun in it."""
    before = len(group.calls) if group else 0
    loss = model(torch.arange(12.0).reshape(2, 6) if inputs is None else inputs).square().mean()
    with found.overlapping() if group else contextlib.nullcontext():
        loss.backward()
    begun = len(group.calls) - before if group else 0
    found.loss = loss
    found.accumulate()
    return begun


def reduced(model, found):
    found.begin(0, range(found.buckets))
    for bucket in range(found.buckets):
        run(found.reduce(bucket))
    found.publish()
    return [each.grad for each in model.parameters()], found.outcome.loss


def test_what_overlaps_is_bit_for_bit_what_does_not():
    results = []
    for overlaps in (True, False):
        model, group = layers(), Twice()
        found = gradients_of(model, torch.float64, group)
        backward(model, found, group if overlaps else None)  # the first only looks
        found.clear()
        assert group.calls == []
        backward(model, found)
        begun = backward(model, found, group if overlaps else None)
        assert begun == (found.buckets - 1 if overlaps else 0), "all but the last, which waits for the loss"
        results.append(reduced(model, found))
        assert group.calls.count("begin") == group.calls.count("finish") == found.buckets
    (ours, loss), (plain, plain_loss) = results
    assert all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    assert loss == plain_loss


def test_a_backward_pass_adds_to_the_sums_by_itself_and_they_are_bit_for_bit_the_same():
    results = []
    for directly in (True, False):
        model = layers()
        found = gradients_of(model)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = None
            with found.directly() if directly else contextlib.nullcontext():
                loss = model(torch.ones(4, 6)).square().sum()
                loss.backward()
            own = [parameter.grad.untyped_storage().nbytes() for parameter in model.parameters()]
            assert all((nbytes > found._accumulated.nbytes - 1) == directly for nbytes in own), "of the sums, or not"
            found.loss = loss.detach()
            found.accumulate()
            assert all(parameter.grad is None for parameter in model.parameters())
        results.append(found._accumulated.clone())
    assert torch.equal(*results)
    assert results[0].any()


def test_a_backward_pass_that_ended_midway_is_told_before_another_adds_to_its_sums():
    model = layers()
    found = gradients_of(model)
    model[-1].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError), found.directly():
        model(torch.ones(4, 6)).sum().backward()
    with pytest.raises(RuntimeError, match="ended midway"), found.directly():
        pass
    found.clear()
    with found.directly():
        pass


def made_twice(layer):
    """Return a layer that is used twice, so that a backward pass makes its gradient twice."""
    return lambda x: checkpoint(layer, checkpoint(layer, x, use_reentrant=True), use_reentrant=True)


def test_a_gradient_that_is_made_twice_is_nothing_to_overlap_with():
    model, group = layers(), Twice()
    shared = made_twice(model[0])
    found = gradients_of(model[0], group=group)
    for _ in range(3):
        inputs = torch.ones(2, 6, requires_grad=True)
        assert backward(shared, found, group, inputs) == 0
    found.clear()
    plain = layers()
    backward(shared, found, group, torch.ones(2, 6, requires_grad=True))
    plain[0](plain[0](torch.ones(2, 6))).square().mean().backward()
    ours, _ = reduced(model[0], found)
    torch.testing.assert_close(ours, [2 * each.grad for each in plain[0].parameters()])


def test_one_that_is_made_twice_for_the_first_time_behind_its_reduce_is_refused():
    model, group = layers(), Twice()
    found = gradients_of(model[0], group=group)
    backward(model[0], found, group)
    with pytest.raises(RuntimeError, match=r"made the gradient of a parameter of shape .* twice.*use_reentrant=False"):
        backward(made_twice(model[0]), found, group, torch.ones(2, 6, requires_grad=True))


def test_a_parameter_that_takes_no_part_holds_its_bucket_and_those_behind_it_back():
    model, group, found = looked()
    assert backward(nn.Sequential(model[0], model[2], model[3]), found, group) == 2
    ours, _ = reduced(model, found)
    assert not ours[2].any()
    assert ours[0].any()


def test_a_group_that_breaks_in_the_backward_pass_is_told_to_whoever_waits():
    model, group, found = looked(breaks_at=1)
    assert backward(model, found, group) == 1
    found.begin(0, [0])
    run(found.reduce(0))
    assert group.calls == ["begin", "finish"]
    group._breaks_at = 2
    with pytest.raises(GroupBrokenError):
        found.begin(0, [1])


def test_what_was_begun_before_a_regroup_is_given_up_and_reduced_anew():
    model, group, found = looked()
    begun = backward(model, found, group)
    found.abandon()
    assert group.calls == ["begin", "finish"] * 0 + ["begin"] * begun + ["finish"] * begun
    ours, _ = reduced(model, found)
    plain = layers()
    plain(torch.arange(12.0).reshape(2, 6)).square().mean().backward()
    torch.testing.assert_close(ours, [2 * each.grad for each in plain.parameters()])


def test_buckets_that_began_in_a_pass_of_noise_leave_what_was_accumulated_as_it_was():
    model, group, found = looked()
    backward(model, found)
    before = found._accumulated.clone()
    with found.overlapping():
        (float("nan") * model(torch.ones(2, 6)).sum()).backward()
    found.discard()
    assert group.calls == ["begin"] * (found.buckets - 1)
    assert torch.equal(found._accumulated, before)


def test_the_mean_that_is_published_takes_no_memory_of_its_own():
    model = layers()
    found = gradients_of(model)
    backward(model, found)
    ours, _ = reduced(model, found)
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in [*ours, found._accumulated]}
    gradient = sum(each.nbytes for each in model.parameters())
    assert sum(held.values()) < 2.1 * gradient, "DistributedDataParallel has as much: gradients, and their buckets"


@pytest.mark.parametrize("due", ANNOUNCED)
def test_what_one_replica_announces_all_hear_with_the_gradient_and_only_then(due):
    model = layers()
    found = gradients_of(model, torch.float64)
    backward(model, found)
    before = reduced(model, found)
    assert not found.outcome.announced
    found.clear()
    model.zero_grad()
    backward(model, found)
    found.announce(due)
    after = reduced(model, found)
    assert found.outcome.announced == {due}
    assert before[1] == after[1]
    assert all(torch.equal(*pair) for pair in zip(before[0], after[0], strict=True))
    found.clear()
    model.zero_grad()
    backward(model, found)
    reduced(model, found)
    assert not found.outcome.announced


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_what_was_reduced_is_finite_or_not(value, where):
    model = layers()
    found = gradients_of(model, torch.float64)
    for is_finite in (True, False):
        found.clear()
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        if not is_finite and where == "gradient":
            model[2].weight.grad[3, 1] = float(value)
        found.loss = loss * float(value) if not is_finite and where == "loss" else loss
        found.accumulate()
        reduced(model, found)
        assert found.finite is is_finite


def test_gradients_of_complex_numbers_go_with_those_of_real_ones():
    model = torch.nn.ParameterDict(
        {"real": torch.nn.Parameter(torch.ones(2)), "complex": torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))}
    )
    found = gradients_of(model)
    loss = (model["complex"] * (1 + 2j) * model["real"]).abs().square().sum()
    loss.backward()
    wanted = {name: each.grad.clone() for name, each in model.items()}
    found.clear()
    found.accumulate()
    accumulated, _ = found.sums
    assert accumulated.dtype == torch.float32
    found.take_reduced(accumulated)
    found.publish()
    count = found._microbatches
    assert all(torch.equal(each.grad * count, wanted[name]) for name, each in model.items())
    assert model["complex"].grad.dtype == torch.complex64


def test_the_parameter_whose_gradient_differs_is_named():
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(torch.ones(2)) for name in ("one", "other")})
    found = gradients_of(model)
    found.clear()
    there, _ = (each.clone() for each in found.sums)
    names = {id(each): name for name, each in model.items()}
    assert found.first_difference(there, names, 0.0) == ""
    model["other"].grad = torch.full((2,), 1.0)
    found.accumulate()
    assert found.first_difference(there, names, 0.0) == "the gradient of other"
    there.copy_(found.sums[0] * (1 + 1e-5))
    assert found.first_difference(there, names, 0.0) == "the gradient of other"
    assert found.first_difference(there, names, 1e-3) == ""


def test_gradients_lie_in_memory_as_their_parameters_do_so_that_their_norm_is_rounded_alike():
    ranks = TorchRanks(None, 0)
    ranks.prepare(torch.device("cpu"))
    convolution = nn.Conv2d(16, 8, 3, bias=False).to(memory_format=torch.channels_last)
    found = TorchGradients(ranks, None, 1, PlannedCollection(0))
    found.prepare(convolution.parameters())
    convolution(torch.randn(2, 16, 8, 8)).square().sum().backward()
    own = convolution.weight.grad.clone()
    found.accumulate()
    found._reduced.copy_(found._accumulated)
    found.publish()
    assert torch.equal(convolution.weight.grad, own)
    assert convolution.weight.grad.stride() == own.stride() == convolution.weight.stride()


@pytest.mark.parametrize(
    ("value", "mean"),
    [(40000.0, 40000.0), (3 * 2.0**-24, 4 * 2.0**-24)],
    ids=["its sum would be infinite", "half of it is rounded"],
)
def test_gradients_of_few_bits_are_divided_before_they_are_summed(value, mean):
    """As DistributedDataParallel does: 1.5 units of the last place are 2 on each of two ranks."""
    ranks = TorchRanks(None, 0)
    ranks.prepare(torch.device("cpu"))
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(2, dtype=torch.float16))]
    found = TorchGradients(ranks, None, 2, PlannedCollection(0))
    found.prepare(parameters, divided_first=parameters[1:])
    parameters[1].grad = torch.full((2,), value, dtype=torch.float16)
    found.accumulate()
    found._reduced.copy_(2 * found._accumulated)  # another rank has had the same
    found.publish()
    assert parameters[1].grad.tolist() == [mean, mean]


def test_a_zero_keeps_its_sign_as_it_does_where_ranks_sum_what_they_have():
    """As with DistributedDataParallel: a masked gradient has zeros of both signs, and so have the parameters."""
    ranks = TorchRanks(None, 0)
    ranks.prepare(torch.device("cpu"))
    carrier, parameter = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(2))
    found = TorchGradients(ranks, None, 2, PlannedCollection(0))
    found.prepare([carrier, parameter], divided_first=[parameter])
    for _ in range(2):
        found.clear()
        parameter.grad = torch.tensor([-0.0, 0.0])
        found.accumulate()
        found._reduced.copy_(found._accumulated)
        found.publish()
        assert torch.signbit(parameter.grad).tolist() == [True, False]
