"""The subjects of messages: `unicron.v1.<kind>.<node or service>.<Type>.<key>`, built here and nowhere else.

The token after the kind is the node (for control services, the service), so that the rights of an agent can end at its
own node. Kinds: `evt` facts and `cmd` commands (kept in the journal), `tel` telemetry (core NATS, may be lost),
`rpc` queries, `ord` the orders among them, which only operators may give; where a node is asked, `node` comes first.
"""

import re
from collections.abc import Callable, Iterable
from functools import cache

from unicron.contracts.base import LOCAL, Message
from unicron.contracts.commands import Command
from unicron.contracts.events import FailureDetected, IterationFinished, NodeHeartbeat, StepTimed
from unicron.contracts.hardware import GpusSampled
from unicron.contracts.queries import Order, Query
from unicron.contracts.slowdowns import ComputeTimed
from unicron.contracts.stragglers import RecordingSwitched
from unicron.errors import InvalidInputError
from unicron.services import ANSWERING

ROOT = "unicron.v1"
FACTS = f"{ROOT}.evt.>"
"""Every fact, of any sender."""

JOURNAL = (FACTS, f"{ROOT}.cmd.>")
"""Everything that the journal stream keeps."""

PULSES = f"{ROOT}.pulse.*"
"""What services put into the journal to see it come out again. It is no message, and nobody else reads it."""

KEPT = (*JOURNAL, PULSES)
"""Everything that stands in the journal stream."""

ANY = f"{ROOT}.>"
"""Everything of ours."""

STORED = "unicron.stored"
"""Subjects of the server's notices of new journal entries: by the subject of each message, from its kind on."""

JOIN = f"{ROOT}.enrol"
"""Subject on which a machine with a join token asks to become a node."""

TELEMETRY: tuple[type[Message], ...] = (NodeHeartbeat, IterationFinished, StepTimed, ComputeTimed, GpusSampled)
"""Message types that travel as telemetry."""

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}")


def token(text: str, what: str = "name") -> str:
    """Return `text` if it can be one token of a subject.

    Raises:
        InvalidInputError: it is empty, too long, or holds dots, blanks, wildcards or other signs.
    """
    if not _TOKEN.fullmatch(text):
        raise InvalidInputError(f"{what} {text!r}: use 1 to 64 letters, digits, '-' or '_'")
    return text


def for_message(message: Message) -> str:
    """Return the subject on which `message` travels; its source must be filled in."""
    name = type(message).__name__
    key = token(message.key, "key")
    whose = token(message.node, "node") if isinstance(message, Command) else token(message.source, "source")
    return f"{ROOT}.{_kind(type(message))}.{whose}.{name}.{key}"


def sender(subject: str) -> str:
    """Return who is named as the sender in a subject: for commands, the node that they are for."""
    tokens = subject.split(".", 4)
    return tokens[3] if len(tokens) > 3 else subject


def events(*kinds: type[Message]) -> list[str]:
    """Return filters for messages of these types from any source; for commands, to any node."""
    return [f"{ROOT}.{_kind(kind)}.*.{kind.__name__}.*" for kind in kinds]


def _kind(of_type: type[Message]) -> str:
    if issubclass(of_type, Command):
        return "cmd"
    return "tel" if of_type in TELEMETRY else "evt"


def listened(kinds: Iterable[type[Message]]) -> tuple[list[str], list[str]]:
    """Return the filters for the facts among these types, and those for the telemetry; a shell's own have none."""
    found = events(*(kind for kind in kinds if kind not in LOCAL))
    telemetry = set(events(*TELEMETRY))
    return [each for each in found if each not in telemetry], [each for each in found if each in telemetry]


def standby(service: str) -> str:
    """Return the subject on which a service is asked why no instance of it is active."""
    return rpc(f"{service}-standby")


def is_pulse(subject: str) -> bool:
    """Return whether a subject is one of pulses."""
    return subject.startswith(PULSES[:-1])


def pulse(service: str) -> str:
    """Return the subject of a service's pulses."""
    return PULSES.replace("*", service)


def commands(node: str) -> str:
    """Return the filter for all commands to `node`."""
    return f"{ROOT}.cmd.{token(node, 'node')}.>"


def given_up(node: str) -> str:
    """Return the filter for the fact that `node` was given up."""
    return f"{ROOT}.evt.detector.{FailureDetected.__name__}.{token(node, 'node')}"


def registered(node: str) -> str:
    """Return the filter for what the registry says of `node`."""
    return f"{ROOT}.evt.registry.*.{token(node, 'node')}"


def switched() -> str:
    """Return the filter for the facts that say which share of a task's iterations is to be recorded."""
    return f"{ROOT}.evt.straggler.{RecordingSwitched.__name__}.*"


def read_by(node: str) -> list[str]:
    """Return the filters for what the agent of `node` reads of the journal."""
    return [commands(node), given_up(node), registered(node), switched()]


def stored(subject: str) -> str:
    """Return the subject of the server's notices about messages stored on `subject`, a filter of the journal's."""
    return f"{STORED}{subject.removeprefix(ROOT)}"


def matches(patterns: Iterable[str], subject: str) -> bool:
    """Return whether `subject` falls under a filter with NATS wildcards: `*` one token, a last `>` one or more."""
    return matcher(patterns)(subject) is not None


def matcher(patterns: Iterable[str]) -> Callable[[str], object]:
    """Return a test whether a subject falls under a filter, as `matches` does; None if it does not."""
    return _compiled(tuple(patterns)).fullmatch


@cache
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    tokens = {"*": r"[^.]+", ">": r".+"}
    return re.compile(
        "|".join(r"\.".join(tokens.get(each, re.escape(each)) for each in pattern.split(".")) for pattern in patterns)
    )


def papers(node: str) -> str:
    """Return the subject on which a node asks the enroller for what else it needs: certificate and fabric key."""
    return f"{JOIN}.{node}"


def rpc(owner: str) -> str:
    """Return the subject on which the node or service `owner` answers queries."""
    return f"{ROOT}.rpc.{_owner(owner)}"


def orders(owner: str) -> str:
    """Return the subject on which the node or service `owner` takes orders."""
    return f"{ROOT}.ord.{_owner(owner)}"


def _owner(name: str) -> str:
    """Return where `name` answers: nodes do so apart from services, since they are reached in another account."""
    return name if name in ANSWERING else f"node.{token(name, 'owner')}"


def for_query(owner: str, query: Query) -> str:
    """Return the subject on which `owner` is asked `query`."""
    return orders(owner) if isinstance(query, Order) else rpc(owner)
