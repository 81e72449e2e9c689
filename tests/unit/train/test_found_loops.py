"""Loops that train are found by what runs in them, and are as far as they were whatever is around their items."""

import re

import pytest
import torch
from helpers.loops import Confirmed

from unicron.train.carry.kinds import NotCarriedError
from unicron.train.carry.tensors import Given
from unicron.train.loops.active_loops import LoopSnapshot

SHAPES = {
    "partial": """
def one(scale, x):
    note("one", x, total, float(torch.rand(())))
    backward()
step = functools.partial(one, 2)
for epoch in range(3):
    for x in range(3):
        step(x)
        total += x
""",
    "named train": """
class Net:
    def train(self):
        return self
for part in (Net(), Net()):
    part.train()
ready.append(True)
def train():
    global total
    for x in range(6):
        note("train", x, total)
        run()
        total += x
train()
""",
    "engine": """
class Engine:
    def __init__(self, process):
        self.process, self.seen, self.handlers = process, 0, []
    def run(self, data, epochs):
        for epoch in range(epochs):
            for x in data:
                self.process(self, x)
                self.seen += 1
                for handler in self.handlers:
                    handler(self)
def process(engine, x):
    note("process", x, engine.seen, total)
    run()
def handler(engine):
    global total
    total += engine.seen
engine = Engine(process)
engine.handlers.append(handler)
engine.run([3, 1, 2], 3)
""",
    "dispatch": """
class Trainer:
    done = 0
    def fit(self):
        note("fit", self.done, float(torch.rand(())))
        run()
        self.done += 1
steps = {"fit": Trainer().fit}
kinds = ["fit"] * 6
while kinds:
    steps[kinds.pop()]()
trainer = Trainer()
for name in ["fit"] * 3:
    getattr(trainer, name)()
""",
    "decorated": """
def logged(function):
    def call(*arguments):
        global total
        total += 1
        return function(*arguments)
    return call
@logged
def advance(x):
    note("advance", x, total)
    run()
for x in range(6):
    advance(x)
""",
    "lambda": """
tasks = [lambda: (note("task", total), run())] * 6
for task in tasks:
    task()
    total += 1
""",
    "generator": """
def train(count):
    for x in range(count):
        note("in", x, total, float(torch.rand(())))
        run()
        yield x, total
losses = []
for x, loss in train(6):
    note("out", x, loss, len(losses))
    losses.append(loss)
    total += x
note("end", total, losses)
""",
    "generator of a class, in epochs, numbered": """
class Trainer:
    seen = 0
    @staticmethod
    def steps(own, count):
        own.seen += 1
        left = count
        while left:
            left -= 1
            note("in", left, own.seen, total)
            run()
            own.seen += 1
            yield left
own = Trainer()
for epoch in range(2):
    for number, left in enumerate(tqdm(Trainer.steps(own, 3), file=io.StringIO()), 1):
        note("out", epoch, number, left, total)
        total += number
""",
    "validated first": """
def loop(data, how):
    for x in data:
        how(x)
def see(x):
    note("see", x)
def learn(x):
    global total
    note("learn", x, total)
    run()
    total += x
loop(range(2), see)
for epoch in range(3):
    loop(range(3), learn)
    loop(range(2), see)
""",
}


@pytest.mark.parametrize("text", SHAPES.values(), ids=SHAPES)
def test_loops_train_in_which_a_model_is_called_whatever_calls_it(text):
    ready = {"ready": []} if "ready" in text else {}
    whole = Confirmed().run(text, **ready)
    notes = [each for each in whole.passed if each[0] not in {"see", "out", "end"}]
    first, begun = whole.loops.first, [n for n, each in enumerate(whole.passed) if each in notes]
    for begin in begun[1:]:
        again = Confirmed(whole.there[begin], first).run(text, **({"ready": []} if ready else {}))
        ends = whole.passed[begin:]
        assert again.passed[-len(ends) :] == ends
        assert [each for each in again.passed[: -len(ends)] if each[0] != "see"] == []


