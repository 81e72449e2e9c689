"""The comparison of a drill."""

import sys
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from unicron.contracts.worker import DRILL, Drilled
from unicron.train.inplace import drill


def with_gradients(*values):
    found = []
    for number, value in enumerate(values):
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = None if value is None else torch.full((3,), value)
        found.append((f"layer{number}", parameter))
    return drill.fingerprints(found)


@pytest.mark.parametrize(
    ("theirs", "exact", "up_to_rounding"),
    [
        ((1.0, None), "", ""),
        ((1.0 + 1e-6, None), "the gradient of layer0", ""),
        ((1.1, None), "the gradient of layer0", "the gradient of layer0"),
        ((1.0, 0.0), "the gradient of layer1", "the gradient of layer1"),
        ((1.0,), "the parameters", "the parameters"),
    ],
)
def test_the_first_gradient_that_differs_is_named(theirs, exact, up_to_rounding):
    ours = with_gradients(1.0, None)
    assert drill.difference(ours, with_gradients(*theirs), exact=True) == exact
    assert drill.difference(ours, with_gradients(*theirs), exact=False) == up_to_rounding


@pytest.mark.parametrize(("carried", "given_up"), [(5, False), (11, True)])
def test_a_drill_is_put_off_while_the_script_can_not_be_carried(monkeypatch, carried, given_up):
    monkeypatch.setenv(DRILL, "due")
    seen, sent = [], []
    monkeypatch.setattr(drill, "_end", lambda rank: seen.append(rank) or sys.exit())
    left = SimpleNamespace(refusal="", gradient=None, publish_gradient=lambda iteration, _: seen.append(iteration))
    one = drill.Drill(SimpleNamespace(send=sent.append), 1, 2)
    with suppress(SystemExit):
        for iteration in range(20):
            left.refusal = "a lock" if iteration < carried else ""
            one.run(left, iteration, [])
    assert seen == ([] if given_up else [carried, 1])
    assert sent == ([Drilled(iteration=drill.LATEST, rank=1, problem="a lock")] if given_up else [])
