"""Gradients that are not finite: who is named, and what the rule makes of the update."""

import math

import pytest
import torch
from torch import nn

from unicron.contracts.tasks import Member
from unicron.contracts.worker import Membership, NotFinite
from unicron.errors import NonFiniteGradientError
from unicron.train import Session
from unicron.train.finite import Account, Finite
from unicron.train.shell import run


class Shell:
    """Rank 1 of three, of which rank 2 has a bad microbatch, or another."""

    def __init__(self, *others):
        self.others, self.said, self.summed, self.finite = others, [], True, True
        self.log = []

    async def gather(self, value):
        self.log.append("gather")
        first, last = self.others
        return [Account("a", first), value, Account("c", last)]

    def say(self, message):
        self.said.append(message)
        self.log.append("say")


def membership(rank=1):
    member = Member(worker="b", node="n", slot=0)
    return Membership(epoch=4, rendezvous="", rendezvous_id="", rank=rank, world_size=3, member=member)


def test_the_first_microbatch_that_spoils_the_sum_is_the_one_that_is_named():
    shell = Shell([], [5])
    finite = Finite(shell, "stop")
    finite.note(1)
    shell.summed = False
    finite.note(4)
    finite.note(7)
    with pytest.raises(NonFiniteGradientError) as raised:
        run(finite.decide(membership(), 8))
    assert str(raised.value) == (
        "iteration 8: the gradient is not finite: "
        "that of microbatch 4 on rank 1 (b); that of microbatch 5 on rank 2 (c)"
    )
    assert shell.said == [NotFinite(iteration=8, epoch=4, rank=1, microbatches=[4], rule="stop")]
    assert shell.log == ["gather", "say", "gather"], "who ends has the others stopped: they have told by then"


def test_what_was_accumulated_for_nothing_is_forgotten():
    shell = Shell([], [])
    finite = Finite(shell, "skip")
    shell.summed = False
    finite.note(4)
    finite.clear()
    run(finite.decide(membership(), 8))
    assert shell.said == []


def test_where_only_the_sum_of_all_is_too_large_the_first_rank_says_so():
    shell = Shell([], [])
    finite = Finite(shell, "skip")
    run(finite.decide(membership(rank=0), 8))
    assert shell.said == [NotFinite(iteration=8, epoch=4, rank=0, microbatches=[], rule="skip")]
    with pytest.raises(NonFiniteGradientError, match="each microbatch's is, and their sum is not"):
        run(Finite(shell, "stop").decide(membership(rank=0), 8))


def test_without_a_rule_nothing_is_looked_at():
    finite = Finite(object(), None)
    finite.note(4)
    assert finite.holds


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


def test_a_skipped_update_changes_nothing_and_training_goes_on():
    weights, gradients = trained("skip", {(2, 1)})
    assert torch.equal(weights[1], weights[2])
    assert not torch.equal(weights[2], weights[3])
    assert not gradients[2].any(), "what a script clips is zero"
    assert all(each.isfinite().all() for each in weights)


@pytest.mark.parametrize("finite", [True, "stop"])
def test_a_session_that_is_to_stop_does_before_the_update(finite):
    with pytest.raises(NonFiniteGradientError, match=r"iteration 2: .* that of microbatch 1 on rank 0"):
        trained(finite, {(2, 1), (2, 2)})


def test_a_session_that_is_not_told_to_look_does_not():
    weights, _ = trained(finite=False, bad={(2, 1)})
    assert weights[-1].isnan().all()


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="Session\\(finite='retry'\\): give"):
        Session(finite="retry")
