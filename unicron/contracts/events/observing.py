"""Facts of a cluster that only observes: the orders that it did not give."""

from typing import Annotated, ClassVar

from unicron.contracts.base import Message
from unicron.contracts.ranges import Count, Few, Name, Text


class ObserveOnlySwitched(Message, kw_only=True, frozen=True):
    """From now on the cluster only says what it would do by itself, or it does it again.

    Attributes:
        on: the former.
    """

    SENDER: ClassVar[str] = "transition"

    on: bool = True

    def __str__(self) -> str:
        if self.on:
            return "observe only: the cluster obeys its users, and only says what it would do by itself"
        return "no longer observe only: the cluster heals by itself, and does now what it had only said"


class OrdersWithheld(Message, kw_only=True, frozen=True):
    """The orders that the cluster withholds because it only observes. A user gives them: `unicron task resume`.

    Attributes:
        task, node: what it is about; one of them is empty.
        orders: what would have been ordered, in words and in order; none where that is not wanted any more.
        more: orders that are not listed.
    """

    SENDER: ClassVar[str] = "transition"

    task: Name = ""
    node: Name = ""
    orders: Annotated[list[Text], Few] = []
    more: Count = 0

    def __str__(self) -> str:
        if not self.orders:
            return "observe only: nothing is withheld any more"
        return (
            f"observe only: would have ordered: {'; '.join(self.orders)}{f'; and {self.more} more' * bool(self.more)}"
        )
