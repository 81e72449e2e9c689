"""Gradients that are not finite: the rank that is named, and the update by each rule."""

import math
import re

import msgspec
import pytest
import torch
from torch import nn

from unicron.contracts.tasks import Member, ParallelLayout
from unicron.contracts.worker import Membership, NotFinite
from unicron.errors import NonFiniteGradientError
from unicron.train import Session
from unicron.train.worker.finite import Account, Finite, swap_replicas
from unicron.train.worker.shell import run


class Shell:
    """Rank 1 of three, of which rank 2 has a bad microbatch, or another."""

    def __init__(self, *others):
        self.others, self.said, self.is_sum_finite, self.finite = others, [], True, True
        self.log = []

    async def gather(self, value):
        self.log.append("gather")
        first, last = self.others
        return [Account("a", first, [0, 3, 6]), value, Account("c", last, [2, 5, 8])]

    def send(self, message):
        self.said.append(message)
        self.log.append("say")


def membership(rank=1):
    member = Member(worker="b", node="n", slot=0)
    return Membership(epoch=4, rendezvous="", rendezvous_id="", rank=rank, world_size=3, member=member)


def test_the_first_microbatch_that_spoils_the_sum_is_the_one_that_is_named():
    shell = Shell([], [5])
    finite = Finite(shell, shell, "stop")
    finite.record(1)
    shell.is_sum_finite = False
    finite.record(4)
    finite.record(7)
    named = r"that of microbatch 4 on rank 1 \(b\); that of microbatch 5 on rank 2 \(c\)"
    with pytest.raises(NonFiniteGradientError, match=f"^iteration 8: the gradient is not finite: {named}$"):
        run(finite.decide(membership(), 8, {1, 4, 7}, 9))
    assert shell.said == [NotFinite(iteration=8, epoch=4, rank=1, microbatches=[4], rule="stop")]
    assert shell.log == ["gather", "say", "gather"], "who ends has the others stopped: they have told by then"


def test_what_was_accumulated_for_nothing_is_forgotten():
    shell = Shell([], [])
    finite = Finite(shell, shell, "skip")
    shell.is_sum_finite = False
    finite.record(4)
    finite.clear()
    run(finite.decide(membership(), 8, {1, 4, 7}, 9))
    assert shell.said == []


def test_where_only_the_sum_of_all_is_too_large_the_first_rank_says_so():
    shell = Shell([], [])
    finite = Finite(shell, shell, "skip")
    run(finite.decide(membership(rank=0), 8, (), 9))
    assert shell.said == [NotFinite(iteration=8, epoch=4, rank=0, microbatches=[], rule="skip")]
    with pytest.raises(NonFiniteGradientError, match="each microbatch's is, and their sum is not"):
        run(Finite(shell, shell, "stop").decide(membership(rank=0), 8, (), 9))


def test_without_a_rule_nothing_is_looked_at():
    finite = Finite(object(), object(), None)
    finite.record(4)
    assert finite.is_finite


def test_what_is_to_be_tried_again_is_computed_by_those_whose_own_was_finite():
    shell = Shell([], [])
    finite, shell.is_sum_finite = Finite(shell, shell, "retry"), False
    finite.record(4)
    assert run(finite.decide(membership(), 8, {1, 4, 7}, 9)) == [[1, 7], [], [4]]
    assert shell.said == [NotFinite(iteration=8, epoch=4, rank=1, microbatches=[4], rule="retry")]
    finite.clear()
    finite.settle(membership(), 8)
    assert shell.said[1:] == [NotFinite(iteration=8, epoch=4, rank=1, microbatches=[4], rule="retry", suspect=True)]
    finite.settle(membership(), 9)
    assert len(shell.said) == 2, "once"


def test_what_is_not_finite_for_the_second_time_stops_with_the_last_to_compute_it():
    shell = Shell([], [])
    finite, shell.is_sum_finite = Finite(shell, shell, "retry"), False
    finite.record(4)
    run(finite.decide(membership(), 8, {1, 4, 7}, 9))
    finite.clear()
    shell.others = [], [4]
    with pytest.raises(NonFiniteGradientError, match=r"nor is it when computed again: that of microbatch 4 on rank 2"):
        run(finite.decide(membership(), 8, (), 9))
    finite.settle(membership(), 9)
    assert len(shell.said) == 1, "nobody is suspected of what others come to as well"


