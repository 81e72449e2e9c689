"""The base of all services' cores: a table from message types to handlers."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from unicron.contracts.answers import Reply
from unicron.contracts.base import Message
from unicron.contracts.events import OrderTaken
from unicron.contracts.queries import Order, Query, SubmitTask
from unicron.errors import InvalidInputError

Handlers = Mapping[type[Message], Callable[[Any], list[Message]]]
FAR = 10_000
"""How far a number that is counted up one by one may be ahead of the last that was heard."""

Answers = Mapping[type[Query], Callable[[Any], tuple[Reply, list[Message]]]]


def gap_problem(what: str, number: int, known: int) -> str | None:
    """Return why `number` can't come after `known`; None where it can, or comes before."""
    return f"{what} {number} can't come after {what} {known}" if number > known + FAR else None


def order_taken(order: Order, text: str) -> OrderTaken:
    """Return the fact that an order was taken.

    Args:
        order: it.
        text: what was answered.
    """
    task = order.spec.name if isinstance(order, SubmitTask) else getattr(order, "task", "")
    node = getattr(order, "node", "")
    return OrderTaken(order=type(order).__name__, text=text, by=order.by, task=task, node=node)


class Core:
    """Decisions of a service: a function of messages. It opens nothing, awaits nothing and reads no clock.

    Attributes:
        state: everything it remembers, in a type that msgspec can encode.
        handlers: what it does about each type of message. Its service listens to these types and to no others.
        answers: what it does about each type of query.
        doubts: returns why a message contradicts the state, None where it does not.
    """

    state: Any
    handlers: Handlers
    answers: Answers = MappingProxyType({})
    doubts: Callable[[Any, Message], str | None] = staticmethod(lambda _, __: None)

    def handle(self, message: Message) -> list[Message]:
        """Take one message in; return what follows from it."""
        handler = self.handlers.get(type(message))
        return handler(message) if handler else []

    def is_credible(self, message: Message) -> bool:  # noqa: ARG002 subclasses use it
        """Return whether others may rely on a piece of telemetry that was not doubted: it is of somebody known."""
        return True

    def find_contradiction(self, message: Message) -> str | None:
        """Return why a message from the bus can't be true, as it contradicts what is known; None where it can.

        Facts come late, twice, and after their node or task has ended: that is no reason. What is doubted becomes a
        dead letter and changes nothing.
        """
        return self.doubts(self.state, message)

    def validate(self) -> list[str]:
        """Return what contradicts itself in the state, in words; simulations ask after each message."""
        return []

    def answer(self, query: Query) -> tuple[Reply, list[Message]]:
        """Return the reply to `query`, and what follows from it; a query that is refused changes nothing."""
        answer = self.answers.get(type(query))
        if answer is None:
            known = ", ".join(kind.__name__ for kind in self.answers) or "no queries; ask the registry or the planner"
            return Reply(error=f"this service does not answer {type(query).__name__}; it answers {known}"), []
        try:
            return answer(query)
        except InvalidInputError as error:
            return Reply(error=str(error)), []
