"""Tracks the lies of a storm, and checks that they have no forbidden effect."""

from unicron import codec, subjects
from unicron.authentication import authenticate
from unicron.contracts.base import Message
from unicron.contracts.commands import Command, DropStates
from unicron.contracts.events import (
    Alert,
    AttemptFailed,
    CommandRefused,
    DeadLetter,
    FailureDetected,
    NodeJoined,
    TaskBroken,
    TaskRemoved,
    TaskStateChanged,
)
from unicron.errors import InvalidInputError

PAYLOAD = 4096
"""Bytes of a message that a dead letter holds."""


class LieTracker:
    """Everything that liars have said.

    Attributes:
        touched: tasks of which a liar's node had a part when it lied: they may go back to an older iteration.
        void: names of lies that nobody may believe: out of range, another's to say, or commands that nobody gave.
        misspoken: nodes in whose name something was said that may be believed.
        parts: of each node the tasks of which it ever got a command.
    """

    def __init__(self) -> None:
        self.touched: set[str] = set()
        self.void: set[str] = set()
        self.misspoken: set[str] = set()
        self.parts: dict[str, set[str]] = {}
        self._by: dict[str, str] = {}
        self._payloads: set[bytes] = set()
        self._liars: set[str] = set()

    def record_lie(self, subject: str, data: bytes, name: str, speaker: str) -> str:
        """Take in what is said; return the node that joins by it, as far as that is to be believed.

        Args:
            subject: on which it is said.
            data: what is said.
            name: its correlation, which all that follows from it has, too.
            speaker: whose key the liar has, or for which node its command is.
        """
        self._liars.add(speaker)
        self._by[name] = speaker
        self._payloads.add(data[:PAYLOAD])
        try:
            message = authenticate(subject, data)
        except InvalidInputError:
            self.void.add(name)
            return ""
        self._payloads.add(codec.encode(message)[:PAYLOAD])
        if isinstance(message, Command):
            self.void.add(name)
        else:
            self.misspoken.add(message.source)
        return message.node if isinstance(message, NodeJoined) else ""

    def problem(self, message: Message) -> str:
        """Return why an honest process can't say this, as far as lies go; empty where it can."""
        if isinstance(message, Command) and (task := getattr(message, "task", "")):
            self.parts.setdefault(message.node, set()).add(task)
        match message:
            case DeadLetter(subject=subject, error=error, payload=payload):
                lied = payload in self._payloads if payload else subjects.sender(subject) in self._liars
                if lied and subject.startswith(subjects.ROOT):
                    return ""
                return f"{message.source} could not use a message on {subject}: {error}"
            case Alert() | CommandRefused():
                return ""
        if speaker := self._by.get(message.correlation):
            hit, node = _hit(message), getattr(message, "node", "")
            if hit and node != speaker and hit not in self.parts.get(speaker, ()):
                return f"{type(message).__name__} of {hit} came of {message.correlation}: {speaker} has no part in it"
        if message.correlation in self.void:
            return f"{message.source} believed {message.correlation}, which nobody may say: {type(message).__name__}"
        return ""


def _hit(message: Message) -> str:
    """Return the task that something is done to which a node's word alone may not do; empty where it is nothing such.

    What a node says of itself may move others' tasks: it has slots then, or none.
    """
    match message:
        case TaskBroken() | AttemptFailed() | TaskRemoved() | DropStates():
            return message.task
        case TaskStateChanged(state=state) if state.ended:
            return message.task
        case FailureDetected(task=task):
            return task
    return ""
