"""What liars have said in a storm, and what must not come of it."""

from unicron import codec, subjects
from unicron.contracts.base import Message
from unicron.contracts.commands import Command
from unicron.contracts.events import Alert, CommandRefused, DeadLetter, NodeJoined
from unicron.errors import InvalidInputError
from unicron.said import received

PAYLOAD = 4096
"""Bytes of a message that a dead letter holds."""


class Hearsay:
    """Everything that liars have said.

    Attributes:
        touched: tasks of which a liar's node had a part when it lied: they may go back to an older iteration.
        void: names of lies that nobody may believe: out of range, another's to say, or commands that nobody gave.
        misspoken: nodes in whose name something was said that may be believed.
    """

    def __init__(self) -> None:
        self.touched: set[str] = set()
        self.void: set[str] = set()
        self.misspoken: set[str] = set()
        self._said: set[bytes] = set()
        self._liars: set[str] = set()

    def take(self, subject: str, data: bytes, name: str, speaker: str, now: float) -> str:
        """Take in what is said; return the node that joins by it, as far as that is to be believed.

        Args:
            subject: on which it is said.
            data: what is said.
            name: its correlation, which all that follows from it has, too.
            speaker: whose key the liar has, or for which node its command is.
            now: Unix seconds.
        """
        self._liars.add(speaker)
        self._said.add(data[:PAYLOAD])
        try:
            message = received(subject, data, now)
        except InvalidInputError:
            self.void.add(name)
            return ""
        self._said.add(codec.encode(message)[:PAYLOAD])
        if isinstance(message, Command):
            self.void.add(name)
        else:
            self.misspoken.add(message.source)
        return message.node if isinstance(message, NodeJoined) else ""

    def problem(self, message: Message) -> str:
        """Return why an honest process can't say this, as far as lies go; empty where it can."""
        match message:
            case DeadLetter(subject=subject, error=error, payload=payload):
                lied = payload in self._said if payload else subjects.sender(subject) in self._liars
                if lied and subject.startswith(subjects.ROOT):
                    return ""
                return f"{message.source} could not use a message on {subject}: {error}"
            case Alert() | CommandRefused():
                return ""
        if message.correlation in self.void:
            return f"{message.source} believed {message.correlation}, which nobody may say: {type(message).__name__}"
        return ""
