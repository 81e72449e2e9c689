"""Figures of one task: how long it still takes, and its configuration."""

from hypothesis import given
from hypothesis import strategies as st

from unicron.contracts.tasks import UNCOUNTED, TaskSpec
from unicron.observe.accounts.eta import time_left
from unicron.observe.words.configuration import configuration

SECONDS = st.floats(0.001, 1e4)
SPEC = TaskSpec(name="gpt", command=["python", "train.py"], iterations=1000)


@given(st.lists(SECONDS, min_size=1, max_size=30), st.integers(-1, 999), SECONDS, SECONDS)
def test_what_is_left_lies_within_its_spread_and_failures_only_make_it_longer(recent, iteration, training, lost):
    left = time_left(SPEC, iteration, recent, {"training": training})
    count = 999 - iteration
    assert count * min(recent) <= left.least <= left.seconds <= left.most <= count * max(recent)
    struck = time_left(SPEC, iteration, recent, {"training": training, "detection": lost, "idle": 9.0, "start_up": 9.0})
    assert (struck.seconds, struck.least) == (left.seconds, left.least)
    assert struck.most >= left.most, "waiting and starting are no failures"


def test_what_can_not_be_known_is_not_told():
    assert time_left(SPEC, 5, [], {}) is None
    assert time_left(TaskSpec(name="gpt", command=["x"], iterations=UNCOUNTED), 5, [1.0], {}) is None


WORDS = st.text("abcXYZ=_ .", min_size=1, max_size=8).filter(lambda word: "=" not in word)
OPTIONS = st.dictionaries(WORDS.map("--{}".format), st.lists(WORDS, max_size=2), max_size=5)


@given(OPTIONS, st.booleans(), st.dictionaries(WORDS, WORDS.map("secret-{}".format)))
def test_each_option_is_a_row_however_it_is_written_and_no_value_of_the_environment_is(options, joined, env):
    command = ["python", "train.py"]
    for name, values in options.items():
        command += [f"{name}={values[0]}", *values[1:]] if joined and values else [name, *values]
    rows = configuration(TaskSpec(name="gpt", command=command, env=env))
    told = dict(rows)
    assert {name: told[name] for name in options} == {
        name: " ".join(values) or "yes" for name, values in options.items()
    }
    assert len(rows) == len(told)
    assert not any("secret-" in text for _, text in rows)


def test_a_negative_number_is_a_value_and_what_stands_there_twice_has_both():
    assert ("-x", "1 2") in configuration(TaskSpec(name="gpt", command=["x", "-x", "1", "-y", "-x", "2"]))
    assert ("--low", "-1e-3") in configuration(TaskSpec(name="gpt", command=["x", "--low", "-1e-3"]))
