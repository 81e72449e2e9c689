"""Rules: which channels get which incidents, when, and how they escalate. Pure."""

import re
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Annotated
from zoneinfo import ZoneInfo

import msgspec
from msgspec import Meta

from unicron.contracts.failures import FailureStatus
from unicron.contracts.notices import IncidentKind

_CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)")

LONGEST_WAIT_S = 3600.0
MINUTES = 24 * 60

KINDS = tuple(kind for kind in IncidentKind if kind is not IncidentKind.UNKNOWN)
STATUSES = tuple(status for status in FailureStatus if status is not FailureStatus.UNKNOWN)


def _minutes(text: str) -> int:
    found = _CLOCK.fullmatch(text)
    if not found:
        raise ValueError(f"{text!r} is no time of day: write it as 22:00")
    return 60 * int(found[1]) + int(found[2])


class Quiet(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Hours in which a rule's channels are silent; what they would have said is summed up when they are over.

    Attributes:
        begin: time of day, such as "22:00"; in the file `from`.
        end: time of day at which they are over; in the file `to`.
        zone: in which these are meant, such as "Europe/Berlin".
        through: severities that are sent all the same.
    """

    begin: str = msgspec.field(name="from")
    end: str = msgspec.field(name="to")
    zone: str
    through: list[Annotated[int, Meta(ge=1, le=3)]] = []

    def __post_init__(self) -> None:
        if _minutes(self.begin) == _minutes(self.end):
            raise ValueError("`from` and `to` are the same: leave `quiet` out, or give hours that end")
        try:
            ZoneInfo(self.zone)
        except (ValueError, OSError, LookupError) as error:
            raise ValueError(f"there is no time zone {self.zone!r}: write one such as Europe/Berlin or UTC") from error

    def holds(self, severity: int, at: float) -> bool:
        """Return whether something of this severity waits at `at`, in Unix seconds."""
        if severity in self.through:
            return False
        there = datetime.fromtimestamp(at, ZoneInfo(self.zone))
        now, begin, end = 60 * there.hour + there.minute, _minutes(self.begin), _minutes(self.end)
        return begin <= now < end if begin < end else now >= begin or now < end

    def left_s(self, at: float) -> float:
        """Return the seconds from `at`, within these hours, until they are over, also where the clock is set."""
        there = datetime.fromtimestamp(at, ZoneInfo(self.zone))
        end = _minutes(self.end)
        over = there.replace(hour=end // 60, minute=end % 60, second=0, microsecond=0, fold=0)
        if 60 * there.hour + there.minute >= end:
            over += timedelta(days=1)
        return max(1.0, over.timestamp() - at)


class Escalation(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Whom to call where nobody acknowledges an incident, and it is not over.

    Attributes:
        after_min: minutes from when the rule's own channels are to say it.
        channels: that are called then.
    """

    after_min: Annotated[float, Meta(gt=0, le=MINUTES)]
    channels: Annotated[list[str], Meta(min_length=1)]


class Rule(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Selects incidents, and the channels that get them; a field that is left out is no condition.

    Attributes:
        channels: that get them.
        kinds: of incidents.
        severity: of incidents.
        status: of failures, as `unicron rules explain` names them.
        tasks: patterns, such as "gpt-*", of which a task that was hit must match one.
        wait_s: seconds after the first fact, so that what follows from it stands in the same message.
        quiet: when they are silent.
        escalate: whom else to call.
    """

    channels: Annotated[list[str], Meta(min_length=1)]
    kinds: list[str] = []
    severity: list[Annotated[int, Meta(ge=1, le=3)]] = []
    status: list[str] = []
    tasks: list[str] = []
    wait_s: Annotated[float, Meta(ge=0, le=LONGEST_WAIT_S)] = 10.0
    quiet: Quiet | None = None
    escalate: Escalation | None = None

    def __post_init__(self) -> None:
        for what, given, known in (("kind", self.kinds, KINDS), ("status", self.status, STATUSES)):
            if unknown := sorted(set(given) - set(map(str, known))):
                raise ValueError(f"there is no {what} {unknown[0]!r}: use some of {', '.join(known)}")

    def matches(self, kind: str, severity: int, status: str, tasks: list[str]) -> bool:
        """Return whether the rule is about such an incident."""
        return (
            (not self.kinds or kind in self.kinds)
            and (not self.severity or severity in self.severity)
            and (not self.status or status in self.status)
            and (not self.tasks or any(fnmatchcase(task, glob) for task in tasks for glob in self.tasks))
        )

    def holds(self, severity: int, at: float) -> bool:
        """Return whether it is silent about something of this severity at `at`, in Unix seconds."""
        return self.quiet is not None and self.quiet.holds(severity, at)


class Routing(msgspec.Struct, kw_only=True, frozen=True):
    """The core's part of the file.

    Attributes:
        rules: by name, in their order.
        channels: names of all.
        link: what the address of an incident's page begins with; empty for none.
    """

    rules: dict[str, Rule] = {}
    channels: tuple[str, ...] = ()
    link: str = ""
