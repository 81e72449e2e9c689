"""The replacement of torch's DistributedDataParallel in scripts healed in place, each rank in this process."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.optim.swa_utils import AveragedModel

from unicron.errors import InvalidInputError
from unicron.train.inplace.models import Models
from unicron.train.inplace.parallel import parallel
from unicron.train.inplace.piggyback import Buffers, Piggyback


class ScriptRank:
    """One rank of a script. What ranks say to each other is summed by `reduce`."""

    size = 2

    def abandon(self, error):
        raise error

    def __init__(self):
        self.piggyback, self.shared = None, []
        self.make = parallel(self)

    def add_model(self, model, shared):
        self.model, self.shared = model, list(shared)

    def synchronize_buffers(self, model):
        if self.piggyback:
            self.piggyback.synchronize_buffers(model)

    def begin_forward(self, _):
        self.begun = True
        if self.piggyback:
            self.piggyback.begin_iteration()


def ranks(make, count=2, **named):
    """Return ranks that have made a model and are in their loops."""
    found = [ScriptRank() for _ in range(count)]
    for number, each in enumerate(found):
        torch.manual_seed(0)
        each.make(make(), **named)
        each.piggyback = Piggyback([each.model], first=number == 0)
    return found


def reduce(*those):
    for each in those:
        each.piggyback.attach()
        for parameter in each.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    total = torch.stack([each.piggyback.carrier.grad for each in those]).sum(0)
    for each in those:
        each.piggyback.apply(total.clone())


class Counts(nn.Module):
    """Has buffers of many types that its forward pass changes, each rank to something else."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=dtype))
        for kind in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool):
            self.register_buffer(f"of_{kind}".replace("torch.", ""), torch.zeros(3, dtype=kind), persistent=False)
        self.register_buffer("count", torch.tensor(0))
        self.number = 0

    def forward(self):
        with torch.no_grad():
            for number, each in enumerate(self.buffers()):
                noise = torch.randn(each.shape, generator=torch.Generator().manual_seed(self.number + number)) * 1e6
                each.copy_(noise.to(each.dtype))
            self.of_float32[0] = torch.nan
            self.count = self.count + 1  # another tensor
        return self.weight.sum()


def bits(model):
    return [each.clone().reshape(-1).view(torch.uint8).tolist() for each in model.module.buffers()]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_buffers_are_bitwise_those_of_the_first_rank_from_the_next_forward_pass_on(dtype):
    first, *others = all_ranks = ranks(lambda: Counts(dtype), 3)
    for number, each in enumerate(all_ranks):
        each.model.module.number = 100 * number
        each.model().backward()
    sent, own = bits(first.model), [bits(each.model) for each in others]
    reduce(*all_ranks)
    assert [bits(each.model) for each in others] == own
    assert sent not in own
    for each in others:
        each.model.module.forward = each.model.module.weight.sum
        each.model()
        assert bits(each.model) == sent


@pytest.mark.parametrize("named", [{"broadcast_buffers": False}, {"forward_sync_buffers": False}])
def test_buffers_that_are_not_to_be_synchronised_stay_each_rank_s_own(named):
    first, other = ranks(lambda: nn.BatchNorm1d(2), **named)
    for each, scale in ((first, 1), (other, 2)):
        each.model(torch.randn(4, 2) * scale).sum().backward()
    own = bits(other.model)
    reduce(first, other)
    other.model.eval()(torch.zeros(4, 2))
    assert bits(other.model) == own
    shared = [len(each.shared) for each in (first, other)]
    assert shared == [2, 2] if "broadcast_buffers" in named else [5, 5]


