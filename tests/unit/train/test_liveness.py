"""Variables that nobody reads any more at a point of a loop's body, before they are set anew."""

import ast

import pytest

from unicron.train.loops.liveness import Liveness

SCOPE = """
def main():
    best = setup = 0
    for x, y in loader:
        with autocast() as context:
            output = model(x)
        loss = output + y
        with suppress(ValueError):
            maybe = 1
        loss.backward()
        optimizer.step()
        for z in range(3):
            if z:
                break
            last = z
        else:
            maybe = last = 2
        while best:
            best -= maybe
        try:
            seen = loss
        finally:
            log(seen)
        def closure():
            return kept
        kept = closure()
        del setup
    return last
"""


def dead(text, count):
    tree = ast.parse(text)
    scope = tree.body[0] if isinstance(tree.body[0], ast.FunctionDef) else tree
    loop = next(each for each in ast.walk(scope) if isinstance(each, ast.For))
    found = Liveness(scope)
    return set(found.dead_after(loop.body[count - 1]) if count else found.dead_at_head(loop))


@pytest.mark.parametrize(
    ("count", "names"),
    [
        (0, {"context", "output", "loss", "z", "closure"}),
        (3, {"context", "output", "x", "y", "z", "closure"}),
        (7, {"context", "output", "x", "y", "z", "closure"}),
    ],
)
def test_what_is_set_on_all_ways_before_it_is_read_is_dead(count, names):
    """At the head `x` and `y` are alive; behind the update they come with the next item, as the loop is no `while`."""
    assert dead(SCOPE, count) == names


@pytest.mark.parametrize("more", ["print(globals())", "def f():\n    return x", "class A:\n    y = x", "print(x)"])
def test_what_is_read_elsewhere_is_alive(more):
    text = "for a in data:\n    x = a\n    x.backward()\n"
    assert "x" in dead(text, 1 + 1)
    assert "x" not in dead(text + more + "\n", 2)
