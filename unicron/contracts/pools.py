"""Pools of machines: what an operator writes down of one, and what the provisioner shows of it."""

from typing import Annotated

from msgspec import Meta

from unicron.contracts.base import Record, Word
from unicron.contracts.ranges import Count, Few, Label, Moment, Name, Text

MOST_MACHINES = 10_000
"""Machines of one pool."""

PoolName = Annotated[str, Meta(min_length=1, max_length=40, pattern=r"^[A-Za-z0-9][A-Za-z0-9-]*\Z")]
"""Names of machines begin with it, so it is short."""

Machines = Annotated[int, Meta(ge=0, le=MOST_MACHINES)]
"""How many machines."""


class Pool(Record, kw_only=True, frozen=True):
    """A pool, as its rules go.

    Attributes:
        name: of the pool.
        provider: source of its machines: local, docker, command or slurm.
        min: nodes that it has at least, whatever tasks can use.
        max: machines that it has at most.
        spares: nodes that are kept beyond those that tasks can use.
        slots: workers that one of its nodes takes.
        racks: over which its machines are spread, or NVLink domains; empty where the provider knows best.
        replacements: of lost nodes in an hour, at most; what a rack loses at once counts as one.
        join_s: seconds that a machine may take from being asked for to joining.
        idle_s: seconds after which a node without work is given back that is neither needed nor a spare.
        observe: only say what would be done.
    """

    name: PoolName
    provider: Label
    min: Machines = 0
    max: Annotated[int, Meta(ge=1, le=MOST_MACHINES)]
    spares: Machines = 0
    slots: Annotated[int, Meta(ge=1, le=1024)] = 1
    racks: Annotated[list[Label], Few] = []
    replacements: Annotated[int, Meta(ge=1, le=MOST_MACHINES)] = 10
    join_s: Annotated[float, Meta(gt=0, le=86400)] = 600.0
    idle_s: Annotated[float, Meta(gt=0, le=10**7)] = 600.0
    observe: bool = False


class Stage(Word):
    """How far a machine is, in the order of its life."""

    WANTED = "wanted"
    """It is to be asked for."""
    UNKNOWN = "unknown"
    """Nobody knows whether the provider has taken the request: it is looked for."""
    ASKED = "asked"
    """The provider has said yes; it has not joined yet."""
    UP = "up"
    """Its node takes part."""
    DRAINED = "drained"
    """Its node gets no work; another machine has its place."""
    RETIRING = "retiring"
    """It is given back as soon as its node holds no worker."""
    LOST = "lost"
    """Its node was given up; it is given back now, and another one has its place."""
    RELEASING = "releasing"
    """It is to be given back, and the provider has not said yet that it has."""


class MachineView(Record, kw_only=True, frozen=True):
    """A machine of a pool.

    Attributes:
        stage: how far it is.
        node: that it is; empty while it has not joined.
        rack: where it is, or is to be; empty where that is not known.
        reason: for being at this stage.
        since: Unix seconds.
    """

    machine: Name
    stage: Stage
    node: Name = ""
    rack: Label = ""
    reason: Text = ""
    since: Moment = 0.0


class PoolView(Record, kw_only=True, frozen=True):
    """A pool as the provisioner knows it.

    Attributes:
        pool: its rules.
        wanted: nodes that it is to have.
        have: nodes that it has, those that people started in it included.
        asked: machines that are to come.
        spare: nodes that no worker is on.
        going: machines that are to be given back.
        reason: what was decided last, for a person.
        trouble: why its provider can't be used just now; empty where it can.
        machines: all that were asked for and not given back.
    """

    pool: Pool
    wanted: Count = 0
    have: Count = 0
    asked: Count = 0
    spare: Count = 0
    going: Count = 0
    reason: Text = ""
    trouble: Text = ""
    machines: Annotated[list[MachineView], Few] = []


class Verb(Word):
    """The operations of a provider."""

    LIST = "list"
    ASK = "ask"
    REPLACE = "replace"
    RELEASE = "release"
    UNKNOWN = "unknown"


class Errand(Record, kw_only=True, frozen=True):
    """A call that the provisioner's shell makes at the provider of a pool, and reports.

    Attributes:
        number: counts errands; the report gives it again.
        verb: what is asked of the provider.
        machine: that it is about; empty for a list.
        replaces: machine that is given back first, for `REPLACE`.
        instance: which of several that have the id of this machine is given back; empty for all.
        rack: where the machine is to be, empty for anywhere.
        reason: for a person.
    """

    number: Count
    pool: Name
    verb: Verb
    machine: Name = ""
    replaces: Name = ""
    instance: Label = ""
    rack: Label = ""
    reason: Text = ""


class PoolsView(Record, kw_only=True, frozen=True):
    """Answer to `GetPools`.

    Attributes:
        pools: all, in the order of their file.
        errands: that are not done yet, in order.
    """

    pools: Annotated[list[PoolView], Few] = []
    errands: Annotated[list[Errand], Few] = []