def test_only_a_forward_pass_after_one_whose_gradients_are_reduced_synchronises(monkeypatch):
    first, other = ranks(lambda: nn.BatchNorm1d(2))
    monkeypatch.setattr(dist, "broadcast", lambda data, _: data.copy_(Buffers(first.model).read()))
    for each, scale in ((first, 1), (other, 2)):
        each.model(torch.randn(4, 2) * scale).sum().backward()
    reduce(first, other)
    with torch.no_grad():
        other.model.eval()(torch.zeros(4, 2))
    sent = bits(first.model)
    assert bits(other.model) == sent
    other.model.train()(torch.randn(4, 2))
    other.model.eval()
    with other.model.no_sync():
        other.model(torch.zeros(4, 2))
    assert bits(other.model) == sent, "as one comes in between whose gradients are"
    other.model.train()(torch.randn(4, 2))
    assert bits(other.model) != sent


@pytest.mark.parametrize("shared", [False, True])
def test_buffers_that_some_rank_has_changed_since_the_reduce_are_broadcast(monkeypatch, shared):
    broadcast = list[torch.Tensor]()
    monkeypatch.setattr(
        dist, "broadcast", lambda data, _: broadcast.append(data.copy_(broadcast[-1] if came else data))
    )
    those = ranks(lambda: nn.BatchNorm1d(2))
    for came, each in enumerate(those):
        each.model(torch.randn(4, 2) * (1 + came)).sum().backward()
    reduce(*those)
    for came, each in enumerate(those):
        if came or not shared:
            each.model.module.running_var += 1 + came
        if shared:  # by a collective of the script, which left the first rank's as they were
            each.piggyback.invalidate_shared([each.model.module.running_var])
    kept, versions = bits(those[0].model), [each.model.module.running_var._version for each in those]
    for came, each in enumerate(those):
        each.model.eval()(torch.zeros(4, 2))
        assert len(broadcast) == came + 1
        assert bits(each.model) == kept
    assert [each.model.module.running_var._version for each in those] == versions, "as torch broadcasts"
    those[0].model(torch.zeros(4, 2))
    assert len(broadcast) == 2, "now all have them alike"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_options_of_optimizers_that_differ_since_a_rank_was_replaced_are_named(dtype):
    those = ranks(lambda: nn.Linear(2, 2).to(dtype), 2)
    optimizers = [torch.optim.SGD(each.model.parameters(), lr=0.5) for each in those]
    for each, optimizer in zip(those, optimizers, strict=True):
        each.piggyback = Piggyback([each.model], [optimizer], first=each is those[0])
    summed = []
    for rate in (0.5, 0.25):
        optimizers[1].param_groups[0]["lr"] = rate
        for each in those:
            each.piggyback.attach()
        summed.append(sum(each.piggyback.carrier.grad for each in those))
        if rate == 0.5:
            those[0].piggyback.apply(summed[0])
    with pytest.raises(InvalidInputError, match=r"learning rates, differ between ranks.*'lr': 0.5"):
        those[0].piggyback.apply(summed[1], replaced=True)
    those[0].piggyback.apply(summed[1])
    those[0].piggyback.apply(summed[1], replaced=True)  # they did before


def test_a_buffer_of_another_shape_is_refused():
    [one] = ranks(lambda: nn.BatchNorm1d(2), 1)
    one.model.module.register_buffer("more", torch.zeros(1))
    with pytest.raises(InvalidInputError, match=r"buffer more .* register it in that shape before the loop"):
        one.model(torch.randn(4, 2))


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(2, 1) for _ in range(3))

    def forward(self, *heads):
        return sum(self.heads[head](torch.ones(1, 2)).sum() for head in heads)