REFUSED = {
    "no loop": (
        "run()",
        r"the model is called at x\.py:1 by way of loops\.py:\d+, with no loop of this program around it",
    ),
    "comprehension": ("[run() for _ in range(3)]", r"a comprehension trains, at x\.py:1: make it a `for` loop"),
    "before the model": (
        "for x in range(3): ready.append(1); run()",
        r"the loop at x\.py:1, in which x\.py:1 calls the model, begins before all is made that it trains: ",
    ),
    "next": (
        """
def steps():
    for x in range(3):
        run()
        yield x
found = steps()
while next(found) < 2:
    note()
""",
        r"the generator `steps` \(x\.py:2\) trains, and is asked for items by next\(\), or within another iterator",
    ),
    "map": (
        """
def steps():
    for x in range(3):
        run()
        yield x
for x in map(str, steps()):
    note()
""",
        r"the generator `steps` \(x\.py:2\) trains, and is asked for items by next\(\), or within another iterator",
    ),
    "coroutine": (
        """
async def steps():
    for x in range(3):
        run()
steps().send(None)
""",
        r"a coroutine trains, at x\.py:4: train in a function that is none",
    ),
    "both": (
        """
def steps():
    for x in range(3):
        run()
        yield x
for x in steps():
    run()
""",
        "",
    ),
}


@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=REFUSED)
def test_where_no_process_could_come_in_training_is_refused_at_once_with_the_line_and_the_cure(text, reason):
    watched = Confirmed()
    if not reason:  # it shows later: nobody is stopped any more
        watched.run(text, ready=[1])
        told = {str(each) for each in watched.records if isinstance(each, NotCarriedError)}
        reason = r"the body of the loop at x\.py:6 trains, and so does what it goes over: train in one of them"
        assert re.match(reason, told.pop())
        return
    with pytest.raises(NotCarriedError, match=reason):
        watched.run(text, ready=[] if "ready" in text else [1])


LAYERS = {
    "loader": "loader",
    "tqdm(loader)": "tqdm(loader, file=io.StringIO())",
    "tqdm(enumerate)": "tqdm(enumerate(loader), file=io.StringIO(), disable=True)",
    "enumerate(tqdm, 1)": "enumerate(tqdm(loader, file=io.StringIO()), 1)",
    "islice": "itertools.islice(loader, 4)",
    "islice from 1": "itertools.islice(loader, 1, 5)",
    "tqdm(islice)": "enumerate(tqdm(itertools.islice(loader, 4), file=io.StringIO()))",
    "zip": "tqdm(zip(itertools.islice(loader, 4), more), file=io.StringIO())",
    "tqdm(islice(workers))": "tqdm(itertools.islice(workers, 4), file=io.StringIO())",
    "trange": "trange(5, file=io.StringIO())",
    "map": "map(lambda x: 2 * x, itertools.count(3))",
    "chain": "itertools.chain(loader, reversed([1, 2]))",
    "cycle": "zip(range(5), itertools.cycle(loader))",
    "sentinel": "iter(lambda: next(more), 100)",
    "iter(tqdm)": "iter(tqdm(loader, file=io.StringIO()))",
}

OVER = """
loader = torch.utils.data.DataLoader(range(12), batch_size=2, shuffle=True)
workers = torch.utils.data.DataLoader(range(12), batch_size=2, shuffle=True, num_workers=1)
def endless():
    while True:
        yield from torch.randperm(7).tolist()
more = endless()
for epoch in range(2):
    bar = OVER
    for number, x in enumerate(bar):
        note(epoch, number, str(x), float(torch.rand(())), total)
        total += number
        backward()
        if number == 4:
            break
note("end", total, float(torch.rand(())))
"""


@pytest.mark.parametrize("over", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("inline", [True, False])
def test_what_is_around_the_items_of_a_loop_is_as_far_as_they_are(over, inline):
    text = OVER.replace("    bar = OVER\n", "").replace("(bar)", f"({over})") if inline else OVER.replace("OVER", over)
    whole = Confirmed().run(text)
    for begin in range(1, len(whole.passed) - 1, 2):
        record = whole.there[begin][1]
        if isinstance(record, NotCarriedError):
            assert re.search(r"the loop at x\.py:\d+ goes over|`bar`", str(record))
            assert "workers" not in over
            continue
        again = Confirmed(whole.there[begin], whole.loops.first).run(text)
        ends = whole.passed[begin:]
        assert again.passed[-len(ends) :] == ends


@pytest.mark.parametrize("first", ["changed.add_(1)", "changed"])
def test_nobody_begins_the_first_iteration_where_what_it_would_be_given_has_changed_since_the_snapshot(first):
    changed, watched = torch.zeros(3), Confirmed()
    watched.loops._prepare = lambda: ([], [Given(changed)], {}, ())
    watched.run(f"\nfor x in range(2):\n    [{first}, run()]\n", changed=changed)
    _, begun, *later = watched.records
    assert all(isinstance(each, LoopSnapshot) for each in later)
    told = str(begun) if isinstance(begun, NotCarriedError) else ""
    assert told.startswith("a model is changed in the body of the loop at x.py:2 before") == (first != "changed")
