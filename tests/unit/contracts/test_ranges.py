"""What fields may hold: each has a range, and what is out of it is refused with the field, the value and the range."""

import math
import time
import types
import typing

import msgspec
import pytest
from unicron_cli.samples import sample

from unicron import codec
from unicron.contracts.events import Alert, IterationFinished, NodeJoined, PlanDecided, TaskRecovered, WorkerExited
from unicron.contracts.ranges import AHEAD_S, BEHIND_S
from unicron.errors import InvalidInputError

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


@pytest.mark.parametrize("off_s", [-BEHIND_S - 10, AHEAD_S + 10])
def test_a_time_that_can_t_be_is_refused_where_it_is_known_what_time_it_is(off_s):
    now = time.time()
    data = codec.encode(Alert(text="x", source="n1", at=now + off_s))
    assert codec.decode_message(data).at == now + off_s, "as in a recording"
    with pytest.raises(InvalidInputError, match=r"`\$.at`, which is "):
        codec.decode_message(data, now)
    codec.decode_message(codec.encode(Alert(text="x", source="n1", at=now + off_s / 2)), now)
