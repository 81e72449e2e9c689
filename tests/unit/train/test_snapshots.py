"""A process that takes a snapshot of a script is what the one was that left it, whatever the script keeps where."""

import pickle
import sys
import types

import pytest
import torch

from unicron.train.carry import limit
from unicron.train.carry.kinds import NotCarriedError
from unicron.train.carry.own_snapshot import Heap
from unicron.train.carry.unchanged import describe
from unicron.train.carry.variables import NAME, Variables
from unicron.train.inplace.records import sign, verify
from unicron.train.loops.active_loops import LoopSnapshot
from unicron.train.loops.instrument import instrument
from unicron.train.loops.loops import Loops

MODULE = "script_of_a_test"


@pytest.fixture(autouse=True)
def _no_module_stays():
    yield
    sys.modules.pop(MODULE, None)


class Watched:
    """A script on one rank; what it notes is no part of it."""

    __module__ = "unicron.tests"

    def __init__(self, text, there=None):
        self.passed, self.there, self.records = [], [], [there and there[1]]
        self._from = there
        self.loops = Loops(3, lambda: ([], [], {}, ()), self._meet, self.records.append)
        iteration = (self.loops.begin_iteration, self.loops.record_reduce, self.loops.record_update)
        module = sys.modules[MODULE] = types.ModuleType(MODULE)
        vars(module).update({NAME: self.loops, "note": self, "torch": torch})
        vars(module).update(backward=lambda: [each() for each in iteration])
        exec(compile(instrument(text, "x.py", "x.py"), "x.py", "exec"), vars(module))

    def _meet(self):
        if self._from:
            self.loops.load_state_dict(self._from[0])
            self.loops.take_over(pickle.loads(pickle.dumps(self._from[1])))

    def __call__(self, *values):
        self.passed.append(values)
        self.there.append((self.loops.state_dict(), self.records[-1]))


SCRIPT = """
import collections, copy, functools, itertools, os, random
import numpy as np

class Meter:
    best = None

    def __init__(self):
        self.values, self.counts, self.__hidden = [], collections.Counter(), 0

    def add(self, value):
        self.__hidden += 1
        self.values.append((value, self.__hidden))
        self.counts[int(value) % 3] += 1

class Slotted:
    __slots__ = ("step", "__dict__")

class Once(torch.nn.Linear):
    calls = 0

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        return super().forward(x)

def counting():
    seen = 0

    def count(more=[]):
        nonlocal seen
        seen += 1
        more.append(seen)
        count.last = seen
        return seen, len(more), count.last

    return count

meter, slotted, count = Meter(), Slotted(), counting()
alias = meter.values
module = Once(2, 2)
module.register_buffer("seen", torch.zeros((), dtype=torch.long))
own, numbers, bits, twister = torch.Generator().manual_seed(7), np.random.default_rng(5), random.Random(3), np.zeros(3)
recent, ordered, chosen = collections.deque(maxlen=3), collections.OrderedDict(a=1), {1, 2}
best, patience, tensors, small = None, 0, {}, np.float64(9.5)
state = functools.partial(dict, meter=meter)
endless = itertools.cycle("abc")
average, later = copy.deepcopy(module), torch.nn.Parameter(torch.ones(2))
adam = torch.optim.Adam([later], lr=0.1)

def run():
    global best, patience, small
    for step in range(7):
        if step == 2:
            meter.other = slotted
        value = float(torch.rand(())) + random.random() + np.random.rand() + bits.random() + numbers.random()
        value += float(torch.rand((), generator=own)) + float(module(torch.ones(2)).sum().detach())
        meter.add(value)
        Meter.best = max(value, Meter.best or 0.0)
        slotted.step, slotted.more = step, [slotted]
        recent.append(value), ordered.update({str(step): value}), ordered.move_to_end("a"), chosen.add(step)
        best, patience = (value, 0) if best is None or value < best else (best, patience + 1)
        small = min(small, np.float64(value))
        tensors[step % 2] = torch.full((3,), value, dtype=torch.bfloat16)
        twister[step % 3] = value
        with torch.no_grad():
            for mine, its in zip(average.parameters(), module.parameters()):
                mine.mul_(0.9).add_(its + step, alpha=0.1)
        later.grad = adam.step() or torch.full((2,), value)
        pair = [tensors.get(0), tensors.get(0)]
        note(step, value, list(alias), alias is meter.values, dict(meter.counts), Meter.best, slotted.step,
             slotted.more[0] is slotted, count(), module.calls, int(module.seen), list(recent),
             list(ordered.items()), sorted(chosen), best, patience,
             type(small), small, tensors[step % 2].tolist(), twister.tolist(), next(endless), state()["meter"] is meter,
             [each.tolist() for each in average.parameters()], getattr(meter, "other", None) is slotted, later.tolist())
        backward()

run()
"""


