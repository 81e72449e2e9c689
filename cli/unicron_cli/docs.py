"""The page of all messages: each subject with its fields, their types and units, and an example."""

import enum
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

import msgspec

from unicron import codec, subjects
from unicron.contracts import (
    answers,
    commands,
    enrolment,
    events,
    failures,
    hardware,
    notices,
    plans,
    pools,
    queries,
    slowdowns,
    states,
    storage,
    tasks,
    timings,
    watchdogs,
)
from unicron.contracts.base import AGENT, Message, Record
from unicron_cli.output import say
from unicron_cli.samples import sample

HEAD = """\
# Events

Made from `unicron/contracts` by `unicron docs`; change the docstrings there, not this page.

Everything that happens in a cluster is a message on NATS, and any program with a NATS and a msgpack library can listen:
`examples/subscriber.py` does, without any import of Unicron.

- The payload is one msgpack map with string keys; `type` names the message. The examples are the same maps as JSON.
  One of 64 KiB or more is compressed: a byte 0xc1, with which no msgpack begins, then the map as zlib packs it.
- Fields are only ever added, with defaults. Ignore those you don't know.
- Facts and commands are kept in the JetStream stream `UNICRON`, in one order for all; telemetry is core NATS, may be
  lost, and is not kept.
- A subject reads `unicron.v1.KIND.SOURCE.TYPE.KEY`. KIND is `evt` for facts, `cmd` for commands (there SOURCE is the
  node they are for), `tel` for telemetry. KEY is the task, or else the node, that the message is about.
- To listen, connect with the key that `unicron credentials subscriber` names, and have replies come to
  `_INBOX.subscriber`. When a fact is stored, the server says so, without its content, on its subject with
  `unicron.stored` for `unicron.v1`: subscribe to `unicron.stored.evt.*.FailureDetected.*` for every failure, to
  `unicron.stored.evt.*.*.gpt` for all about the task gpt. Then ask for it, as for those of the past: a request
  `{"seq": N, "next_by_subj": "unicron.v1.evt.*.FailureDetected.*"}` to `$JS.API.DIRECT.GET.UNICRON` returns the first
  one at position N or later; its header `Nats-Sequence` is its position. Telemetry comes whole: subscribe to
  `unicron.v1.tel.>`. The key may subscribe to nothing else.
- Times are Unix seconds, durations are seconds, rates FLOP/s, counts whole numbers. `unicron/contracts/ranges.py` says
  what each may be; a message with a field out of its range is a dead letter.
"""

COMMON = {
    "name": "The timer, the task or the thing that has it.",
    "task": "Name of the task.",
    "node": "Name of the node.",
    "slot": "Number of the slot on its node, from 0; -1 where there is none.",
    "slots": "The node's places for workers.",
    "worker": "Unique name of the worker process.",
    "pool": "Name of the pool.",
    "machine": "Id of the machine, of which its provider has one only; empty where a person has started it.",
    "incarnation": "Differs for each start of the agent.",
    "host": "Address at which other nodes reach this one.",
    "rendezvous": "host:port of the node's rendezvous, where ranks find one another.",
    "layout": "How the workers share model and data; `replicas` of a task file is ignored.",
    "state_server": "host:port of the agent's gRPC state server.",
    "workers": "Number of workers, or the workers that live on the node.",
    "pid": "Process id on its node.",
    "reason": "One line for a person.",
    "text": "One line for a person.",
    "error": "What was wrong.",
    "epoch": "Number of the membership; -1 before the first.",
    "iteration": "Number of the iteration, from 0; -1 before the first.",
    "iterations": "Number of iterations.",
    "rank": "Rank in the membership.",
    "world_size": "Number of ranks in the membership.",
    "traceback": "Python traceback of the task's own error.",
    "phase": 'What it was doing: "compute" or "reduce".',
    "drain": "False puts the node back into use.",
    "spec": "What the user submitted.",
    "plan": "The plan.",
    "state": "The state it is in now.",
    "members": "Workers that compute, in rank order.",
    "token": "Fencing token of the sender; agents refuse lower ones than they have seen.",
    "command": "Name of the command.",
    "event": "The event that the row is about.",
    "points": "What is believed at each feasible size, ascending.",
    "curve": "The curve of a task.",
    "status": "Everything the registry knows.",
    "nodes": "The nodes.",
    "tasks": "The tasks.",
    "since": "Unix seconds at which it came into this state.",
    "loss": "Mean loss over the global batch.",
    "iteration_s": "Seconds that the last iteration took.",
    "mean_s": "Mean duration of an iteration in seconds, before.",
    "recent_s": "Duration of the latest iterations in seconds.",
    "reward": "Value of the objective, sum of G (equation 3).",
}
"""Descriptions of fields that several types share; the docstring of a type goes first."""

OWNERS = {
    queries.GetPlan: "planner",
    queries.WhatIf: "planner",
    queries.GetCurve: "planner",
    queries.GetStates: "node-1",
    queries.GetLog: "node-1",
    queries.GetSettings: "node-1",
    queries.InjectFault: "node-1",
    queries.SwitchRecording: "straggler",
    queries.GetStraggler: "straggler",
    queries.GetNotifications: "notifier",
    queries.GetPools: "provisioner",
    queries.AcknowledgeIncident: "notifier",
}
"""The owner of a query, where that is not the registry."""


