"""The state of the provisioner."""

from typing import Annotated

import msgspec

from unicron.contracts.pools import Errand, Stage, Verb
from unicron.contracts.ranges import Count, Few, Label, Many, Moment, Name, Text

MOST_RELEASED = 1000
"""Ids of machines that were given back and are kept in mind: one may come late."""


class Machine(msgspec.Struct, kw_only=True):
    """A machine that was asked for.

    Attributes:
        stage: how far it is.
        node: that it is; empty while it has not joined.
        rack: where it is to be.
        replaces: machine, or node, whose place it takes.
        reason: for being at this stage.
        asked, since: Unix seconds at which it was first asked for, and at which this stage began.
        taken: Unix seconds at which its provider last said yes.
        after: Unix seconds before which it is not given back, as its provider has refused that.
    """

    pool: Name
    stage: Stage
    node: Name = ""
    rack: Label = ""
    replaces: Name = ""
    reason: Text = ""
    asked: Moment = 0.0
    since: Moment = 0.0
    taken: Moment = 0.0
    after: Moment = 0.0

    def go_to(self, stage: Stage, reason: str, now: float) -> None:
        """Enter another stage."""
        self.stage, self.reason, self.since = stage, reason, now


class Node(msgspec.Struct, kw_only=True):
    """A node that has joined.

    Attributes:
        machine: that it says it is; empty where a person has started it.
        slots: how many it has.
        up: it was admitted, and has neither left nor been given up since.
        drained: it gets no work.
        quiet: Unix seconds since which it is drained, or has no worker; 0 while it has some.
    """

    pool: Name = ""
    machine: Name = ""
    rack: Label = ""
    slots: Count = 0
    up: bool = True
    drained: bool = False
    quiet: Moment = 0.0


class Task(msgspec.Struct, kw_only=True):
    """A task that has not ended.

    Attributes:
        most: workers that it can use.
        paused: a user took its slots off it.
        planned, computing: nodes that the plan in force gives it, and on which its workers were last known.
    """

    most: Count = 0
    paused: bool = False
    planned: Annotated[list[Name], Many] = []
    computing: Annotated[list[Name], Many] = []


class Loss(msgspec.Struct, kw_only=True):
    """The cause of a loss of nodes at one time; it counts once, however many there were.

    Attributes:
        rack: that they were in, empty for one node of no known rack.
        at: Unix seconds.
        spent: a replacement was asked for, so it counts.
    """

    rack: Label = ""
    at: Moment = 0.0
    spent: bool = False


class Owed(msgspec.Struct, kw_only=True):
    """A node that is to be replaced.

    Attributes:
        replaces: its machine, or the node where it has none.
        loss: key of the `Loss` by which it went.
        reason: why it is to be replaced.
    """

    replaces: Name
    loss: Label
    reason: Text


class PoolRun(msgspec.Struct, kw_only=True):
    """How a pool stands with its provider.

    Attributes:
        observe: it only says what it would do.
        errand: what the shell does for it now; one thing at a time.
        refusals: how often it was refused in a row, or a machine did not come.
        again: Unix seconds before which no machine is asked for.
        troubles: calls in a row that did not come to an end, but for such as do.
        failing: what the last of them asked.
        retry: Unix seconds before which nothing is asked of the provider.
        trouble: why not.
        listed: Unix seconds at which its machines were last listed.
        look: they are to be listed as soon as can be.
        losses: of the last hour, by the id of the first fact of each.
        owed: nodes to be replaced, for which no machine was asked yet.
        said: what was said last about a delay, a refusal or a plan, so that it is said once.
        reason: what was decided last.
    """

    observe: bool = False
    errand: Errand | None = None
    refusals: Count = 0
    again: Moment = 0.0
    troubles: Count = 0
    failing: Verb = Verb.UNKNOWN
    retry: Moment = 0.0
    trouble: Text = ""
    listed: Moment = 0.0
    look: bool = False
    losses: dict[str, Loss] = {}
    owed: Annotated[list[Owed], Few] = []
    said: Text = ""
    reason: Text = ""


class State(msgspec.Struct, kw_only=True):
    """The state of the core.

    Attributes:
        clock: Unix seconds of the shell's own clock, as last heard.
        started: Unix seconds at which this instance has become the active one.
        behind: a fact from before that was read since the last look, so there may be more.
        current: the journal was read to where it ended then; nothing is decided before that.
        number: of the last errand.
        made: how many ids there were.
        machines, nodes, tasks, pools: by id or name.
        released: ids of the machines that were given back last, oldest first.
        doubles: nodes that say to be a machine that another node is: by node, the machine.
        double_instances: what providers call such second machines, by machine.
    """

    clock: Moment = 0.0
    started: Moment = 0.0
    behind: bool = False
    current: bool = False
    number: Count = 0
    made: Count = 0
    machines: dict[str, Machine] = {}
    nodes: dict[str, Node] = {}
    tasks: dict[str, Task] = {}
    pools: dict[str, PoolRun] = {}
    released: Annotated[list[Name], Few] = []
    doubles: dict[str, str] = {}
    double_instances: dict[str, str] = {}

    def busy(self) -> set[str]:
        """Return the nodes that have work, or are to have some."""
        return {node for task in self.tasks.values() for node in (*task.planned, *task.computing)}

    def serves(self, name: str) -> bool:
        """Return whether a node counts as one that its pool has."""
        node = self.nodes.get(name)
        if node is None or not node.up or node.drained or name in self.doubles:
            return False
        if not node.machine or (node.pool in self.pools and self.pools[node.pool].observe):
            return True
        machine = self.machines.get(node.machine)
        return machine is not None and machine.stage is Stage.UP and machine.node == name

    def serving(self, pool: str) -> list[str]:
        """Return the nodes that a pool has."""
        return [name for name, node in self.nodes.items() if node.pool == pool and self.serves(name)]

    def of(self, pool: str, *stages: Stage) -> dict[str, Machine]:
        """Return the machines of a pool at these stages."""
        return {id_: each for id_, each in self.machines.items() if each.pool == pool and each.stage in stages}

    def expected(self, pool: str) -> int:
        """Return how many machines of a pool are to join."""
        return len(self.of(pool, Stage.WANTED, Stage.UNKNOWN, Stage.ASKED))

    def doubtful(self, pool: str) -> int:
        """Return how many machines of a pool are not waited for any more, and may still join."""
        return sum(not each.node for each in self.of(pool, Stage.RELEASING).values())

    def coming(self, pool: str) -> int:
        """Return how many machines of a pool may still join; no others are asked for in their place."""
        return self.expected(pool) + self.doubtful(pool)

    def node_of(self, id_: str) -> Node | None:
        """Return the node that a machine is; None where it has not joined, or another machine has that name now."""
        machine = self.machines.get(id_)
        node = self.nodes.get(machine.node) if machine else None
        return node if node and node.machine == id_ else None

    def note_quiet(self, now: float) -> None:
        """Note since when which nodes have no work."""
        busy = self.busy()
        for name, node in self.nodes.items():
            node.quiet = 0.0 if name in busy else node.quiet or now

    def forget(self, machine: str) -> None:
        """Drop a machine that is no more; it may come late all the same."""
        self.machines.pop(machine, None)
        self.double_instances.pop(machine, None)
        self.doubles = {node: each for node, each in self.doubles.items() if each != machine}
        self.released = [*(each for each in self.released if each != machine), machine][-MOST_RELEASED:]