@pytest.mark.parametrize("named", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_what_no_rank_has_used_has_no_gradient(named):
    those = ranks(Heads, **named)
    for each, head in zip(those, (0, 1), strict=True):
        each.model(head).backward()
    reduce(*those)
    for each in those:
        assert [parameter.grad is None for parameter in each.model.parameters()] == [False] * 4 + [True] * 2


def test_gradients_that_torch_would_miss_or_leave_alone_are_refused():
    [one] = ranks(Heads, 1)
    one.model(0).backward()
    with pytest.raises(InvalidInputError, match=r"4 of 6 parameters, such as heads.1.weight, .*find_unused_parameters"):
        one.piggyback.attach()

    def frozen():
        model = Heads()
        model.heads[0].requires_grad_(False)
        return model

    [one] = ranks(frozen, 1)
    one.model.module.requires_grad_()
    one.model(0, 1, 2).backward()
    with pytest.raises(InvalidInputError, match=r"parameter heads.0.weight has a gradient, and did not require one"):
        one.piggyback.attach()


@pytest.mark.parametrize("first", [True, False])
def test_a_new_rank_begins_as_the_lost_one_had_begun(first):
    def make():
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2).requires_grad_(False))

    def new():
        [found] = ranks(make, 1, find_unused_parameters=True)
        found.piggyback = Piggyback([found.model], first=first)
        found.piggyback.load_state_dict(copy.deepcopy(those[1].piggyback.state_dict()))
        return found

    those = ranks(make, find_unused_parameters=True)
    for each in those:
        each.model(torch.randn(4, 2)).sum().backward()
    reduce(*those)
    between = new()
    assert bits(between.model) == bits(those[0 if first else 1].model)
    for each in (between, *those):
        each.model.module[0].requires_grad_(False)
        each.model.module[1].eval()
        each.model(torch.randn(4, 2))
        assert bits(each.model) == bits(those[0].model)
    those[1].model.module[1].running_mean += 1  # in its forward pass
    those[1].model.module[2].weight.data *= 2
    within = new()
    assert bits(within.model) == bits(those[0].model)
    assert torch.equal(within.model.module[2].weight, those[0].model.module[2].weight)
    assert [each.requires_grad for each in within.model.parameters()] == [False, False, True, True, False, False]
    assert not within.model.module[1].training


@pytest.mark.parametrize("named", [{}, {"broadcast_buffers": False}])
def test_a_new_rank_gets_the_buffers_of_the_point_at_which_it_begins_and_not_what_came_behind_it(monkeypatch, named):
    monkeypatch.setattr(dist, "broadcast", lambda data, source: None)
    [one] = ranks(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), 1, **named)
    one.piggyback = Piggyback([one.model], first=True)
    counted = one.model.module[1].num_batches_tracked
    for _ in range(2):
        one.piggyback.record_point()
        begins = counted.item()
        one.model.module(torch.randn(4, 2))  # without DistributedDataParallel, on the way to the forward pass
        between = copy.deepcopy(one.piggyback.state_dict())
        one.piggyback.begin_iteration()
        one.model(torch.randn(4, 2)).sum().backward()
        for state in (between, copy.deepcopy(one.piggyback.state_dict())):
            [new] = ranks(lambda: nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), 1, **named)
            new.piggyback = Piggyback([new.model], first=False)
            new.piggyback.load_state_dict(state)
            assert new.model.module[1].num_batches_tracked.item() == begins
        reduce(one)


class Half:
    def size(self):
        return 1


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ({"process_group": Half()}, "process_group= of less than all 2 ranks"),
        ({"mixed_precision": object()}, "mixed_precision="),
        ({"delay_all_reduce_named_params": [], "param_to_hook_all_reduce": 1}, "delay_all_reduce_named_params="),
    ],
)
def test_what_reduces_gradients_otherwise_is_refused(named, told, monkeypatch):
    monkeypatch.setattr("torch.distributed.get_world_size", lambda group: group.size())
    with pytest.raises(InvalidInputError, match=rf"DistributedDataParallel with {told}.* can't be healed in place"):
        ScriptRank().make(nn.Linear(1, 1), **named)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: model.register_comm_hook(None, print),
        lambda model: model._register_builtin_comm_hook(None),
        lambda model: model._register_fused_optim(torch.optim.SGD, 1),
        lambda model: model.join(),
        lambda model: Join([model]),
    ],
)
def test_calls_that_change_how_gradients_are_reduced_are_refused(call):
    with pytest.raises(InvalidInputError, match=r"can't be healed in place; for that (leave|step)"):
        call(ScriptRank().make(nn.Linear(1, 1)))