class Field(typing.NamedTuple):
    """A field as the page shows it."""

    name: str
    kind: str
    default: str
    text: str


def render() -> str:
    """Return the page as Markdown."""
    parts = [HEAD, "## In every message\n", _table(_fields(Message))]
    for heading, kinds in _chapters():
        parts.append(f"## {heading}\n")
        parts += [_section(kind) for kind in kinds]
    parts.append("## Queries\n\nOne request, one reply of the type `Reply`, over NATS micro services.\n")
    parts += [_section(kind) for kind in codec.QUERIES]
    parts.append("## Records inside messages\n")
    parts += [_section(kind) for kind in records()]
    return "\n".join(parts)


def records() -> list[type]:
    """Return the records and enumerations that messages hold, in the order of the contracts."""
    found = []
    for module in (
        tasks,
        states,
        storage,
        timings,
        plans,
        failures,
        hardware,
        slowdowns,
        watchdogs,
        notices,
        pools,
        enrolment,
        events,
        answers,
    ):
        for kind in vars(module).values():
            own = inspect.isclass(kind) and kind.__module__ == module.__name__
            if own and issubclass(kind, (Record, enum.Enum)) and not issubclass(kind, (Message, queries.Query)):
                found.append(kind)
    return found


def subject_of(kind: type[Message | queries.Query]) -> str:
    """Return the subject of the example of `kind`."""
    if issubclass(kind, Message):
        return subjects.for_message(sample(kind))
    return subjects.for_query(OWNERS.get(kind, "registry"), sample(kind))


def _chapters() -> Iterator[tuple[str, list[type[Message]]]]:
    """Yield each heading with its messages, in the order of the contracts."""
    facts = sorted(
        (kind for kind in codec.MESSAGES.values() if kind.__module__ != commands.__name__),
        key=lambda kind: (kind.__module__, list(vars(sys.modules[kind.__module__])).index(kind.__name__)),
    )
    for sender in dict.fromkeys(kind.SENDER for kind in facts):
        lead = {AGENT: "agents", "": "anybody"}.get(sender, f"the {sender} service")
        yield f"Facts and telemetry from {lead}", [kind for kind in facts if sender == kind.SENDER]
    yield "Commands", [kind for kind in codec.MESSAGES.values() if kind.__module__ == commands.__name__]


def _section(kind: type) -> str:
    doc = inspect.getdoc(kind) or ""
    lines = [f"### {kind.__name__}\n", _prose(doc), ""]
    if issubclass(kind, enum.Enum):
        values = [f'`"{each}"`' if isinstance(each, str) else f"`{each.value}` ({each.name})" for each in kind]
        return "\n".join([*lines, "One of " + ", ".join(values) + ".\n"])
    fields = _fields(kind, leave_out=Message if issubclass(kind, Message) else None)
    lines += [_table(fields)] if fields else ["No fields of its own.\n"]
    if issubclass(kind, (Message, queries.Query)):
        example = msgspec.json.decode(msgspec.json.encode(sample(kind)))
        text = msgspec.json.format(msgspec.json.encode(example)).decode()
        lines += [f"For example on `{subject_of(kind)}`:\n", "```json", text, "```\n"]
    return "\n".join(lines)


def _prose(doc: str) -> str:
    """Return a docstring without its list of attributes."""
    return doc.partition("Attributes:")[0].strip()


def _fields(kind: type, leave_out: type | None = None) -> list[Field]:
    texts = _documented(kind)
    skipped = set(leave_out.__struct_fields__) if leave_out else set()  # type: ignore[attr-defined]
    hints = typing.get_type_hints(kind)
    found = []
    for field in msgspec.structs.fields(kind):
        if field.name not in skipped:
            default = "required" if field.required else _default(field)
            found.append(Field(field.encode_name, _type_name(hints[field.name]), default, texts.get(field.name, "")))
    return found


def _documented(kind: type) -> dict[str, str]:
    """Return what is said about each field: by the type, by its bases, or in general."""
    found = dict(COMMON)
    for each in reversed(kind.__mro__):
        lines = inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")[2]
        for match in re.finditer(r"^    (\w[\w, ]*): (.*(?:\n     .*)*)", lines, re.MULTILINE):
            text = " ".join(match[2].split())
            if re.match(r"[a-z]+ ", text):  # names and formulas keep their small letters
                text = text[0].upper() + text[1:]
            found |= {name.strip(): text for name in match[1].split(",")}
    return found


def _default(field: Any) -> str:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    return f"`{msgspec.json.encode(value).decode()}`"


def _type_name(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in {types.UnionType, typing.Union}:
        return " or ".join("null" if each is types.NoneType else _type_name(each) for each in inner)
    if origin is list:
        return f"list of {_type_name(inner[0])}"
    if origin is dict:
        return f"map of {_type_name(inner[0])} to {_type_name(inner[1])}"
    plain = {str: "text", int: "whole number", float: "number", bool: "true or false", bytes: "bytes"}
    return plain.get(kind) or f"[{kind.__name__}](#{kind.__name__.lower()})"


def _table(fields: list[Field]) -> str:
    rows = ["| field | type | default | |", "|---|---|---|---|"]
    rows += [f"| `{field.name}` | {field.kind} | {field.default} | {field.text} |" for field in fields]
    return "\n".join(rows) + "\n"


def docs() -> None:
    """Print all messages, with subject, fields and units, and how to listen, as Markdown."""
    say(render(), nl=False)
