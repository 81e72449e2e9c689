"""What each way of healing promises to all that ask it: this is what a new one has to hold."""

import importlib
import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron.checks import task_problems
from unicron.contracts.tasks import Healing, TaskSpec
from unicron.healing import WAYS, complete, healed_by, way_of

GIVEN = {"name": "t", "command": ["python", "train.py"], "microbatches": 64}
each_way = pytest.mark.parametrize("heal", [*WAYS])


def test_each_word_has_a_way_and_one_of_a_later_version_counts_as_a_session():
    assert {*WAYS} == {*Healing} - {Healing.UNKNOWN}
    assert way_of(TaskSpec(**GIVEN, heal=Healing.UNKNOWN)) is WAYS[Healing.SESSION]


@each_way
@given(workers=st.integers(1, 64))
def test_what_follows_from_a_way_makes_a_task_that_can_be_run(heal, workers):
    fields = {**GIVEN, "heal": heal, "max_workers": workers}
    complete(fields)
    spec = TaskSpec(**fields)
    assert not task_problems(spec)
    assert workers in spec.sizes
    same = TaskSpec(**{**GIVEN, "max_workers": workers, "min_workers": workers})
    assert not task_problems(healed_by(heal, same)), "however it is chosen"


@each_way
def test_what_a_user_has_said_is_refused_where_it_does_not_fit_and_never_replaced(heal):
    fields = {**GIVEN, "heal": heal, "max_workers": 4, "min_workers": 2, "iterations": 7}
    complete(fields)
    assert (fields["min_workers"], fields["iterations"]) == (2, 7)
    assert bool(task_problems(TaskSpec(**fields))) == (not WAYS[heal].elastic)


@each_way
def test_its_programs_can_be_run_by_the_standby(heal):
    spec = TaskSpec(**GIVEN, heal=heal)
    request = WAYS[heal].launch(spec.layout)
    for module in request["ahead"]:
        importlib.import_module(module)
    if request["runner"]:
        assert [*inspect.signature(importlib.import_module(request["runner"]).launch).parameters] == [
            "request",
            "run_script",
        ]