@pytest.mark.parametrize("step", [0, 1, 3, 6])
def test_a_script_goes_on_as_it_would_have(step):
    whole = Watched(SCRIPT)
    again = Watched(SCRIPT, whole.there[step])
    assert again.passed == whole.passed[step:]


PAIRS = """
import numpy as np
np.random.randn()

def walk():
    where = 0.0
    for _ in range(5):
        where += np.random.randn()
        yield where

for where in walk():
    note(where, np.random.randn())
    backward()
"""


@pytest.mark.parametrize("step", [1, 4])
def test_a_number_that_was_drawn_along_with_another_is_drawn_again(step):
    whole = Watched(PAIRS)
    again = Watched(PAIRS, whole.there[step])
    assert again.passed == whole.passed[step:]


HOOKS = """
seen = []
module = torch.nn.Linear(2, 2)

def doubles(module, args, out):
    seen.append(len(args))
    return out * 2

def adds(module, args, named, out):
    return out + len(named)

for step in range(7):
    if step == 1:
        first = module.register_forward_hook(doubles)
    if step == 2:
        second = module.register_forward_hook(adds, with_kwargs=True)
    if step == 4:
        first.remove()
    if step == 5:
        module.register_forward_hook(doubles)
    note(step, module(torch.ones(2)).sum().item(), len(seen), len(module._forward_hooks))
    backward()
"""


@pytest.mark.parametrize("step", range(7))
def test_a_hook_that_a_module_has_got_in_the_loop_is_there_again(step):
    whole = Watched(HOOKS)
    again = Watched(HOOKS, whole.there[step])
    assert again.passed == whole.passed[step:]
    assert Watched(HOOKS, again.there[-1]).passed == whole.passed[-1:]


LOOP = """
import functools, itertools, os, threading
BEFORE
for step in range(4):
    note(step)
    BODY
    backward()
"""


def last(before, body):
    return Watched(LOOP.replace("BEFORE", before).replace("BODY", body)).records[-1]


