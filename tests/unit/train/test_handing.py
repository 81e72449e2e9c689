"""Generators that hand out what a loop of theirs goes over are entered there in another process."""

import ast

import pytest
import torch
from helpers.loops import Watched
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from unicron.train.carry.compare import snapshot_differences
from unicron.train.carry.kinds import NotCarriedError
from unicron.train.loops.handing import mark_handing_loops

SCRIPT = """
class Meter:
    def __init__(self):
        self.total = self.count = 0
    def update(self, value):
        self.total, self.count = self.total + value, self.count + 1
    @property
    def mean(self):
        return self.total / self.count

class Logger:
    def __init__(self):
        self.loss, self.shown = Meter(), []

    def log_every(self, over):
        number, data = 0, Meter()
        show = lambda: self.shown.append((number, self.loss.mean, data.total, own.total))
        own = Meter()
        LOOPS
        self.shown.append("done")

class Data:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.tensor(index + float(torch.rand(())))

def others(over):
    for each in over:
        yield each

def run(over):
    logger = Logger()
    def step(number, x):
        note(epoch, number, round(float(torch.as_tensor(x).sum()), 5), logger.loss.total, *logger.shown[-2:],
             len(logger.shown), sampler.number, float(torch.rand(())))
        backward()
        logger.loss.update(1 + number)
    CONSUMER

class Sampler:
    number = 0
    def set_epoch(self, number):
        self.number = number
    def __iter__(self):
        generator = torch.Generator().manual_seed(self.number)
        return iter(torch.randperm(40, generator=generator).tolist())
    def __len__(self):
        return 40

sampler = Sampler()
loader = torch.utils.data.DataLoader(Data(), batch_size=2, sampler=sampler)
for epoch in range(2):
    run(OVER)
"""

LOOPS = {
    "one": """
        for x in over:
            data.update(number)
            yield x
            own.update(2)
            if number % 3 == 0:
                show()
            number += 1
    """,
    "numbered": """
        for i, x in enumerate(over):
            if i == 19:
                break
            yield x
            number += 1; own.update(i)
            show()
    """,
    "epochs": """
        for each in range(3):
            sampler.set_epoch(each)
            number += 1
            for x in over:
                data.update(number)
                yield x
                own.update(len(self.shown))
            show()
    """,
    "for ever": """
        while True:
            number += 1
            sampler.set_epoch(number)
            with torch.no_grad() if False else torch.enable_grad():
                pass
            for x in over:
                yield x
                own.update(1)
    """,
}
CONSUMERS = {
    "loop": """
    for number, x in enumerate(logger.log_every(over)):
        step(number, x)
        if number == 24: break
    """,
    "bare": """
    number = 0
    for x in logger.log_every(over):
        step(number, x)
        number += 1
        if number == 24: break
    """,
    "next": """
    logger.items = logger.log_every(over)
    for number in range(18):
        step(number, next(logger.items))
    """,
    "within": """
    for number, x in enumerate(others(logger.log_every(over))):
        step(number, x)
        if number == 24: break
    """,
}
OVERS = ("loader", "range(20)", "[*range(20)]", "others(loader)", "torch.randperm(20).tolist()")


def made(loops, consumer, over):
    text = SCRIPT.replace("OVER", over).replace("LOOPS", LOOPS[loops].strip())
    return text.replace("CONSUMER", CONSUMERS[consumer].strip())


def noted(text, there=None):
    watched = Watched(1, there).run(text)
    return watched.passed, watched.there


@given(
    loops=st.sampled_from([*LOOPS]),
    consumer=st.sampled_from([*CONSUMERS]),
    over=st.sampled_from(OVERS),
    at=st.floats(0, 0.99),
)
@settings(max_examples=20, deadline=None)
def test_another_process_goes_on_in_a_generators_loop_with_what_it_had(loops, consumer, over, at):
    assume((loops, over) != ("for ever", "others(loader)"))  # a generator ends once
    text = made(loops, consumer, over)
    whole, there = noted(text)
    begin = int(at * len(whole))
    again, there_again = noted(text, there[begin])
    assert again == whole[begin:]
    later = len(again) // 2
    assert noted(text, there_again[later])[0] == again[later:], "and can be replaced itself"


