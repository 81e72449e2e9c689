"""Facts about nodes that come with a join token."""

from typing import ClassVar

from unicron.contracts.base import Message
from unicron.contracts.ranges import Count, Label, Name, Text
from unicron.contracts.sentences import after


class NodeEnrolled(Message, kw_only=True, frozen=True):
    """A node that no one had named before was let in by a join token; its key has a node's rights from now on.

    Attributes:
        pool: that the token is for.
        token: its id.
        public_key: of the node.
        machine: id under which the provisioner asked for its machine, as the node says.
        uses_left: of the token.
    """

    SENDER: ClassVar[str] = "enroller"

    node: Name
    pool: Name
    token: Name
    public_key: Label
    machine: Name = ""
    uses_left: Count = 0

    def __str__(self) -> str:
        return f"{self.node} was let into pool {self.pool} by token {self.token}, which has {self.uses_left} uses left"


class EnrolmentRefused(Message, kw_only=True, frozen=True):
    """A join token did not let somebody in.

    Attributes:
        name: what who asked wants to be called; nobody has proven to be that.
        reason: why, and the cure.
        token: id of the token that was shown.
        machine: as the sender gives it.
    """

    SENDER: ClassVar[str] = "enroller"

    name: Label
    reason: Text
    token: Name = ""
    machine: Name = ""

    def __str__(self) -> str:
        return f"somebody{after(' who calls itself ', self.name)} was not let in: {self.reason}"
