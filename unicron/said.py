"""What came in on a subject: a message that belongs there, from who may say such a thing."""

from unicron import codec, subjects
from unicron.contracts.base import Message
from unicron.contracts.commands import Command
from unicron.contracts.events import (
    AttemptFailed,
    CheckpointFailed,
    CheckpointFound,
    CheckpointOrdered,
    CheckpointStored,
    CommandRefused,
    FailureDetected,
    NodeAdmitted,
    NodeDrained,
    NodeGone,
    NodeHeartbeat,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodePaced,
    NodeRefused,
    NodeSuspected,
    OrderTaken,
    PartStored,
    PlanDecided,
    StateCopied,
    StateRejected,
    StatesFound,
    TaskBroken,
    TaskPaused,
    TaskRecovered,
    TaskRemoved,
    TaskRewound,
    TaskStateChanged,
    TaskSubmitted,
    WorkerFact,
)
from unicron.contracts.hardware import FaultLogged, GpusSampled
from unicron.contracts.notices import (
    IncidentAcknowledged,
    NotificationDecided,
    NotificationFailed,
    NotificationSent,
)
from unicron.contracts.queries import InjectFault
from unicron.contracts.slowdowns import ComputeTimed, SlowdownDetected, SlowdownEnded
from unicron.contracts.stragglers import RecordingSwitched, StragglerDetected
from unicron.errors import InvalidInputError
from unicron.services import SERVICES

OF_NODES: tuple[type[Message], ...] = (
    *WorkerFact.__subclasses__(),
    NodeJoined,
    NodeLeft,
    NodeLeaving,
    NodeHeartbeat,
    FaultLogged,
    GpusSampled,
    ComputeTimed,
    StateRejected,
    StateCopied,
    StatesFound,
    PartStored,
    CheckpointStored,
    CheckpointFailed,
    CheckpointFound,
    CommandRefused,
)
"""Message types that an agent says of its own node, and of no other."""

OF_SERVICES: dict[type[Message], str] = {
    **dict.fromkeys((NodeAdmitted, NodeRefused, NodePaced, NodeDrained, NodeGone), "registry"),
    **dict.fromkeys((TaskSubmitted, TaskPaused, TaskRemoved, CheckpointOrdered, TaskRewound), "registry"),
    **dict.fromkeys((NodeSuspected, FailureDetected, TaskBroken, SlowdownDetected, SlowdownEnded), "detector"),
    PlanDecided: "planner",
    **dict.fromkeys((TaskStateChanged, AttemptFailed, TaskRecovered), "transition"),
    **dict.fromkeys(Command.__subclasses__(), "transition"),
    **dict.fromkeys((RecordingSwitched, StragglerDetected), "straggler"),
    **dict.fromkeys((NotificationDecided, NotificationSent, NotificationFailed, IncidentAcknowledged), "notifier"),
}
"""Message types that one service says, and nobody else; the rest, `OrderTaken`, `DeadLetter` and `Alert`, anybody
may say."""


def received(subject: str, data: bytes, now: float | None = None) -> Message:
    """Return the message that came in on a subject.

    Where users of the bus have keys, the server sees to it that a subject names its sender. So this is where a node's
    key ends: it can't say for another node what happened there, nor for a service what is to be done.

    Args:
        subject: on which it came.
        data: what came.
        now: Unix seconds, where the time of the message is to be held against them.

    Raises:
        InvalidInputError: it is none that can be used; says why.
    """
    message = codec.decode_message(data, now)
    own = subjects.of(message)
    if own != subject:
        raise InvalidInputError(f"it belongs on {own}: source, type or key is not its own")
    kind, node = type(message), getattr(message, "node", "")
    if kind in OF_NODES and node != message.source:
        raise InvalidInputError(f"{message.source} can't speak for {node}")
    if (speaker := OF_SERVICES.get(kind, message.source)) != message.source:
        raise InvalidInputError(f"{message.source} can't say what the {speaker} says")
    if isinstance(message, OrderTaken) and message.source not in SERVICES:
        own_fault = (InjectFault.__name__, "", message.source)
        if (message.order, message.task, message.node) != own_fault:
            raise InvalidInputError(f"{message.source} takes no orders but for faults of its own, not {message.order}")
    return message