@pytest.mark.parametrize(
    "text",
    [
        "def f(over):\n    for x in over:\n        yield x + 1",
        "def f(over):\n    for x in over:\n        x = x + 1\n        yield x",
        "def f(over):\n    for x in over:\n        change(x)\n        yield x",
        "def f(over):\n    for x in over:\n        if x:\n            yield x",
        "def f(over):\n    for x in over:\n        yield x\n    yield None",
        "def f(over):\n    for _ in range(9):\n        x = next(over)\n        yield x",
        "def f(over):\n    while True:\n        yield over.pop()",
        "def f(over):\n    x = 0\n    for y in over:\n        yield x",
        "def f(over):\n    for x.y in over:\n        yield x",
        "def f(over):\n    for x in over:\n        yield",
        "def f(over):\n    for x in over:\n        yield from x",
    ],
)
def test_a_generator_whose_items_are_not_its_loops_is_left_as_it_is(text):
    tree = ast.parse(text)
    mark_handing_loops(tree.body[0], lambda name, *_: pytest.fail(name))
    assert ast.dump(tree) == ast.dump(ast.parse(text))


AHEAD = """
import random

class Data:
    def __len__(self):
        return 48
    def __getitem__(self, index):
        return index + random.random() + float(torch.rand(()))

class Ahead:
    def __init__(self, loader):
        self.loader = loader
    def __iter__(self):
        batches = iter(self.loader)
        found = next(batches)
        for batch in batches:
            yield found * SCALE
            found = batch
        yield found

random.seed(2)
loader = Ahead(torch.utils.data.DataLoader(Data(), batch_size=2, shuffle=True))
for epoch in range(2):
    for x in loader:
        note(epoch, x.tolist(), random.random(), float(torch.rand(())))
        backward()
"""


@given(begin=st.integers(0, 47), scale=st.sampled_from(("1", "2 * batch")))
@settings(max_examples=20, deadline=None)
def test_what_a_loader_draws_ahead_of_a_loop_is_drawn_anew_of_the_last_items_alone(begin, scale):
    text = AHEAD.replace("SCALE", scale)
    whole, there = noted(text)
    assert noted(text, there[begin])[0] == whole[begin:]


def test_where_items_are_picked_by_what_is_drawn_of_all_items_before_that_is_refused():
    text = AHEAD.replace("iter(self.loader)", "iter(sorted(range(48), key=lambda _: random.random()))")
    text = text.replace("yield found * SCALE", "yield torch.tensor(found + random.random())").replace(
        "    yield found\n", ""
    )
    _, there = noted(text)
    assert isinstance(there[40][1], NotCarriedError)


GATHERED = """
class Loader:
    passes = 0
    def __iter__(self):
        self.passes += 1
        yield from range(gather(self.passes % 4), 9)

def others(over):
    for x in over:
        yield x

def for_ever(over):
    while True:
        for x in OVER:
            yield x

class Trainer:
    def __init__(self):
        self.items = for_ever(Loader())

trainer = Trainer()
for number in range(24):
    note(number, next(trainer.items))
    backward()
"""


@pytest.mark.parametrize("over", ["over", "others(over)"])
def test_what_collectives_gave_within_an_iterator_is_known_to_all_that_it_was_asked_through(over):
    def run(there=None):
        watched = Watched(1, there)

        def gather(value):
            if watched.loops.replays_next:
                return int(watched.loops.replayed_result()[0])
            watched.loops.record_result([torch.tensor(value + 2)])
            return value + 2

        return watched.run(GATHERED.replace("OVER", over), gather=gather)

    whole = run()
    for begin in range(1, 24, 3):
        again = run(whole.there[begin])
        assert again.passed == whole.passed[begin:]
        for mine, theirs in zip(again.there[1:], whole.there[begin + 1 :], strict=True):
            for one, other in zip(mine[1].snapshots, theirs[1].snapshots, strict=True):
                assert not snapshot_differences(one, other)
