"""Subjects and codec: what they make, and what they refuse at the door; and what fields may hold."""

import contextlib
import math
import re
import types
import typing
import zlib

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from unicron_cli.samples import sample

from unicron import codec, subjects
from unicron.authentication import authenticate
from unicron.contracts.base import AGENT, LOCAL, Started
from unicron.contracts.commands import StopWorker
from unicron.contracts.events import (
    Alert,
    DeadLetter,
    IterationFinished,
    NodeHeartbeat,
    NodeJoined,
    OrderTaken,
    PlanDecided,
    TaskRecovered,
    WorkerExited,
)
from unicron.contracts.plans import Plan
from unicron.contracts.queries import GetStatus
from unicron.contracts.ranges import MOST_NUMBER
from unicron.contracts.tasks import WorkerStatus
from unicron.errors import InvalidInputError
from unicron.services import ANSWERING

GOOD = st.from_regex(re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII), fullmatch=True)
BAD = st.text(max_size=80).filter(lambda text: not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", text))


def stop(node, task):
    return StopWorker(node=node, slot=0, worker="w", task=task, source="transition")


def exited(source, task):
    return WorkerExited(node="n1", slot=0, task=task, worker="w", source=source)


def heard(message):
    return authenticate(subjects.for_message(message), codec.encode(message))


# --- subjects --------------------------------------------------------------------------------------------------------


def test_subjects_of_facts_commands_telemetry_and_queries():
    beat = NodeHeartbeat(node="n1", incarnation="i", source="n1")
    assert subjects.for_message(exited("n1", "gpt")) == "unicron.v1.evt.n1.WorkerExited.gpt"
    assert subjects.for_message(stop("n2", "gpt")) == "unicron.v1.cmd.n2.StopWorker.gpt"
    assert subjects.for_message(beat) == "unicron.v1.tel.n1.NodeHeartbeat.n1"
    assert subjects.rpc("registry") == "unicron.v1.rpc.registry"
    assert subjects.commands("n2") == "unicron.v1.cmd.n2.>"
    fact, telemetry = "unicron.v1.evt.*.WorkerExited.*", "unicron.v1.tel.*.IterationFinished.*"
    assert subjects.events(WorkerExited, IterationFinished) == [fact, telemetry]


def test_nobody_can_say_what_another_says():
    assert heard(exited("n1", "gpt")).worker == "w"
    with pytest.raises(InvalidInputError, match="n2 can't speak for n1"):
        heard(exited("n2", "gpt"))
    for source in ("planner", "n1"):
        plan = PlanDecided(plan=Plan(number=1, trigger="x", workers=0, shares=[], waf=0.0, reward=0.0), source=source)
        if source == "planner":
            assert heard(plan).plan.number == 1
        else:
            with pytest.raises(InvalidInputError, match="n1 can't say what the planner says"):
                heard(plan)
    with pytest.raises(InvalidInputError, match="n1 can't say what the transition says"):
        heard(replace(stop("n1", "gpt"), source="n1"))
    with pytest.raises(InvalidInputError, match=r"belongs on unicron\.v1\.evt\.n1"):
        authenticate("unicron.v1.evt.n2.WorkerExited.gpt", codec.encode(exited("n1", "gpt")))


def test_a_node_can_tell_of_no_order_but_of_faults_of_its_own():
    fault = OrderTaken(order="InjectFault", text="kill-worker", by="ada", node="n1", source="n1")
    assert heard(fault).by == "ada"
    assert heard(replace(fault, order="DrainNode", node="n2", source="registry")).node == "n2"
    for forged in (replace(fault, node="n2"), replace(fault, order="RemoveTask"), replace(fault, task="gpt")):
        with pytest.raises(InvalidInputError, match="n1 takes no orders but for faults of its own"):
            heard(forged)


def test_each_message_type_names_its_sender_and_what_an_agent_sends_its_node():
    kinds = codec.MESSAGES.values()
    assert {kind for kind in kinds if not kind.SENDER} == {DeadLetter, Alert, OrderTaken}
    assert {kind.SENDER for kind in kinds} - {"", AGENT} <= {*ANSWERING}
    assert [kind for kind in kinds if kind.SENDER == AGENT and "node" not in kind.__struct_fields__] == []


@given(GOOD, GOOD)
def test_what_is_made_of_good_tokens_has_six_tokens_and_is_found_by_its_filter(one, two):
    fact, command = subjects.for_message(exited(one, two)), subjects.for_message(stop(one, two))
    assert len(fact.split(".")) == len(command.split(".")) == 6
    assert subjects.matches(subjects.events(WorkerExited), fact)
    assert not subjects.matches(subjects.events(NodeJoined), fact)
    assert subjects.matches([subjects.commands(one)], command)
    assert subjects.matches(subjects.JOURNAL, fact)
    assert subjects.matches(subjects.JOURNAL, command)


@given(BAD)
def test_bad_tokens_are_refused_wherever_they_stand(text):
    for make in (
        lambda: subjects.token(text),
        lambda: subjects.rpc(text),
        lambda: subjects.commands(text),
        lambda: subjects.for_message(exited(text, "gpt")),
        lambda: subjects.for_message(stop(text, "gpt")),
    ):
        with pytest.raises(InvalidInputError, match="use 1 to 64 letters, digits"):
            make()
    if text:  # without a task the node is the key
        with pytest.raises(InvalidInputError, match="key"):
            subjects.for_message(exited("n1", text))


@pytest.mark.parametrize("text", ["", " ", "a.b", "*", ">", "a b", "a\n", "a\r\nPUB x", "é", "٣", "a" * 65, "\x00"])
def test_bad_tokens_by_name(text):
    with pytest.raises(InvalidInputError):
        subjects.token(text)


@pytest.mark.parametrize(
    ("pattern", "subject", "fits"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a", False),
        ("a.>", "a", False),
        ("a.>", "a.b.c", True),
        ("*.b.>", "x.b.c", True),
        ("*.b.>", "x.c.b", False),
        (">", "a", True),
    ],
)
def test_wildcards(pattern, subject, fits):
    assert subjects.matches([pattern], subject) is fits


# --- codec -----------------------------------------------------------------------------------------------------------


def test_messages_between_a_core_and_its_shell_never_reach_the_bus():
    assert not set(LOCAL) & set(codec.MESSAGES.values())
    with pytest.raises(InvalidInputError, match="Started"):
        codec.decode_message(codec.encode(Started(token=1)))


@given(
    st.from_regex(r"[A-Za-z0-9_-]{0,64}", fullmatch=True),
    st.text(),
    st.lists(st.text(max_size=20), max_size=5),
    st.floats(0, 1e11),
    st.integers(0, MOST_NUMBER),
)
def test_messages_survive_the_way_there_and_back(name, text, lines, at, number):
    told = {"stderr": lines, "at": at, "id": text, "exit_code": None, "signal": 9}
    message = WorkerExited(node=name, slot=number, task=name, worker=name, **told)
    assert codec.decode_message(codec.encode(message)) == message


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_a_message_or_an_error_of_ours(data):
    for read in (codec.decode_message, codec.decode_query):
        with contextlib.suppress(InvalidInputError):
            read(data)


@given(st.data())
def test_damaged_messages_are_a_message_or_an_error_of_ours(data):
    whole = bytearray(codec.encode(exited("n1", "gpt")))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = whole[: data.draw(st.integers(0, len(whole)))]
    for damaged in (bytes(whole), bytes(cut)):
        with contextlib.suppress(InvalidInputError):
            codec.decode_message(damaged)


def test_nesting_without_an_end_is_an_error_of_ours():
    with pytest.raises(InvalidInputError):
        codec.decode_message(b"\x81\xa4type" + b"\x91" * 100_000)


@pytest.mark.parametrize(
    ("held", "error"),
    [
        ({"type": "Nonsense"}, "Invalid value 'Nonsense'"),
        ({"node": "n1"}, "missing required field `type`"),
        ({"type": "NodeLeft", "node": "n1"}, "missing required field `incarnation`"),
        ({"type": "NodeLeft", "node": 1, "incarnation": "i"}, r"Expected `str`, got `int` - at `\$.node`"),
        ([1], "Expected `object`, got `array`"),
    ],
)
def test_the_error_names_the_field(held, error):
    with pytest.raises(InvalidInputError, match=error):
        codec.decode_message(msgpack.packb(held))


def test_records_are_decoded_by_their_type():
    status = WorkerStatus(worker="w", task="gpt", slot=1)
    assert codec.decode(codec.encode(status), WorkerStatus) == status
    assert codec.decode_query(codec.encode(GetStatus())) == GetStatus()
    with pytest.raises(InvalidInputError, match="not a valid WorkerStatus"):
        codec.decode(b"\x80", WorkerStatus)


# --- descent ---------------------------------------------------------------------------------------------------------


def test_outcomes_descend_from_their_cause_with_repeatable_and_different_ids():
    cause = NodeJoined(node="n1", incarnation="i", host="h", slots=[], id="c", source="n1")
    outcome = exited("", "gpt")
    first, again = (outcome.descend(cause, 0, "planner", at=5.0) for _ in range(2))
    assert first == again
    assert (first.correlation, first.source, first.at) == ("c", "planner", 5.0)
    others = [
        outcome.descend(cause, 1, "planner", 5.0),
        outcome.descend(cause, 0, "detector", 5.0),
        outcome.descend(first, 0, "planner", 5.0),
        outcome.descend(cause, 0, "planner", 5.0, position=7),
        outcome.descend(cause, 0, "planner", 5.0, position=8),
    ]
    assert len({message.id for message in (first, *others)}) == 6
    assert others[2].correlation == "c"


# --- what is large ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1000, 65_000, 65_536, 5_000_000])
def test_what_is_large_is_compressed_as_documented_and_read_again(size):
    alert = Alert(text="many words " * (size // 11))
    data = codec.encode(alert)
    assert codec.decode_message(data) == alert
    assert len(data) < 70_000
    if size > 65_000:
        assert data[0] == 0xC1
        data = zlib.decompress(data[1:])
    assert msgpack.unpackb(data)["text"] == alert.text


def test_what_is_compressed_and_spoilt_or_boundless_is_refused(monkeypatch):
    data = codec.encode(Alert(text="x" * 100_000))
    for spoilt in (data[:50], data[:20] + b"?" + data[21:], b"\xc1"):
        with pytest.raises(InvalidInputError, match="not a valid message"):
            codec.decode_message(spoilt)
    monkeypatch.setattr(codec, "MOST", 99_000)
    with pytest.raises(InvalidInputError, match="of more than 99000 bytes"):
        codec.decode_message(data)


# --- what fields may hold ---------------------------------------------------------------------------------------------


SPEC = "TaskSpec."
ANY = {
    "IterationFinished.loss": "a task that diverges says so",
    "Plan.reward": "sums what is earned and what transitions cost, so it may be negative",
    "Plan.running_s": "infinite without workers",
    "Plan.transition_s": "a setting",
    "RecordingSwitched.share": "its reader says what is allowed",
    "StragglerDetected.waste": "negative where the ideal is slower",
    "ModelSpec.anchor_mfu": "see TaskSpec",
}
"""Fields without a range, and why; those of a task are for `unicron.checks`, which names all of them at once."""


def fields_without_range(kind, where=""):
    """Yield the names of fields of a type, and of those inside it, whose numbers, texts or lists have no range."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        for each in parts(hint):
            if isinstance(each, type) and issubclass(each, msgspec.Struct):
                yield from fields_without_range(each)
            elif each in {int, float, str} or typing.get_origin(each) is list:
                yield f"{kind.__name__}.{name}"


def parts(hint):
    """Yield the types that a hint is made of; what is annotated is bounded, and only what is in it is looked at."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        inner = typing.get_args(hint)[0]
        if typing.get_origin(inner) is list:
            yield from parts(typing.get_args(inner)[0])
    elif origin in {typing.Union, types.UnionType}:
        for each in typing.get_args(hint):
            yield from parts(each)
    elif origin is not dict:
        yield hint


@pytest.mark.parametrize("kind", [*codec.MESSAGES.values()], ids=[*codec.MESSAGES])
def test_every_field_of_every_message_has_a_range(kind):
    bare = {name for name in fields_without_range(kind) if not name.startswith(SPEC)}
    assert bare <= ANY.keys()


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [
        (WorkerExited, {"iteration": 2**63 - 1}, "<= 1000000000 - at `$.iteration`, which is 9223372036854775807"),
        (WorkerExited, {"microbatches_done": -1}, ">= 0 - at `$.microbatches_done`, which is -1"),
        (WorkerExited, {"worker": "../../etc/passwd"}, "at `$.worker`, which is '../../etc/passwd'"),
        (WorkerExited, {"worker": "gpt-1\n"}, "at `$.worker`, which is 'gpt-1\\n'"),
        (WorkerExited, {"stderr": ["x"] * 10_001}, "of length <= 10000 - at `$.stderr`"),
        (TaskRecovered, {"seconds": math.inf}, "at `$.seconds`, which is inf"),
        (TaskRecovered, {"seconds": math.nan}, "at `$.seconds`, which is nan"),
        (TaskRecovered, {"seconds": -1.0}, "at `$.seconds`, which is -1.0"),
        (IterationFinished, {"epoch": 2**40}, "at `$.epoch`, which is 1099511627776"),
        (Alert, {"at": 1e300}, "at `$.at`, which is 1e+300"),
        (Alert, {"id": "x" * 5000}, "of length <= 4096 - at `$.id`, which is 'xxx"),
    ],
)
def test_what_is_out_of_range_is_refused_with_field_value_and_range(kind, changes, text):
    message = msgspec.structs.replace(sample(kind), **changes)
    with pytest.raises(InvalidInputError) as caught:
        codec.decode_message(codec.encode(message))
    assert text in str(caught.value)
    assert len(str(caught.value)) < 400


def test_what_is_out_of_range_deep_inside_is_named_as_well():
    plan = sample(PlanDecided)
    share = msgspec.structs.replace(plan.plan.shares[0], waf=math.nan)
    spoilt = msgspec.structs.replace(plan, plan=msgspec.structs.replace(plan.plan, shares=[share]))
    with pytest.raises(InvalidInputError, match=r"`\$.plan.shares\[0\].waf`, which is nan"):
        codec.decode_message(codec.encode(spoilt))
    joined = sample(NodeJoined)
    slot = msgspec.structs.replace(joined.slots[0], index=-2)
    with pytest.raises(InvalidInputError, match=r"`\$.slots\[0\].index`, which is -2"):
        codec.decode_message(codec.encode(msgspec.structs.replace(joined, slots=[slot])))
