"""What a drill compares."""

import pytest
import torch

from unicron.train import drill


def with_gradients(*values):
    found = []
    for number, value in enumerate(values):
        parameter = torch.nn.Parameter(torch.zeros(3))
        parameter.grad = None if value is None else torch.full((3,), value)
        found.append((f"layer{number}", parameter))
    return drill.prints(found)


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
