"""Facts about machines: what the provisioner asks its providers for, gets, and gives back."""

from typing import ClassVar

from unicron.contracts.base import Message
from unicron.contracts.ranges import Count, Label, Name, Seconds, Text
from unicron.contracts.sentences import after

PLANNED = "would be "


class MachineAsked(Message, kw_only=True, frozen=True):
    """A machine is asked for; it has this id until it is given back, however often the provider must be asked.

    Attributes:
        machine: its id, which the provider labels it with, and which its agent gives when it joins.
        reason: why it is wanted.
        replaces: id of the machine that it takes the place of, or the name of that node; empty for none.
        rack: where it is to be, empty for anywhere.
        planned: nobody was asked, since the pool only says what it would do.
    """

    SENDER: ClassVar[str] = "provisioner"

    pool: Name
    machine: Name
    reason: Text
    replaces: Name = ""
    rack: Label = ""
    planned: bool = False

    def __str__(self) -> str:
        what = f"a machine for pool {self.pool} {PLANNED * self.planned}asked for"
        return f"{what}{after(' as ', '' if self.planned else self.machine)}: {self.reason}"


class MachineRefused(Message, kw_only=True, frozen=True):
    """A provider does not give a machine now.

    Attributes:
        quota: it has given all that it may; else something is wrong with it, or with what it was asked for.
        again_s: seconds after which it is asked again.
    """

    SENDER: ClassVar[str] = "provisioner"

    pool: Name
    machine: Name
    reason: Text
    quota: bool = False
    again_s: Seconds = 0.0

    def __str__(self) -> str:
        what = "is out of quota" if self.quota else "was refused"
        return f"{self.machine} of pool {self.pool} {what}, asked again in {self.again_s:g} s: {self.reason}"


class MachineDelivered(Message, kw_only=True, frozen=True):
    """A machine that was asked for has joined, as a node.

    Attributes:
        seconds: since it was first asked for.
        replaces: as in `MachineAsked`.
    """

    SENDER: ClassVar[str] = "provisioner"

    pool: Name
    machine: Name
    node: Name
    seconds: Seconds = 0.0
    replaces: Name = ""

    def __str__(self) -> str:
        return f"{self.node} joined pool {self.pool} {self.seconds:.3g} s after it was asked for"


class MachineRetired(Message, kw_only=True, frozen=True):
    """A node gets no more work, and its machine is given back as soon as it holds none; the registry drains it.

    Attributes:
        node: that it is; empty where it has not joined.
        planned: nothing happens, since the pool only says what it would do.
    """

    SENDER: ClassVar[str] = "provisioner"

    pool: Name
    machine: Name
    node: Name
    reason: Text
    planned: bool = False

    def __str__(self) -> str:
        what = f"{self.node or self.machine} of pool {self.pool}"
        return f"{what} {PLANNED if self.planned else 'is '}given back: {self.reason}"


class MachineReleased(Message, kw_only=True, frozen=True):
    """A machine was given back: its provider has it no more.

    Attributes:
        node: that it was; empty where it never joined.
    """

    SENDER: ClassVar[str] = "provisioner"

    pool: Name
    machine: Name
    reason: Text
    node: Name = ""

    def __str__(self) -> str:
        return f"{self.node or self.machine} of pool {self.pool} was given back: {self.reason}"


class ReplacementDelayed(Message, kw_only=True, frozen=True):
    """A pool has fewer nodes than it wants, and no machine is asked for yet.

    Attributes:
        missing: how many.
        again_s: seconds after which one is asked for.
    """

    SENDER: ClassVar[str] = "provisioner"

    pool: Name
    reason: Text
    missing: Count = 0
    again_s: Seconds = 0.0

    def __str__(self) -> str:
        return f"pool {self.pool} lacks {self.missing}, and asks in {self.again_s:.3g} s: {self.reason}"
