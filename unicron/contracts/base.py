"""The fields that every message has, and how one message descends from another."""

from enum import StrEnum
from hashlib import blake2b
from typing import Annotated, ClassVar, Literal, Self

import msgspec

from unicron.contracts.ranges import Label, Moment, Name, Text


class Record(msgspec.Struct, kw_only=True, frozen=True):
    """A value inside messages. Fields are only ever added, with defaults."""


class Word(StrEnum):
    """A closed set of words that travels as text; what a newer sender says beyond it is read as `UNKNOWN`.

    Every set of words has that member, as "unknown".
    """

    @classmethod
    def _missing_(cls, value: object) -> "Word | None":
        return cls("unknown") if isinstance(value, str) and value != "unknown" else None


AGENT = "agent"
"""As `Message.SENDER`: the agent of the node that the message is about."""


class Message(Record, tag_field="type", tag=True, kw_only=True, frozen=True):
    """A fact, a command or a piece of telemetry; as text, it is a sentence for people.

    Cores leave these four fields blank; the service shell fills them in with `descend`.

    Attributes:
        id: derived from the content of the chain, never random on a retry.
        at: Unix seconds at which the source made the message.
        source: name of the node or service that sent it.
        correlation: id of the first fact of the chain this message belongs to.
        SENDER: an agent or a service, which alone may send it; empty: anybody.
    """

    SENDER: ClassVar[str] = ""

    id: Label = ""
    at: Moment = 0.0
    source: Label = ""
    correlation: Label = ""

    def __str__(self) -> str:
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name not in Message.__struct_fields__}
        return " ".join(f"{name}={value}" for name, value in values.items() if value not in ("", [], None))

    @property
    def key(self) -> str:
        """Last token of the subject: the task, or else the node, that the message is about."""
        return str(getattr(self, "task", "") or getattr(self, "node", "") or self.source or "-")

    def descend(self, cause: "Message", index: int, source: str, at: float, position: int = 0) -> Self:
        """Return this message as the `index`-th outcome of `cause`, with a repeatable id.

        Args:
            cause: of it; its sender is free to give the same id to several.
            index: among all outcomes.
            source: the sender.
            at: Unix seconds.
            position: of the cause in the journal, 0 where it does not stand there.
        """
        digest = blake2b(f"{cause.id}:{source}:{index}:{position}".encode(), digest_size=8).hexdigest()
        return msgspec.structs.replace(self, id=digest, at=at, source=source, correlation=cause.correlation or cause.id)


class AgentMessage(Message, kw_only=True, frozen=True):
    """Base of what only the agent of a node may send: about itself, its node, or what runs there."""

    SENDER: ClassVar[str] = AGENT

    node: Name


class SetTimer(Message, kw_only=True, frozen=True):
    """A core asks its shell for a `TimerFired` with the same key after `after_s` seconds.

    A second one with the same key replaces the first. Relative, so that clock skew between machines can't matter.
    """

    name: str
    after_s: float


class CancelTimer(Message, kw_only=True, frozen=True):
    """A core no longer wants the timer `name`."""

    name: str


class TimerFired(Message, kw_only=True, frozen=True):
    """The shell's answer to `SetTimer`."""

    name: str


class Started(Message, kw_only=True, frozen=True):
    """The shell became the active instance of its core, with its state restored.

    Attributes:
        token: fencing token of this instance's lease; it only grows.
    """

    token: int


class BusReconnected(Message, kw_only=True, frozen=True):
    """The shell's bus connection was down, or its process stood still, for `down_s` seconds: silence means nothing."""

    down_s: float


class ConnectionLost(Message, kw_only=True, frozen=True):
    """The NATS server saw a node's connection end; the shell made this of the server's own advisory.

    Attributes:
        boot: which start of its agent had that connection; the names of its incarnations begin with it.
    """

    node: str
    boot: str
    reason: str = ""


class TelemetryDropped(Message, kw_only=True, frozen=True):
    """The shell could not keep up with telemetry and dropped some: a silent sender may have sent something."""


class Delivered(Message, kw_only=True, frozen=True):
    """The shell has delivered a notice.

    Attributes:
        notice: its id.
        attempts: that this took.
    """

    notice: str
    attempts: int = 1


class GivenUp(Message, kw_only=True, frozen=True):
    """The shell has given up delivering a notice; the receiver does not take it, or can't be reached.

    Attributes:
        notice: its id.
        reason: why, for a person.
    """

    notice: str
    reason: str


class Probed(Message, kw_only=True, frozen=True):
    """The shell wants to know whether its core still takes messages in; nothing follows."""


class MachineReport(Record, kw_only=True, frozen=True):
    """A machine, as its provider lists it.

    Attributes:
        machine: id under which it was asked for.
        state: "coming", "running" or "ended"; only an ended one is certain never to join.
        node: name of the node that it is or will be, where the provider knows it.
        instance: the provider's own name for it, which distinguishes two under one id.
        reason: why it has ended, or does not come, for a person.
    """

    machine: Annotated[Name, msgspec.Meta(min_length=1)]
    state: Literal["coming", "running", "ended"]
    node: Name = ""
    instance: Label = ""
    reason: Text = ""


class MachinesListed(Message, kw_only=True, frozen=True):
    """The shell has asked a provider for all machines of a pool.

    Attributes:
        errand: number of the errand that it was sent on.
        machines: all there are.
        problem: why they could not be had, and the cure; empty where they could.
    """

    pool: str
    errand: int
    machines: list[MachineReport] = []
    problem: str = ""


class Answer(Word):
    """The result of a call to a provider."""

    DONE = "done"
    REFUSED = "refused"
    """It has done nothing."""
    QUOTA = "quota"
    """It has done nothing, since it has given all machines that it may."""
    UNKNOWN = "unknown"
    """Nobody knows what it has done."""


class ProviderAnswered(Message, kw_only=True, frozen=True):
    """The shell has asked a provider for a machine, or has given one back.

    Attributes:
        errand: number of the errand that it was sent on.
        reason: for a person, where it is not done.
    """

    pool: str
    errand: int
    answer: Answer
    reason: str = ""


LOCAL = (
    SetTimer,
    CancelTimer,
    TimerFired,
    Started,
    BusReconnected,
    ConnectionLost,
    TelemetryDropped,
    Delivered,
    GivenUp,
    Probed,
    MachinesListed,
    ProviderAnswered,
)
"""Messages between a core and its own shell; they never reach the bus."""
