"""A loader's workers that are kept over epochs are in another process what they are here, or named."""

import gc
import sys
import types

import numpy as np
import pytest
import torch
from helpers.loops import Watched
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from unicron.train.carry.kept_workers import KeptWorkers, Loaded, make_iterator
from unicron.train.carry.kinds import NotCarriedError
from unicron.train.carry.randomness import generators
from unicron.train.carry.variables import NAME
from unicron.train.loops.parts import parts_of

SCRIPT = """
import itertools, random, numpy, counted
from torch.utils.data import DataLoader, Dataset, get_worker_info
count, own = 0, numpy.random.default_rng(1)

class Worked:
    seen = 0

Worked.__module__ = "worked"

def step(name):
    global count
    count += 1
    Worked.seen += 2
    counted.seen += 3
    return count + Worked.seen + counted.seen + own.random()

class Own(Dataset):
    def __init__(self):
        self.seen, self.generator, self.kept = 0, torch.Generator(), {}
        self.iterator, self.opened, self.epoch = map(abs, itertools.count()) if "moves" in how else None, None, 0
        self.large = torch.zeros(4, 1 << 18)

    def __len__(self):
        return 8

    def __getitem__(self, number):
        found = [number, self.epoch]
        if "draws" in how:
            found += [float(torch.rand(())), random.random(), float(numpy.random.rand())]
        if "counts" in how:
            self.seen += 1
            found += [self.seen, float(torch.rand((), generator=self.generator)), getattr(self, "own", own).random()]
        if "caches" in how:
            found.append(self.kept.setdefault(number, len(self.kept) + get_worker_info().seed))
        if "module" in how:
            found.append(step(number))
        if "opens" in how:
            self.opened = self.opened or open(__import__("os").devnull, "w")
        if "moves" in how:
            found.append(next(self.iterator))
        if "large" in how:
            self.large = torch.zeros(1 << 19)
        return found

def begin(number):
    get_worker_info().dataset.seen = torch.initial_seed() % 1000
    get_worker_info().dataset.own = numpy.random.default_rng(number)

data = Own()
loader = DataLoader(data, 1, shuffle="shuffled" in how, num_workers=2, persistent_workers=True, collate_fn=list,
    worker_init_fn=begin if "begun" in how else None, generator=torch.Generator() if "seeded" in how else None)
if "peeked" in how:
    next(iter(loader))
"""
FOR = """
if is_other:  # the seed of its workers must be that of the other's all the same
    torch.rand(9)
for epoch in range(3):
    if "told" in how:
        data.epoch = epoch
    for number, batch in enumerate(loader):
        note(epoch, number, str(batch), float(torch.rand(())))
        backward()
        if number == ends:
            break
"""
WHILE = """
batches, epoch, number = iter(loader), 0, 0
while epoch < 3:
    try:
        batch = next(batches)
    except StopIteration:
        batches, epoch = iter(loader), epoch + 1
        continue
    note(epoch, number, str(batch), float(torch.rand(())))
    number += 1
    backward()
"""

CYCLE = """
def cycle():
    while True:
        drawn = numpy.random.randint(1000)
        for batch in loader:
            yield HANDED

batches, number = iter(cycle()), 0
while number < 24:
    batch = next(batches)
    note(number, str(batch), float(torch.rand(())))
    number += 1
    backward()
"""

CARRIED = ("draws", "counts", "caches", "module", "shuffled", "begun", "seeded", "peeked")


@pytest.fixture(autouse=True)
def _kept(monkeypatch):
    monkeypatch.setattr(torch.utils.data.DataLoader, "_get_iterator", make_iterator)
    monkeypatch.setitem(sys.modules, "worked", types.SimpleNamespace(**{NAME: True}))
    counted = types.ModuleType("counted")
    vars(counted).update({NAME: True, "seen": 0})
    monkeypatch.setitem(sys.modules, "counted", counted)


