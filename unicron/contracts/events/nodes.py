"""Facts and telemetry about nodes."""

from typing import Annotated, ClassVar

from unicron.contracts.base import AgentMessage, Message
from unicron.contracts.ranges import Count, Few, Label, Name, Seconds, Text
from unicron.contracts.tasks import Slot, WorkerStatus


class NodeJoined(AgentMessage, kw_only=True, frozen=True):
    """An agent has started, or has come back.

    Attributes:
        incarnation: differs for each start of the agent.
        host: address at which other nodes reach this one.
        rendezvous: host:port of the node's rendezvous, where the ranks of a membership find one another.
        state_server: host:port of the gRPC state server.
        workers: living workers that the agent found and adopted.
        kept: names of the states that lie in its memory: left behind, saved, or copies of what others save.
        rack: nodes of one rack, or behind one switch, fail together; empty where that is not known.
        home: of the machine, since it was started, and the run folder: the same for an agent that is started again
            there, another for a second one of that name; empty where that is not known.
        domain: of NVLink: its nodes reach one another as fast as GPUs of one node do; empty where that is not known.
        machine: id under which the provisioner has asked for its machine; empty where a person has started it.
        pool: that it belongs to; empty for none.
        version: of the agent's program.
    """

    incarnation: Label
    host: Label
    slots: Annotated[list[Slot], Few]
    rendezvous: Label = ""
    state_server: Label = ""
    pid: Count = 0
    workers: Annotated[list[WorkerStatus], Few] = []
    kept: Annotated[list[Label], Few] = []
    rack: Label = ""
    home: Label = ""
    domain: Label = ""
    machine: Name = ""
    pool: Name = ""
    version: Label = ""

    def __str__(self) -> str:
        return f"{self.node} joined with {len(self.slots)} slots, {len(self.workers)} workers alive"


class NodeLeft(AgentMessage, kw_only=True, frozen=True):
    """An agent said goodbye: its workers are stopped and it goes away on purpose.

    Attributes:
        reason: why it does not stay, of what a person has to mend; empty where somebody has ended it.
    """

    incarnation: Label
    reason: Text = ""

    def __str__(self) -> str:
        return f"{self.node} says goodbye" + f": {self.reason}" * bool(self.reason)


class NodeLeaving(AgentMessage, kw_only=True, frozen=True):
    """An agent was notified that its node will go; until it leaves, it hands over what others count on.

    Attributes:
        seconds: after which it leaves in any case.
    """

    incarnation: Label
    seconds: Seconds

    def __str__(self) -> str:
        return f"{self.node} is to go, and hands over what it has for up to {self.seconds:g} s"


class StandbyDied(AgentMessage, kw_only=True, frozen=True):
    """The warm standby of a node has ended, which forks its workers: until there is another, starts wait there.

    Attributes:
        how: it ended, in words that follow its name.
        deaths: how many in a row.
        wait_s: seconds until the next one is started.
        helpless: so many that the node gets no work until one lives.
    """

    how: Text
    deaths: Count
    wait_s: Seconds
    helpless: bool = False

    def __str__(self) -> str:
        row = f", {self.deaths} times in a row" * (self.deaths > 1)
        cure = f"make memory free there, and see `unicron logs standby --node {self.node}`"
        then = f"the next starts {f'in {self.wait_s:g} s' if self.wait_s else 'now'}"
        return f"the warm standby of {self.node} {self.how}{row}: {cure if self.helpless else then}"


class StandbyRevived(AgentMessage, kw_only=True, frozen=True):
    """A node that had lost its warm standby has another, which lives.

    Attributes:
        seconds: for which there was none.
    """

    seconds: Seconds

    def __str__(self) -> str:
        return f"{self.node} has a warm standby again, {self.seconds:.1f} s after the last one's end"


class NodeHeartbeat(AgentMessage, kw_only=True, frozen=True):
    """Sign of life of an agent."""

    incarnation: Label


class NodeAdmitted(Message, kw_only=True, frozen=True):
    """The registry has taken a node in; it may be given work.

    Attributes:
        returned: the same incarnation's predecessor was still held to be up (an agent restart within the grace).
        kept, rack, domain, machine, pool: as in `NodeJoined`.
        heartbeat_s: between heartbeats, where all nodes together would send too many; 0: as the agent likes.
    """

    SENDER: ClassVar[str] = "registry"

    node: Name
    incarnation: Label
    host: Label
    slots: Annotated[list[Slot], Few]
    rendezvous: Label = ""
    state_server: Label = ""
    workers: Annotated[list[WorkerStatus], Few] = []
    returned: bool = False
    kept: Annotated[list[Label], Few] = []
    rack: Label = ""
    heartbeat_s: Seconds = 0.0
    domain: Label = ""
    machine: Name = ""
    pool: Name = ""

    def __str__(self) -> str:
        return f"{self.node} admitted with {len(self.slots)} slots" + " again" * self.returned


class NodeRefused(Message, kw_only=True, frozen=True):
    """The registry did not take a node in: another agent of that name is there, and goes on as before.

    Attributes:
        incarnation: that was refused.
        reason: why, and what a person can do about it.
    """

    SENDER: ClassVar[str] = "registry"

    node: Name
    incarnation: Label
    reason: Text

    def __str__(self) -> str:
        return f"{self.node} was not taken in: {self.reason}"


class NodePaced(Message, kw_only=True, frozen=True):
    """The cluster has so many nodes that this one has to beat more rarely than it was admitted with.

    Attributes:
        incarnation: that was admitted.
        heartbeat_s: between heartbeats.
    """

    SENDER: ClassVar[str] = "registry"

    node: Name
    incarnation: Label
    heartbeat_s: Seconds

    def __str__(self) -> str:
        return f"{self.node} is to beat every {self.heartbeat_s:g} s"


class NodeDrained(Message, kw_only=True, frozen=True):
    """A node is to be given no more work (`drain=True`), or may be used again."""

    SENDER: ClassVar[str] = "registry"

    node: Name
    drain: bool = True

    def __str__(self) -> str:
        return f"{self.node} {'gets no more work' if self.drain else 'is in use again'}"


class NodeGone(Message, kw_only=True, frozen=True):
    """A node said goodbye; the registry no longer counts it."""

    SENDER: ClassVar[str] = "registry"

    node: Name

    def __str__(self) -> str:
        return f"{self.node} is gone"


class NodeSuspected(Message, kw_only=True, frozen=True):
    """A node's connection ended. Where nothing is heard of it within the grace it is given up; if it is, all is well.

    Attributes:
        reason: why the server says that it ended.
        grace_s: seconds from this on in which it may come back.
    """

    SENDER: ClassVar[str] = "detector"

    node: Name
    reason: Text
    grace_s: Seconds

    def __str__(self) -> str:
        return f"{self.node} is suspect, {self.grace_s:g} s from being given up: {self.reason}"
