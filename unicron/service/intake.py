"""Decodes and checks a service's messages; reports those that can't be used."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from unicron import subjects
from unicron.authentication import authenticate
from unicron.clock import Clock
from unicron.contracts.answers import Reply
from unicron.contracts.base import Message, TelemetryDropped
from unicron.contracts.events import Alert, DeadLetter
from unicron.contracts.queries import Query
from unicron.errors import InvalidInputError
from unicron.rate_limits import LETTERS, TELEMETRY, Limit, RateLimiter, more_text
from unicron.service.timers import Timer

log = logging.getLogger(__name__)

NONE = Limit(each=0, overall=0, period_s=LETTERS.period_s)
"""For what is only counted."""


@dataclass
class Input:
    """One thing to take in.

    Attributes:
        message: what the core gets; its id is unique.
        sequence: its position in the journal, 0 where it did not come from there.
        subject: on which it came, empty where it came from no one else.
        says: what goes out in place of what the core would have said: that the message can't be used, or what the
            service itself has to say.
        silent: the message can't be used, and so many of its sender can't that they are only counted.
        query, reply: a request, and where its answer goes.
        timer: the timer that fired, so that one replaced or cancelled meanwhile does not.
        answer: to `query`, once it is known.
        said: what followed from it, as it goes out.
        believed: whether it is of somebody known, where it is telemetry.
        stamp: Unix seconds at which the sender says that it made the message, by a clock of its own; 0: it says none.
        taken: Unix seconds at which the core first got it; a successor that gets it again sets the same timers.
    """

    message: Message
    sequence: int = 0
    subject: str = ""
    says: list[Message] = field(default_factory=list)
    silent: bool = False
    query: Query | None = None
    reply: "asyncio.Future[Reply] | None" = None
    timer: Timer | None = None
    stamp: float = 0.0
    answer: Reply | None = field(default=None, init=False)
    said: list[Message] = field(default_factory=list, init=False)
    believed: bool = field(default=True, init=False)
    taken: float = field(default=0.0, init=False)

    @property
    def sound(self) -> bool:
        """Whether the message could be used, and others may rely on it."""
        return self.believed and not self.says and not self.silent


class Intake:
    """Reads messages for the service `name`, and keeps floods from it.

    Args:
        name: of the service.
        clock: what the time is.
        fresh_id: makes ids for what has none.

    Attributes:
        dropped: pieces of telemetry that were not looked at, since too much waited.
    """

    def __init__(self, name: str, clock: Clock, fresh_id: Callable[[], str]) -> None:
        self._name, self._clock, self._fresh_id = name, clock, fresh_id
        self._letters, self._alerts, self._telemetry = (
            RateLimiter(LETTERS),
            RateLimiter(LETTERS),
            RateLimiter(TELEMETRY),
        )
        self._unread, self._reported = RateLimiter(NONE), 0
        self._since = self._began = 0.0
        self._old = 0
        self.dropped = 0

    def begin(self, since: float, now: float, tail: int) -> None:
        """Take what comes from now on for new, and what the journal holds up to `tail` for no older than `since`."""
        self._since, self._began, self._old = since, now, tail

    def move(self, seconds: float) -> None:
        """Move what is remembered with the clock."""
        self._since, self._began = self._since + seconds, self._began + seconds

    def read(self, subject: str, data: bytes, sequence: int = 0) -> Input:
        """Return what came in on `subject`: the message, or a dead letter where it can't be used."""
        try:
            message = authenticate(subject, data)
        except InvalidInputError as error:
            return self.dead_letter(subject, data, str(error), sequence)
        stamp, own_id = message.at, message.id or self._fresh_id()
        at = self._heard(stamp, sequence) if sequence else stamp or self._clock.now()
        return Input(msgspec.structs.replace(message, id=own_id, at=at), sequence, subject, stamp=stamp)

    def _heard(self, stamp: float, sequence: int) -> float:
        """Return when an entry of the journal was heard of, by the clock here: of no other is it known to be right.

        One that was there when we began is as old as its sender says, within what can be: the order of the journal.
        """
        if sequence > self._old:
            return self._clock.now()
        self._since = min(max(stamp, self._since), self._began)
        return self._since

    def dead_letter(self, subject: str, data: bytes, error: str, sequence: int = 0) -> Input:
        """Return a dead letter about what came in on `subject`."""
        item = Input(self._own(), sequence)
        self.admit_dead_letter(item, DeadLetter(subject=subject, error=error, payload=data[:4096]))
        return item

    def alert(self, text: str) -> Input:
        """Return what the service itself has to say."""
        return Input(self._own(), says=[Alert(text=text)])

    def admit_dead_letter(self, item: Input, letter: DeadLetter) -> None:
        """Let a dead letter go out for an input, unless there are too many of its sender."""
        if self._letters.admit(subjects.sender(letter.subject), self._clock.now()):
            log.warning("%s: dead letter on %s: %s", self._name, letter.subject, letter.error)
            item.says = dead_letter_messages(letter)
        else:
            item.silent = True

    def admits_telemetry(self, subject: str) -> bool:
        """Return whether to look at one more piece of telemetry of its sender; one who floods drowns no other."""
        return self._telemetry.admit(subjects.sender(subject), self._clock.now())

    def drop_telemetry(self) -> None:
        """Count a piece of telemetry that is not looked at, since too much waits."""
        self.dropped += 1
        self._unread.admit(self._name, self._clock.now())

    def admits_alert(self, cause: Message) -> bool:
        """Return whether to pass on one more alert about what its sender said."""
        return self._alerts.admit(cause.source, self._clock.now())

    def held_back(self) -> list[Input]:
        """Return what sums up dead letters, alerts and telemetry that were only counted, or not even looked at."""
        floods = {"dead letters": self._letters, "alerts": self._alerts, "pieces of telemetry": self._telemetry}
        found, now = [], self._clock.now()
        for what, flood in floods.items():
            for sender, count in flood.held_back(now).items():
                error = f"{more_text(count)}: {what} of {sender} that the {self._name} has only counted"
                log.warning(error)
                letter = DeadLetter(subject=f"{subjects.ROOT}.*.{sender}.>", error=error)
                found.append(Input(self._own(), says=dead_letter_messages(letter)))
        for count in self._unread.held_back(now).values():
            text = f"the {self._name} can't keep up: it has dropped {count:,} pieces of telemetry"
            log.warning(text)
            found.append(self.alert(text))
        if self._reported < self.dropped:
            self._reported = self.dropped
            found.append(Input(TelemetryDropped(id=self._fresh_id(), at=self._clock.now(), source=self._name)))
        return found

    def _own(self) -> Message:
        """Return a cause of the service's own making."""
        return Message(id=self._fresh_id(), at=self._clock.now(), source=self._name)


def dead_letter_messages(letter: DeadLetter) -> list[Message]:
    """Return what goes out about a message that can't be used."""
    return [letter, Alert(text=f"a message on {letter.subject} could not be used: {letter.error}")]