@pytest.mark.parametrize(
    ("before", "body", "named"),
    [
        ("log = []", "log.append(threading.Lock())", f"`log.0` of {MODULE}: _thread.lock"),
        ("found = (each for each in range(9))", "next(found)", f"`found` of {MODULE} (generator) has changed"),
        ("one, other = itertools.tee(range(9))", "next(one)", f"`one` of {MODULE} (_tee) has changed"),
        (
            "@functools.lru_cache\ndef half(x):\n    return [x / 2]",
            "half(step)",
            f"`half` of {MODULE} (_lru_cache_wrapper) has",
        ),
        ("mine = threading.local()", "mine.step = step", f"`mine` of {MODULE} (_local) has changed"),
        ("", "os.environ['UNICRON_TEST_STEP'] = str(step)", "`environ` of os (_Environ) has changed"),
        (
            "import numpy; big = numpy.zeros(2 << 20)",
            "big[:] = 1",
            f"`big` of {MODULE}, an array of 16 MiB, was written",
        ),
        ("box = {}", "box['f'] = (lambda x: lambda: x)(step)", f"`box.f` of {MODULE}: the function <lambda>.<locals>"),
        ("import socket; box = []", "box.append(socket.socket())", f"`box.0` of {MODULE}: socket.socket, which"),
        (
            "net = torch.nn.Linear(1, 1)\ndef hook(grad):\n    return grad",
            "step or net.weight.register_hook(hook)",
            f"`net._parameters.weight` of {MODULE} has got a hook",
        ),
        ("box = []", "box.append(threading.Thread())", f"`box.0` of {MODULE}: threading.Thread"),
        ("box = []", "box.append(bytes(1 << 30))", "what has changed since the loop began takes more than 15 MiB"),
        (
            "box = []",
            "box.append(torch.zeros(3 << 20, device='meta'))",
            f"`box.0` of {MODULE}: a tensor of 12582912 bytes",
        ),
        (
            "box = [None]",
            "exec('for _ in range(9999):\\n    box[0] = [box[0]]')",
            f"`box.0` of {MODULE}: it leads to objects that hold one another in too long a chain",
        ),
        (
            "class No:\n    def __reduce__(self):\n        raise RuntimeError('no')\nbox = []",
            "box.append(No())",
            "`box.0` of",
        ),
    ],
)
def test_what_no_other_process_can_have_is_named(before, body, named, monkeypatch):
    monkeypatch.setenv("UNICRON_TEST_STEP", "")
    record = last(before, body)
    assert isinstance(record, NotCarriedError)
    assert str(record).startswith(named)


@pytest.mark.parametrize("cache", ["lru_cache", "lru_cache(None)", "lru_cache(maxsize=2)", "cache"])
def test_a_cache_of_values_that_never_change_is_filled_anew(cache):
    record = last(f"@functools.{cache}\ndef half(x):\n    return x / 2, (str(x), int)", "half(step)")
    assert isinstance(record, LoopSnapshot)


def test_what_never_comes_to_an_end_is_named_once(monkeypatch):
    monkeypatch.setattr(limit, "LIMIT_S", 0.5)
    before = "class No:\n    def __reduce__(self):\n        while True:\n            pass\nbox = []"
    watched = Watched(LOOP.replace("BEFORE", before).replace("BODY", "step or box.append(No())"))
    assert {str(each) for each in watched.records[2:]} == {f"`box.0` of {MODULE}: copying it takes more than 0.5 s"}
    assert not watched.loops.taker._limit._began


def test_whatever_goes_wrong_in_a_snapshot_the_script_goes_on(monkeypatch):
    monkeypatch.setattr(Heap, "snapshot", lambda *_, **__: {}["a"])
    assert str(last("", "pass")) == "KeyError: 'a'"


def test_variables_that_are_set_before_they_are_read_or_can_not_be_carried_are_left_out():
    record = last("keep = 1", "log = threading.Lock(); big = torch.zeros(3 << 20); keep += 1")
    assert isinstance(record, LoopSnapshot)
    later = LOOP.replace("BEFORE", "kept = 0").replace(
        "BODY", "kept = lock if step > 1 else 0; lock = threading.Lock()"
    )
    whole = Watched(later)
    new = Watched.__new__(Watched)
    with pytest.raises(NameError, match="lock"):
        new.__init__(later, whole.there[2])
    assert new.loops.taker.lacking == {"lock": "_thread.lock, which only this process has"}


@pytest.mark.parametrize(
    ("gradient", "options", "restored"),
    [
        (None, {}, None),
        (2.0, {}, torch.nan),
        (0.0, {}, torch.nan),
        (0.0, {"zeroed": True}, 0.0),
        (2.0, {"zeroed": True}, torch.nan),
        (2.0, {"gradients": True}, 2.0),
    ],
)
def test_a_gradient_that_a_snapshot_does_not_have_is_no_number(gradient, options, restored):
    weight = torch.nn.Parameter(torch.ones(2))
    heap, spaces = Heap([weight]), {"x": Variables({"weight": weight})}
    heap.number_objects(spaces)
    weight.grad = None if gradient is None else torch.full((2,), gradient)
    data, weight.grad = heap.snapshot(spaces, {}, **options), None
    assert heap.restore(spaces, data) == ("gradients" in options)
    assert len(heap.missing_gradients) == (restored is torch.nan)
    assert str(weight.grad) == str(None if restored is None else torch.full((2,), restored))


