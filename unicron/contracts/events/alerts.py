"""Facts that any sender may publish, and reports of what could not be carried out."""

from typing import ClassVar

from unicron.contracts.base import AgentMessage, Message
from unicron.contracts.failures import Cure
from unicron.contracts.ranges import Label, Name, Number, Text, Who
from unicron.contracts.sentences import after
from unicron.contracts.watchdogs import AlertKind


class CommandRefused(AgentMessage, kw_only=True, frozen=True):
    """An agent did not carry out a command, and why.

    Attributes:
        token: that the command carried; -1: an older agent does not say.
    """

    command: Label
    reason: Text
    task: Name = ""
    worker: Name = ""
    token: Number = -1

    def __str__(self) -> str:
        return f"{self.node} refused {self.command}{after(' of ', self.worker)}: {self.reason}"


class AttemptFailed(Message, kw_only=True, frozen=True):
    """A cure did not work; the detector climbs the ladder.

    Attributes:
        action: what was tried.
    """

    SENDER: ClassVar[str] = "transition"

    task: Name
    action: Cure
    reason: Text
    node: Name = ""
    slot: Number = -1
    worker: Name = ""

    def __str__(self) -> str:
        return f"{self.action} of {' '.join(filter(None, (self.worker or self.task, self.node)))} failed: {self.reason}"


class DeadLetter(Message, kw_only=True, frozen=True):
    """A message that could not be used; it was put aside and the service went on.

    Attributes:
        subject: where it came in.
        error: what was wrong with it.
        payload: its first 4 KiB.
    """

    subject: Label
    error: Text
    payload: bytes = b""

    def __str__(self) -> str:
        return f"on {self.subject}: {self.error} ({len(self.payload)} bytes put aside)"


class OrderTaken(Message, kw_only=True, frozen=True):
    """A service or an agent accepted an order; its consequences are in the same chain. Refused ones are not recorded.

    Attributes:
        order: its type.
        text: what was answered, for a person.
        by: the giver's name, unchecked; empty where none was given.
        task, node: what it is about, where that is one of them.
    """

    order: Label
    text: Text
    by: Who = ""
    task: Name = ""
    node: Name = ""

    def __str__(self) -> str:
        return f"{self.by or 'somebody'} ordered {self.order}: {self.text}"


class Alert(Message, kw_only=True, frozen=True):
    """Something a person should look at.

    Attributes:
        kind: the watchdog that it comes from.
        over: what was to be looked at is over.
    """

    text: Text
    node: Name = ""
    task: Name = ""
    kind: AlertKind = AlertKind.OTHER
    over: bool = False

    def __str__(self) -> str:
        return str(self.text)
