"""A service's commit: older versions of a state are migrated step by step, and unknown ones are refused."""

import re

import msgspec
import pytest
from unicron_detector import state as detector
from unicron_notifier import state as notifier
from unicron_planner import state as planner
from unicron_registry import state as registry
from unicron_straggler import state as straggler
from unicron_transition import state as transition

from unicron import codec
from unicron.contracts.ranges import Amount
from unicron.errors import InvalidInputError
from unicron.service.commit import Commit


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
    assert commit(state, version).decode_state("ages", Ages, MIGRATIONS) == Ages(months={"ann": 84})


def test_a_commit_from_before_there_were_versions_is_of_the_first():
    data = msgspec.msgpack.encode({"sequence": 5, "timers": {}, "outbox": [], "state": b"\x81\xa3age\x07"})
    assert codec.decode(data, Commit).decode_state("ages", Ages, MIGRATIONS) == Ages(months={"ann": 84})


def test_a_service_that_never_wrote_has_no_state():
    assert Commit().decode_state("ages", Ages, MIGRATIONS) is None


@pytest.mark.parametrize(
    ("state", "version", "error"),
    [
        ({}, 4, "has version 4, this one reads up to 3"),
        ({"months": "many"}, 3, "not of this version: Expected `object`"),
        ({"years": 7}, 1, "not of this version: 'age'"),
        (["age"], 1, "not of this version"),
    ],
)
def test_a_state_that_can_not_be_read_is_refused_with_the_field(state, version, error):
    with pytest.raises(InvalidInputError, match=error):
        commit(state, version).decode_state("ages", Ages, MIGRATIONS)


def test_what_can_be_learnt_anew_is_where_something_impossible_was_stored():
    class Learner(msgspec.Struct):
        tasks: list[str] = []
        rate: Amount = 0.0
        seen: dict[str, Amount] = {}

    poisoned = commit({"tasks": ["gpt"], "rate": float("nan"), "seen": {"a": 2.0}}, 1)
    assert poisoned.decode_state("ages", Learner, learnt=("rate", "seen")) == Learner(tasks=["gpt"], seen={"a": 2.0})
    with pytest.raises(InvalidInputError, match=r">= 0.0 - at `\$.rate`, which is nan$"):
        poisoned.decode_state("ages", Learner, learnt=("seen",))


@pytest.mark.parametrize("data", [b"\x81\xa6months\x81\xa3ann", b"", b"\xff\xff", b"\x91" * 2000])
def test_what_is_no_state_at_all_is_refused_and_raises_nothing_else(data):
    for version in (1, 3):
        with pytest.raises(InvalidInputError, match="it is not of this version: "):
            Commit(state=data, version=version).decode_state("ages", Ages, MIGRATIONS)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"sequence": -1}, ">= 0 - at `$.sequence`"),
        ({"token": 2**60}, "<= 9007199254740992 - at `$.token`"),
        ({"timers": {"t": {"due": float("nan"), "cause": "", "correlation": ""}}}, ">= 0.0 - at `$.timers"),
        ({"timers": {"t": {"due": 1e300, "cause": "", "correlation": ""}}}, "<= 100000000000.0 - at `$.timers"),
    ],
)
def test_a_commit_out_of_its_ranges_is_none(fields, error):
    with pytest.raises(InvalidInputError, match=re.escape(error)):
        codec.decode(msgspec.msgpack.encode(fields), Commit)


POISONED = [
    (detector.DetectorState, {"now": float("nan")}, "$.now"),
    (detector.DetectorState, {"tasks": {"gpt": {"failed_epoch": 10**12}}}, "failed_epoch"),
    (detector.DetectorState, {"nodes": {"n1": {"incarnation": "a", "silent": -5}}}, "silent"),
    (detector.DetectorState, {"tasks": {"gpt": {"ladder": {"reattempts": [float("inf")]}}}}, "reattempts[0]"),
    (transition.TransitionState, {"plan": 10**14}, "$.plan"),
    (transition.TransitionState, {"token": -1}, "$.token"),
    (
        transition.TransitionState,
        {"tasks": {"gpt": {"spec": {"name": "gpt", "command": ["x"]}, "started": -1}}},
        "started",
    ),
    (registry.RegistryState, {"tasks": {"gpt": {"spec": {"name": "gpt", "command": ["x"]}, "epoch": 10**12}}}, "epoch"),
    (planner.PlannerState, {"nodes": {"n1": {"slots": "many"}}}, "slots"),
    (planner.PlannerState, {"believed_rate": -1e-9}, "believed_rate"),
    (straggler.StragglerState, {"tasks": {"gpt": {"share": float("nan")}}}, "share"),
    (straggler.StragglerState, {"tasks": {"gpt": {"streak": -(10**12)}}}, "streak"),
    (notifier.NotifierState, {"since": float("inf")}, "since"),
    (notifier.NotifierState, {"tasks": {"gpt": {"on": {"n1": -1}}}}, "on"),
]


@pytest.mark.parametrize(("kind", "plain", "field"), POISONED)
def test_every_service_refuses_what_its_state_can_not_hold_and_names_it(kind, plain, field):
    with pytest.raises(InvalidInputError, match=re.escape(field)):
        commit(plain, 1).decode_state("x", kind)