def test_another_way_to_the_loop_is_noticed():
    text = LOOP.replace("BODY", "seen.append(step)")
    whole = Watched(text.replace("BEFORE", "seen = []"))
    with pytest.raises(NotCarriedError, match=f"`seen` of {MODULE} has not been made by"):
        Watched(text.replace("BEFORE", "other = []; seen = 0"), whole.there[2])


def test_only_what_a_rank_of_the_same_membership_has_signed_is_unpickled():
    secret, other = b"k" * 32, b"o" * 32
    assert verify(sign(b"snapshot", [secret]), [other, secret]) == b"snapshot"
    assert verify(sign(b"snapshot", []), []) == b"snapshot"
    for forged in (sign(b"snapshot", [other]), b"snapshot", b""):
        with pytest.raises(NotCarriedError, match="no rank of this task has made"):
            verify(forged, [secret])


@pytest.mark.parametrize(
    ("made", "kept"),
    [
        ("model(x)", True),
        ("[model(x) * 2, 1]", True),
        ("model.weight + 1", True),
        ("model(x).detach()", False),
        ("backwards(model(x).square().mean())", False),
        ("backwards(model(x).square().mean()) + 1", False),
        ("(x * 2).sum()", False),
        ("Doubled.apply(model(x))", True),
        ("backwards(Doubled.apply(model(x)).sum())", False),
    ],
)
def test_a_tensor_that_a_later_backward_pass_may_go_through_is_refused_by_name(made, kept):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given):
            ctx.save_for_backward(given)
            return given * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2 + 0 * ctx.saved_tensors[0]

    def backwards(loss):
        loss.backward()
        return loss

    model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    variables = {"fake": None, "model": model}
    heap, spaces = Heap([model.weight, model.bias]), {"x": Variables(variables)}
    heap.number_objects(spaces)
    variables["fake"] = eval(made, {"model": model, "x": x, "backwards": backwards, "Doubled": Doubled})
    if not kept:
        heap.snapshot(spaces, {})
        return
    with pytest.raises(NotCarriedError, match="`fake` of x still has the graph by which it was computed"):
        heap.snapshot(spaces, {})
    heap.snapshot(spaces, {"x": {"fake"}})  # set before it is read


def test_a_clone_of_a_parameter_goes_along_as_one():
    def made():
        model = torch.nn.Linear(2, 2)
        variables = {"kept": [], "model": model}
        heap, spaces = Heap([model.weight, model.bias]), {"x": Variables(variables)}
        heap.number_objects(spaces)
        return model, variables, heap, spaces

    (_, ours, heap, spaces), (model, theirs, other, others) = made(), made()
    ours["kept"] += [each.clone() for each in ours["model"].parameters()]
    with torch.no_grad():
        other.restore(others, heap.snapshot(spaces, {}))
    assert all(map(torch.equal, theirs["kept"], ours["kept"]))
    sum(each.sum() for each in theirs["kept"]).backward()
    assert torch.equal(model.weight.grad, torch.ones(2, 2))
    ours["kept"].append(ours["kept"][0] * 2)
    with pytest.raises(NotCarriedError, match=r"`kept\.2` of x: still has the graph"):
        heap.snapshot(spaces, {})


def test_a_parameter_of_a_copied_model_goes_by_the_name_that_its_script_knows():
    class Parallel(torch.nn.Module):
        unwalked = frozenset({"reduced"})

        def __init__(self):
            super().__init__()
            self.reduced, self.module = [], torch.nn.Linear(2, 2)
            self.reduced += self.module.parameters()

    average = Parallel()
    heap, spaces = Heap([]), {"x": Variables({"average": average})}
    heap.number_objects(spaces)
    assert describe(heap._keys[id(average.module.weight)]).endswith("module._parameters.weight` of x")
    average.training = False
    assert heap.snapshot(spaces, {})
    assert average.reduced == [*average.module.parameters()]