def test_a_sparse_gradient_has_the_rows_that_any_rank_has_had_though_their_sum_be_zero():
    first, other = those = ranks(lambda: nn.Embedding(6, 2, sparse=True))
    for each, rows, sign in ((first, [1, 4], 1.0), (other, [4, 5, 5], -1.0)):
        (each.model(torch.tensor(rows)).sum() * sign).backward()
    summed = sum(each.model.module.weight.grad.to_dense() for each in those)
    reduce(*those)
    assert [each.model.module.weight.grad.coalesce().indices().tolist() for each in those] == [[[1, 4, 5]]] * 2
    assert summed[4].tolist() == [0.0, 0.0], "a sum of zeros is a gradient all the same"


def test_a_backward_pass_is_reduced_if_the_forward_pass_said_so_as_with_torch():
    [one] = ranks(lambda: nn.Linear(2, 1), 1)
    x, seen = torch.ones(1, 2), []
    for forward in (
        lambda: one.model.module(x),
        lambda: torch.no_grad()(one.model)(x),
        lambda: within(one.model, x),
        lambda: one.model(x),
    ):
        forward()
        seen.append(one.model.expects_gradient)
    assert seen == [False, False, False, True]


def within(model, x):
    with model.no_sync():
        return model(x)


def test_what_is_to_be_ignored_is_each_ranks_own():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
    model._ddp_params_and_buffers_to_ignore = ["0.running_mean", "1.bias"]
    made = ScriptRank().make(model)
    assert [tuple(each.shape) for each in made.reduced] == [(2,), (2,), (1, 2)]
    assert sorted(made.shared_buffers()) == ["0.num_batches_tracked", "0.running_var"]
    before = made.digest_buffers()
    model[0].running_mean.fill_(7.0)
    assert made.digest_buffers() == before
    model[0].running_var.fill_(7.0)
    assert made.digest_buffers() != before


def test_a_backward_pass_that_a_library_prepares_is_reduced_though_no_forward_pass_comes_before_it():
    rank = ScriptRank()
    model = rank.make(nn.Linear(1, 1))
    model.reducer.prepare_for_backward([])
    assert (model.expects_gradient, rank.begun) == (True, True)


class Counting(nn.Module):
    """Says of its state what is not all of it, and has more than tensors."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(2, 2), 0
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def state_dict(self, *_, **__):
        return {"weight alone": self.layer.weight}

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def test_the_state_of_models_is_all_of_them_whatever_they_say_it_is():
    one, other = Counting(), Counting()
    one.seen, one.mean[0], one.scratch[0] = 3, 1.0, 1.0
    state = Models([one]).state_dict()
    assert sorted(state) == ["0._extra_state", "0.layer.bias", "0.layer.weight", "0.mean"]
    Models([other]).load_state_dict(state)
    assert (other.seen, other.mean.tolist(), other.scratch.tolist()) == (3, [1.0, 0.0], [0.0, 0.0])
    assert torch.equal(other.layer.weight, one.layer.weight)
    with pytest.raises(KeyError):
        Models([other]).load_state_dict({"0.mean": one.mean})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_state_of_a_compiled_model_is_that_of_what_it_was_compiled_from():
    plain = nn.BatchNorm1d(2)
    ours, theirs = (Models([each]).state_dict() for each in (torch.jit.script(plain), plain))
    assert sorted(ours) == sorted(theirs)


def test_models_that_do_not_train_are_refused():
    with pytest.raises(RuntimeError, match="is not needed"):
        ScriptRank().make(nn.Linear(1, 1).requires_grad_(False))


def test_it_can_be_copied_and_passes_for_torch_s_own():
    [one] = ranks(Heads, 1)
    assert isinstance(AveragedModel(one.model).module, torch.nn.parallel.DistributedDataParallel)
    assert type(one.model).__name__ == "DistributedDataParallel"
    assert all(map(torch.equal, *(each.parameters() for each in (one.model, copy.deepcopy(one.model)))))
