"""Notifications of operators: incidents, notices of them by channel, and facts of the notifier."""

from typing import Annotated, ClassVar

from unicron.contracts.base import Message, Record, Word
from unicron.contracts.ranges import Amount, Count, Few, Label, Moment, Text


class IncidentKind(Word):
    """The kinds of incidents, worst first."""

    TASK_FAILED = "task_failed"
    """A task has ended without being done; nothing starts it again."""
    NODE_LOST = "node_lost"
    """A node is given up."""
    FAILURE = "failure"
    """A process, a collective or a device failed, and its task is healed in place."""
    SLOW = "slow"
    """A task's iterations take longer than they did, or than they could."""
    ALERT = "alert"
    """Something that a person should look at; nothing heals it."""
    DEAD_LETTER = "dead_letter"
    """A message could not be used."""
    NOTIFIER = "notifier"
    """The notifier can't reach somebody."""
    UNKNOWN = "unknown"


class Phase(Word):
    """Why a notice goes out."""

    OPENED = "opened"
    UPDATED = "updated"
    """It got worse, or more is known."""
    ACKNOWLEDGED = "acknowledged"
    """Somebody sees to it."""
    ESCALATED = "escalated"
    """Nobody has acknowledged it in time."""
    OVER = "over"
    SUMMARY = "summary"
    """Of what was held back."""
    TEST = "test"
    """Nothing happened; somebody tries a channel."""
    UNKNOWN = "unknown"


class Notice(Record, kw_only=True, frozen=True):
    """The message that one channel delivers.

    Attributes:
        id: of this delivery; a repeated one has it again.
        channel: that says it.
        incident: that it is about; the same for all notices of one cause.
        chain: of that incident, as `unicron events --chain ID` takes it.
        kind: of the incident, as it is now.
        label: its kind in the first notice; it does not change any more.
        severity: 1 (a node or a task is lost) to 3.
        first_severity: its severity in the first notice.
        title: what happened, one line.
        lines: what is known about it, for a person.
        tasks: whom it hit.
        nodes: whom it hit.
        workers: how many processes it hit, 0 where that is not known.
        began: Unix seconds.
        decided: Unix seconds at which it was decided that this is said.
        ended: Unix seconds, 0 while it is not over.
        lost_worker_s: seconds of workers that it has cost so far, about.
        by: name of the person that has acknowledged it.
        link: to its page in the console, empty where there is none.
    """

    id: Label
    channel: Label
    phase: Phase
    incident: Label
    chain: Label
    kind: IncidentKind
    label: IncidentKind
    severity: Count
    first_severity: Count
    title: Text
    lines: Annotated[list[Text], Few] = []
    tasks: Annotated[list[Label], Few] = []
    nodes: Annotated[list[Label], Few] = []
    workers: Count = 0
    began: Moment = 0.0
    decided: Moment = 0.0
    ended: Moment = 0.0
    lost_worker_s: Amount = 0.0
    by: Text = ""
    link: Text = ""


class IncidentView(Record, kw_only=True, frozen=True):
    """An incident as the notifier knows it.

    Attributes:
        id: what `unicron notify ack` takes.
        chain: of it.
        kind: what sort of thing it is.
        severity: 1 (a node or a task is lost) to 3.
        title: what happened, one line.
        tasks: whom it hit.
        nodes: whom it hit.
        began: Unix seconds.
        ended: Unix seconds, 0 while it is not over.
        by: name of the person that has acknowledged it, empty for nobody.
        told: channels that have delivered it, or are delivering it.
        held: channels that deliver it later, in a summary.
    """

    id: Label
    chain: Label
    kind: IncidentKind
    severity: Count
    title: Text
    tasks: Annotated[list[Label], Few] = []
    nodes: Annotated[list[Label], Few] = []
    began: Moment = 0.0
    ended: Moment = 0.0
    by: Text = ""
    told: Annotated[list[Label], Few] = []
    held: Annotated[list[Label], Few] = []


class ChannelView(Record, kw_only=True, frozen=True):
    """A channel as the notifier knows it.

    Attributes:
        name: in its file.
        waiting: notices that are not delivered yet.
        broken: why the last one was given up; empty since one was delivered.
    """

    name: Label
    waiting: Count = 0
    broken: Text = ""


class NotificationsView(Record, kw_only=True, frozen=True):
    """Answer to `GetNotifications`.

    Attributes:
        incidents: the latest, those that are not over first.
        channels: all of its file.
        pending: what is being delivered.
    """

    incidents: Annotated[list[IncidentView], Few] = []
    channels: Annotated[list[ChannelView], Few] = []
    pending: Annotated[list[Notice], Few] = []


# --- from the notifier -----------------------------------------------------------------------------------------------


class NotificationDecided(Message, kw_only=True, frozen=True):
    """Channels are to say something of an incident; what each made of it follows.

    Attributes:
        incident: what it is about.
        phase: why.
        channels: that say it.
        text: its title.
    """

    SENDER: ClassVar[str] = "notifier"

    incident: Label
    phase: Phase
    channels: Annotated[list[Label], Few]
    text: Text

    def __str__(self) -> str:
        return f"{', '.join(self.channels)} {'say' if len(self.channels) > 1 else 'says'} ({self.phase}): {self.text}"


class NotificationSent(Message, kw_only=True, frozen=True):
    """A channel has taken a notice.

    Attributes:
        incident: what it is about.
        channel: that took it.
        delivery: id of the notice, as it went out.
        attempts: that this took.
    """

    SENDER: ClassVar[str] = "notifier"

    incident: Label
    channel: Label
    delivery: Label
    attempts: Count

    def __str__(self) -> str:
        attempts = f", after {self.attempts} attempts" if self.attempts > 1 else ""
        return f"{self.channel} has taken {self.delivery}{attempts}"


class NotificationFailed(Message, kw_only=True, frozen=True):
    """A notice was given up; an `Alert` follows where the channel did not fail before.

    Attributes:
        incident: what it is about.
        channel: that did not take it.
        delivery: id of the notice.
    """

    SENDER: ClassVar[str] = "notifier"

    incident: Label
    channel: Label
    delivery: Label
    reason: Text

    def __str__(self) -> str:
        return f"{self.channel} has not taken {self.delivery}: {self.reason}"


class IncidentAcknowledged(Message, kw_only=True, frozen=True):
    """Somebody sees to an incident, and nobody else is called.

    Attributes:
        incident: which.
        by: name of the person.
    """

    SENDER: ClassVar[str] = "notifier"

    incident: Label
    by: Text

    def __str__(self) -> str:
        return f"{self.by} sees to {self.incident}"