def test_in_another_membership_it_is_tried_once_more():
    shell = Shell([], [4])
    finite = Finite(shell, shell, "retry")
    run(finite.decide(membership(), 8, {1, 4, 7}, 9))
    later = msgspec.structs.replace(membership(), epoch=5)
    assert run(finite.decide(later, 8, {1, 4, 7}, 9))
    with pytest.raises(NonFiniteGradientError):
        run(finite.decide(later, 8, {1, 4, 7}, 9))


@pytest.mark.parametrize(
    ("bad", "dealt"),
    [
        ([[], [], []], [[], [], []]),
        ([[0], [1], []], [[], [], [0, 1, 3, 4]]),
        ([[0], [1], [2]], [[2, 5], [0, 3], [1, 4]]),
    ],
)
def test_microbatches_go_from_spoilt_sums_to_other_replicas(bad, dealt):
    accounts = [Account(f"w{rank}", each, [rank, rank + 3]) for rank, each in enumerate(bad)]
    assert swap_replicas(accounts, ParallelLayout(replicas=3), 6) == dealt


def test_a_replica_is_spoilt_where_one_of_its_ranks_is_and_what_nobody_has_is_dealt_too_and_an_only_one_tries_again():
    accounts = [Account("w", bad, done) for bad, done in [([], [0, 2]), ([2], [0, 2]), ([], [1]), ([], [1])]]
    assert swap_replicas(accounts, ParallelLayout(tensor=2, replicas=2), 4) == [[], [0, 2, 3]]
    assert swap_replicas([Account("w", [1], [0, 1])], ParallelLayout(replicas=1), 2) == [[0, 1]]


def trained(finite, bad):
    """Train a process of its own for five iterations, in which some (iteration, microbatch) spoil the gradient."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session, weights, gradients = Session(iterations=5, microbatches=3, finite=finite), [], []
    session.protect(model=model, optimizer=optimizer)
    for iteration in session.iterations():
        for microbatch in session.microbatches():
            loss = model(torch.ones(2, 3)).square().mean()
            session.backward(loss * math.nan if (iteration, microbatch) in bad else loss)
        gradients.append(model.weight.grad.clone())
        session.step()
        weights.append(model.weight.detach().clone())
    return weights, gradients


def test_a_skipped_update_changes_nothing_and_training_goes_on_where_it_is_looked_for():
    weights, gradients = trained("skip", {(2, 1)})
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])
    assert not gradients[2].any(), "what a script clips is zero"
    assert all(each.isfinite().all() for each in weights)
    weights, _ = trained(finite=False, bad={(2, 1)})
    assert weights[-1].isnan().all()


@pytest.mark.parametrize("finite", [True, "stop"])
def test_a_session_that_is_to_stop_does_before_the_update(finite):
    with pytest.raises(NonFiniteGradientError, match=r"iteration 2: .* that of microbatch 1 on rank 0"):
        trained(finite, {(2, 1), (2, 2)})


def test_a_gradient_that_is_finite_the_second_time_makes_the_update_that_there_would_have_been_or_none():
    (plain, _), passing = trained("retry", ()), Once((2, 1))
    weights, _ = trained("retry", passing)
    assert passing.seen == 2
    assert all(torch.equal(*pair) for pair in zip(plain, weights, strict=True))
    with pytest.raises(NonFiniteGradientError, match="nor is it when computed again: that of microbatch 1 on rank 0"):
        trained("retry", {(2, 1)})


class Once:
    """A microbatch that is bad when it is computed for the first time only."""

    def __init__(self, where):
        self.where, self.seen = where, 0

    def __contains__(self, where):
        self.seen += where == self.where
        return where == self.where and self.seen == 1


@pytest.mark.parametrize("word", ["again", 1, 0, None, ["skip"]])
def test_another_word_is_refused(word):
    told = re.escape(f'Session(finite={word!r}): give "skip", "stop", "retry" or a bool')
    with pytest.raises(ValueError, match=told):
        Session(finite=word)
