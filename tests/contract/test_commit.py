"""What a service writes down: newer forms of a state are reached step by step, and what is not known is not read."""

import msgspec
import pytest

from unicron import codec
from unicron.commit import Commit
from unicron.contracts.ranges import Amount
from unicron.errors import InvalidInputError


class Ages(msgspec.Struct):
    """The third form of a state that began as {"age": years of one person}."""

    months: dict[str, int] = {}


MIGRATIONS = (
    lambda old: {"ages": {"ann": old["age"]}},
    lambda old: {"months": {name: 12 * years for name, years in old["ages"].items()}},
)


def commit(state, version):
    return Commit(state=msgspec.msgpack.encode(state), version=version)


@pytest.mark.parametrize(
    ("state", "version"), [({"age": 7}, 1), ({"ages": {"ann": 7}}, 2), ({"months": {"ann": 84}}, 3)]
)
def test_a_state_of_any_version_is_read_as_todays(state, version):
    assert commit(state, version).restored("ages", Ages, MIGRATIONS) == Ages(months={"ann": 84})


def test_a_commit_from_before_there_were_versions_is_of_the_first():
    data = msgspec.msgpack.encode({"sequence": 5, "timers": {}, "outbox": [], "state": b"\x81\xa3age\x07"})
    assert codec.decode(data, Commit).restored("ages", Ages, MIGRATIONS) == Ages(months={"ann": 84})


def test_a_service_that_never_wrote_has_no_state():
    assert Commit().restored("ages", Ages, MIGRATIONS) is None


@pytest.mark.parametrize(
    ("state", "version", "error"),
    [
        ({}, 4, "has version 4, this one reads up to 3"),
        ({"months": "many"}, 3, "not of this version: Expected `object`"),
        ({"years": 7}, 1, "not of this version: 'age'"),
        (["age"], 1, "not of this version"),
    ],
)
def test_a_state_that_can_not_be_read_is_refused_with_the_cure(state, version, error):
    with pytest.raises(
        InvalidInputError, match=rf"stored state of ages .*{error}.*run the version.*delete the key ages"
    ):
        commit(state, version).restored("ages", Ages, MIGRATIONS)


def test_what_can_be_learnt_anew_is_where_something_impossible_was_stored():
    class Learner(msgspec.Struct):
        tasks: list[str] = []
        rate: Amount = 0.0
        seen: dict[str, Amount] = {}

    poisoned = commit({"tasks": ["gpt"], "rate": float("nan"), "seen": {"a": 2.0}}, 1)
    assert poisoned.restored("ages", Learner, learnt=("rate", "seen")) == Learner(tasks=["gpt"], seen={"a": 2.0})
    with pytest.raises(InvalidInputError, match=r">= 0.0 - at `\$.rate`, which is nan; run the version"):
        poisoned.restored("ages", Learner, learnt=("seen",))
