"""Machines are counted rightly from the journal: those that nobody needed, and those that were there twice."""

import os

import pytest

from benchmarks.provision import Strike, Trial, cancel_jobs, jobs_left
from unicron.contracts.events import MachineAsked, MachineDelivered, NodeAdmitted, Regrouped
from unicron.contracts.tasks import Slot


class Journal:
    """What was said, as `Scene` gives it."""

    def __init__(self, *facts):
        self._facts = facts

    def said(self, kind, task="", since=0.0):
        return [fact for fact in self._facts if isinstance(fact, kind) and fact.at > since]


def asked(at, machine, replaces=""):
    return MachineAsked(at=at, pool="cpu", machine=machine, reason="x", replaces=replaces)


def delivered(at, machine, replaces=""):
    return MachineDelivered(at=at, pool="cpu", machine=machine, node="n", replaces=replaces)


def joined(at, node, machine):
    return NodeAdmitted(at=at, node=node, incarnation=str(at), host="h", slots=[Slot(index=0)], machine=machine)


def computes(at, node):
    member = {"task": "t", "worker": "t-1", "node": node, "slot": 0, "epoch": 0, "rank": 0, "world_size": 1}
    return Regrouped(at=at, iteration=1, **member)


START = (asked(1, "m1"), asked(1, "m2"), joined(2, "a", "m1"), joined(2, "b", "m2"), computes(3, "a"), computes(3, "b"))
REPLACED = (asked(11, "m3", "m1"), joined(12, "a", "m3"), delivered(12, "m3", "m1"), computes(13, "a"))


@pytest.mark.parametrize(
    ("more", "counts"),
    [
        pytest.param((), (0, 0), id="as it should be: a name that is used again is no second node"),
        pytest.param((asked(14, "m4", "m2"),), (1, 0), id="what was not struck is replaced"),
        pytest.param((asked(14, "m4"),), (1, 0), id="there is one more"),
        pytest.param((asked(14, "m4", "m1"), delivered(15, "m4", "m1")), (0, 1), id="two for one"),
        pytest.param((asked(14, "m4", "m1"),), (0, 0), id="another, as the first did not come"),
        pytest.param((joined(14, "c", "m3"),), (0, 0), id="a second node of one machine, which gets no work"),
        pytest.param((joined(14, "c", "m3"), computes(15, "c")), (0, 1), id="and one that gets some"),
    ],
)
def test_what_must_not_be_is_counted(more, counts):
    trial = Trial(Journal(*START, *REPLACED, *more), None)
    trial.began, trial.strikes = 5.0, [Strike("m1", 0.1, 2.0, 2.0)]
    assert (trial.wrongly_replaced(), trial.doubled()) == counts


def test_no_job_of_the_pool_is_left_and_no_other_ended(tmp_path, monkeypatch):
    (tmp_path / "queue").write_text("bench-1 7\nother 8\nbench-2 9\n")
    ends = 'echo "$@" >> asked; grep other queue > left; mv left queue'
    for name, does in {"squeue": "cat queue", "scancel": ends}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{does}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    cancel_jobs()
    assert (tmp_path / "asked").read_text() == "--full --signal=KILL 7 9\n7 9\n"
    assert jobs_left() == []