def run(text, how, ends=99, there=None):
    """Run a script; return what it notes, and where it was each time."""
    watched = Watched(1, there).run(SCRIPT + text, how=how, ends=ends, is_other=there is not None)
    gc.collect()  # its workers end
    return watched.passed, watched.there


@settings(max_examples=3, deadline=None, derandomize=True)
@example(how=set(CARRIED), ends=99, struck=0)
@example(how={"draws", "counts", "shuffled"}, ends=4, struck=2)
@given(how=st.sets(st.sampled_from(CARRIED)), ends=st.sampled_from([2, 99]), struck=st.integers(0, 2))
def test_what_workers_draw_and_change_over_epochs_goes_along_to_others(how, ends, struck):
    whole, there = run(FOR, how, ends)
    for epoch in range(3):
        begin = next(number for number, each in enumerate(whole) if each[:2] == (epoch, struck))
        again, later = run(FOR, how, ends, there[begin])
        assert again == whole[begin:]
    again, _ = run(FOR, how, ends, later[-1])
    assert again == whole[-1:], "and can be replaced itself"


@pytest.mark.parametrize(
    "text", [WHILE, CYCLE.replace("HANDED", "batch"), CYCLE.replace("HANDED", "batch, drawn")], ids=range(3)
)
@pytest.mark.parametrize("at", [3, 9, 20])
def test_workers_of_an_iterator_that_the_script_itself_asks_are_carried(text, at):
    how = {"draws", "counts", "shuffled"}
    np.random.seed(3)  # noqa: NPY002 the script draws of that
    whole, there = run(text, how)
    np.random.seed(3)  # noqa: NPY002 likewise
    again, _ = run(text, how, there=there[at])
    assert again == whole[at:]


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("told", "`data(set)?.*` .* has changed since a DataLoader has workers"),
        ("opens", "opened|kept over epochs"),
        ("moves", "iterator|has changed"),
        ("large", "changed 41\\d\\d KiB"),
    ],
)
def test_what_workers_have_that_no_other_can_have_is_named(how, named):
    _, there = run(FOR, {how, "counts"}, 3)
    assert not isinstance(there[2][1], NotCarriedError) or how == "moves", "the first epoch needs no more"
    with pytest.raises(NotCarriedError, match=named):
        raise there[10][1]


HALVES = """
class Halves(DataLoader):
    batches = None

    def __iter__(self):
        self.batches = self.batches or super().__iter__()
        for _ in range(4):
            yield next(self.batches)

loader = Halves(data, 1, num_workers=2, persistent_workers=True, collate_fn=list)
for epoch in range(2):
    for batch in loader:
        note(epoch, str(batch))
        backward()
"""


def test_an_iterator_that_goes_on_with_the_next_epoch_is_named():
    whole, there = run(HALVES, {"draws"})
    again, _ = run(HALVES, {"draws"}, there=there[2])
    assert again == whole[2:]
    with pytest.raises(NotCarriedError, match="begun once for several epochs"):
        raise there[6][1]


def test_an_iterator_that_was_put_between_two_epochs_is_only_good_for_the_next(monkeypatch):
    told = []
    loader = DataLoader(range(4), num_workers=1, persistent_workers=True)
    made = KeptWorkers(loader, 5)
    made.advance_to({"seed": 5, "epoch": 2, "now": [b""], "before": None})
    monkeypatch.setattr(KeptWorkers, "abandon", told.append)
    with pytest.raises(NotCarriedError, match="was between two epochs") as raised:
        next(made)
    assert told == [raised.value], "though a script may catch it"


def test_a_worker_that_has_drawn_begins_anew_where_another_had_not():
    loaded = Loaded(DataLoader(range(4)))
    loaded.first_states = generators()
    torch.rand(1)
    loaded.set_state(b"")
    assert generators() == loaded.first_states


def test_an_iterator_that_is_yet_to_begin_has_no_parts():
    assert parts_of(KeptWorkers.__new__(KeptWorkers)) == []
