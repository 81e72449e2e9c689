"""Decodes a message and checks that its sender may send it on this subject."""

from unicron import codec, subjects
from unicron.contracts.base import AGENT, Message
from unicron.contracts.events import OrderTaken
from unicron.contracts.queries import InjectFault
from unicron.errors import InvalidInputError
from unicron.services import ANSWERING


def authenticate(subject: str, data: bytes) -> Message:
    """Return the message that came in on a subject.

    Where users of the bus have keys, the server sees to it that a subject names its sender. So this is where a node's
    key ends: it can't say for another node what happened there, nor for a service what is to be done.

    Args:
        subject: on which it came.
        data: what came.

    Raises:
        InvalidInputError: it is none that can be used; says why.
    """
    message = codec.decode_message(data)
    own = subjects.for_message(message)
    if own != subject:
        raise InvalidInputError(f"it belongs on {own}: source, type or key is not its own")
    sender, node = message.SENDER, getattr(message, "node", "")
    if sender == AGENT and node != message.source:
        raise InvalidInputError(f"{message.source} can't speak for {node}")
    if sender not in {"", AGENT, message.source}:
        raise InvalidInputError(f"{message.source} can't say what the {sender} says")
    if isinstance(message, OrderTaken) and message.source not in ANSWERING:
        own_fault = (InjectFault.__name__, "", message.source)
        if (message.order, message.task, message.node) != own_fault:
            raise InvalidInputError(f"{message.source} takes no orders but for faults of its own, not {message.order}")
    return message
