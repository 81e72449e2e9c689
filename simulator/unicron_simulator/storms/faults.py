"""The faults of a storm."""

from unicron.contracts.base import Record
from unicron.contracts.tasks import TaskSpec

MOODS = ("refuses", "full", "hangs", "forgets", "slow", "twice", "broken")
"""Of a provider: it says no; it has given all; it does not answer, whatever it does; its lists are empty; machines come
late, come twice, or never join."""


class StormFault(Record, tag_field="type", tag=True, kw_only=True, frozen=True):
    """Something that goes wrong, or that a person does, `at` virtual seconds after the start."""

    at: float


class CrashService(StormFault, kw_only=True, frozen=True):
    """A service is killed at one of its next writes and started again `down_s` later.

    Attributes:
        writes: at which one; a half is before it arrives, a whole is after it and before the answer.
    """

    service: str
    writes: float
    down_s: float


class DelayCommands(StormFault, kw_only=True, frozen=True):
    """The transition service is replaced, and what it last ordered arrives late: after a command of its successor.

    So late that the bus no longer knows the ids: as from a process that was suspended for longer than that.
    """

    down_s: float


class Cut(StormFault, kw_only=True, frozen=True):
    """A service or an agent is cut off from the bus for `for_s` seconds.

    Attributes:
        noticed: the server says that the connection of the agent is stale.
    """

    target: str
    for_s: float
    noticed: bool = False


class LosePower(StormFault, kw_only=True, frozen=True):
    """A node is gone at once; it comes back, empty, `back_s` later.

    Attributes:
        noticed: the server sees its connection end.
    """

    node: str
    back_s: float
    noticed: bool


class CrashAgent(StormFault, kw_only=True, frozen=True):
    """An agent is killed, its workers live on; it is started again `back_s` later."""

    node: str
    back_s: float


class LeaveNode(StormFault, kw_only=True, frozen=True):
    """An agent is ordered to end, and does so in order; it is started again `back_s` later.

    Attributes:
        notice_s: how long it may hand over before it does.
    """

    node: str
    back_s: float
    notice_s: float = 0.0


class KillStandby(StormFault, kw_only=True, frozen=True):
    """The warm standby of a node is killed, and each that takes its place for `for_s` seconds."""

    node: str
    for_s: float


class StrikeWorker(StormFault, kw_only=True, frozen=True):
    """A worker is hit.

    Attributes:
        pick: which one of those that live then, modulo their number.
        how: "kill", "stop" or "raise".
        for_s: after that many seconds a stopped one goes on, if it is still there.
    """

    pick: int
    how: str
    for_s: float = 0.0


class KillTask(StormFault, kw_only=True, frozen=True):
    """All workers of a task are killed in one moment.

    Attributes:
        pick: which one of the tasks that have workers then, modulo their number.
    """

    pick: int


class Blackout(StormFault, kw_only=True, frozen=True):
    """All nodes lose power in one moment, and come back `back_s` later, empty.

    Attributes:
        notice_s: seconds before, at which they are ordered to leave; 0: they are not.
    """

    back_s: float
    notice_s: float = 0.0


class Rot(StormFault, kw_only=True, frozen=True):
    """A byte of a saved state is flipped in a node's memory.

    Attributes:
        pick: which one of those that are whole then, modulo their number.
    """

    pick: int


class Flip(StormFault, kw_only=True, frozen=True):
    """A bit of a worker's parameters is flipped, where they are.

    Attributes:
        pick: which one of those that live then, modulo their number.
        infinite: its gradients are infinite from then on.
    """

    pick: int
    infinite: bool = False


class Drain(StormFault, kw_only=True, frozen=True):
    """A user takes a node out of use for `for_s` seconds."""

    node: str
    for_s: float


class Submit(StormFault, kw_only=True, frozen=True):
    """A user launches a task."""

    task: TaskSpec


class Pause(StormFault, kw_only=True, frozen=True):
    """A user pauses a task for `for_s` seconds."""

    task: str
    for_s: float


class Remove(StormFault, kw_only=True, frozen=True):
    """A user removes a task."""

    task: str


class LoseMachine(StormFault, kw_only=True, frozen=True):
    """A machine of a pool goes for good.

    Attributes:
        pick: which one of those that are there then, modulo their number.
        notice_s: seconds before, at which it gets notice; 0: not at all.
    """

    pick: int
    notice_s: float = 0.0


class Mood(StormFault, kw_only=True, frozen=True):
    """The provider of a pool is not what it should be, for `for_s` seconds.

    Attributes:
        how: one of `MOODS`.
    """

    how: str
    for_s: float


class Lies(StormFault, kw_only=True, frozen=True):
    """A liar publishes false messages for `for_s` seconds; one with a node's key does so in the node's name.

    Attributes:
        how: "repeat": the node says again what it has said; "lie": it says that changed; "pose": it, or a stranger,
            says what others have said; "forge": commands with tokens that nobody was given; "claim": it says in its
            own name what is about tasks and workers of others, or such as never were.
        node: whose key it is, or for whom the forged commands are.
        count: of messages.
        back_s: after lies the node is set up anew: it loses power, and comes back so much later.
    """

    how: str
    node: str
    count: int
    for_s: float
    back_s: float


class Lack(StormFault, kw_only=True, frozen=True):
    """A node has none left of something that healing takes, for `for_s` seconds at least.

    Attributes:
        what: "room", "descriptors" or "ports".
    """

    node: str
    what: str
    for_s: float


class SetClock(StormFault, kw_only=True, frozen=True):
    """The clock of a party is set, or found ahead after a sleep.

    Attributes:
        target: a service, a node, or all.
        by_s: seconds; what it was off by before comes on top.
        for_s: after that many seconds it is set back; 0: never.
    """

    target: str
    by_s: float
    for_s: float = 0.0
