"""The faults of a storm, and the scene that a seed makes: cluster, tasks, weather and faults."""

from random import Random

from unicron.contracts.base import Record
from unicron.contracts.pools import Pool
from unicron.contracts.tasks import ParallelLayout, TaskSpec
from unicron_simulator.storms import domains
from unicron_simulator.storms.invariants import SERVICES
from unicron_simulator.storms.links import Weather

CALM = Weather()
MOODS = ("refuses", "full", "hangs", "forgets", "slow", "twice", "broken")
"""Of a provider: it says no; it has given all; it does not answer, whatever it does; its lists are empty; machines come
late, come twice, or never join."""

BEGIN_S = 8.0
"""Faults strike from then on, virtual seconds after the start."""

FOREVER = 1_000_000
"""Iterations of a task that does not end within a storm."""


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


class Scene(Record, kw_only=True, frozen=True):
    """Everything that decides how a storm goes.

    Attributes:
        slots: of each node.
        tasks: submitted at the start.
        standbys: services of which a second instance waits.
        places: rack and NVLink domain of each node, where they are known.
        pools: of machines that the provisioner has come and go.
    """

    seed: int
    slots: dict[str, int]
    tasks: list[TaskSpec]
    standbys: list[str]
    weather: Weather
    faults: list[StormFault]
    places: dict[str, tuple[str, str]] = {}
    pools: list[Pool] = []


def scene(seed: int, *, lies: bool = False, pools: bool = False) -> Scene:
    """Make the scene of a seed; with `lies` what it is without, and somebody lies; with `pools`, machines come."""
    random = Random(f"scene:{seed}")
    slots = {f"node-{number}": random.randint(1, 3) for number in range(1, random.randint(3, 5) + 1)}
    tasks = [_task(random, f"task-{letter}") for letter in "abc"[: random.randint(1, 3)]]
    faults = [
        _fault(random, random.uniform(BEGIN_S, BEGIN_S + 22), list(slots), tasks) for _ in range(random.randint(3, 9))
    ]
    more = _lies(Random(f"lies:{seed}"), list(slots)) if lies else []
    chance = Random(f"pools:{seed}")
    more += _to_machines(chance) if pools else []
    faults = sorted([*faults, *_to_states(Random(f"states:{seed}")), *more], key=lambda fault: fault.at)
    return Scene(
        seed=seed,
        slots=slots,
        places=domains.locate(seed, slots),
        tasks=domains.confine(seed, tasks),
        standbys=[name for name in SERVICES if random.random() < 0.25],
        weather=_weather(random),
        faults=faults,
        pools=[_pool(chance)] if pools else [],
    )


def _task(random: Random, name: str) -> TaskSpec:
    unit = random.choice([1, 1, 1, 2])
    least, most = unit * random.randint(1, 2), unit * random.randint(2, 4)
    flops = random.uniform(1e12, 3e12)
    shape = Random(f"{random.getstate()[1][:3]}:{name}")  # of its own: scenes stay what they were but for the layouts
    layout = shape.choice([*[ParallelLayout()] * 3, ParallelLayout(tensor=2), ParallelLayout(pipeline=2, shard=2)])
    # the ranks of a replica end together: half of such tasks end soon, so that much happens around that
    soon = shape.randint(2, 9) if layout.replica_workers > 1 and shape.random() < 0.5 else FOREVER
    sizes = range(least, most * layout.replica_workers + 1)
    layouts: dict[int, ParallelLayout] = {}
    for size in sizes if shape.random() < 0.5 else ():  # no two neighbours alike, where that can be
        other = [each for each in _shapes(size) if each != layouts.get(size - unit)]
        layouts[size] = shape.choice(other or _shapes(size))
    stores = shape.random() < 0.5
    return TaskSpec(
        name=name,
        command=["train"],
        weight=round(random.uniform(0.5, 2.0), 2),
        min_workers=least,
        max_workers=most * layout.replica_workers,
        unit=unit,
        microbatches=random.randint(4, 9),
        iterations=min(soon, random.choice([FOREVER, FOREVER, random.randint(8, 30)])),
        throughput={size: flops * size**0.8 for size in range(1, most * layout.replica_workers + 1)},
        layout=layout,
        layouts=layouts,
        checkpoints="/storage" if stores else "",
        checkpoint_s=shape.uniform(1.0, 5.0),
    )


def _shapes(size: int) -> list[ParallelLayout]:
    """Return shapes of which so many workers make whole replicas, small ones."""
    shapes = [ParallelLayout(), ParallelLayout(tensor=2), ParallelLayout(shard=3), ParallelLayout(tensor=2, pipeline=2)]
    return [each for each in shapes if size % each.replica_workers == 0]


def _weather(random: Random) -> Weather:
    if random.random() < 0.3:
        return CALM
    return Weather(
        delay_s=random.choice([0.002, 0.01, 0.05]),
        late=random.choice([0.0, 0.005]),
        lost_calls=random.choice([0.0, 0.02]),
        lost_acks=random.choice([0.0, 0.02, 0.05]),
        doubled=random.choice([0.0, 0.1]),
        lost_telemetry=random.choice([0.0, 0.1]),
    )


def _to_states(random: Random) -> list[StormFault]:
    """Return what strikes states; apart, so that scenes stay what they were but for it."""
    found: list[StormFault] = []
    for _ in range(random.choice([0, 0, 1, 2])):
        at, pick = random.uniform(BEGIN_S, BEGIN_S + 22), random.randint(1, 999)
        rot = [Rot(at=at - random.uniform(0.0, 0.5), pick=random.randint(1, 999)) for _ in range(random.randint(0, 3))]
        found += [*rot, KillTask(at=at, pick=pick)]
    if random.random() < 0.15:
        found.append(Blackout(at=random.uniform(BEGIN_S, BEGIN_S + 22), back_s=random.uniform(0.5, 4.0)))
    for _ in range(random.choice([0, 1, 2])):
        at, pick = random.uniform(BEGIN_S, BEGIN_S + 22), random.randint(1, 999)
        found.append(Flip(at=at, pick=pick, infinite=random.random() < 0.3))
    if random.random() < 0.15:
        at = random.uniform(BEGIN_S, BEGIN_S + 22)
        found.append(Blackout(at=at, back_s=random.uniform(0.5, 4.0), notice_s=10.0))
    return found


def _pool(random: Random) -> Pool:
    least = random.choice([1, 2, 3])
    return Pool(
        name="gpu",
        provider="modelled",
        min=least,
        max=least + random.choice([0, 0, 2]),
        spares=random.choice([0, 1]),
        slots=1,
        replacements=random.choice([2, 4, 100]),
        join_s=15.0,
        idle_s=random.choice([4.0, 30.0]),
    )


def _to_machines(random: Random) -> list[StormFault]:
    """Return what strikes machines of pools, and their provider; apart, so that scenes stay what they were."""
    found: list[StormFault] = [
        LoseMachine(
            at=random.uniform(BEGIN_S, BEGIN_S + 22),
            pick=random.randint(1, 999),
            notice_s=random.choice([0.0, 0.0, 5.0]),
        )
        for _ in range(random.randint(1, 4))
    ]
    found += [
        Mood(at=random.uniform(0.0, BEGIN_S + 22), how=how, for_s=random.uniform(2.0, 15.0))
        for how in random.choices(MOODS, k=random.randint(0, 3))
    ]
    return found


def _lies(random: Random, nodes: list[str]) -> list[StormFault]:
    """Return what liars do; apart, so that scenes stay what they were but for it."""
    return [
        Lies(
            at=random.uniform(BEGIN_S - 4, BEGIN_S + 22),
            how=how,
            node=random.choice(nodes),
            count=random.choice([3, 10, 40, 150]),
            for_s=random.uniform(0.5, 8.0),
            back_s=random.choice([0.3, 2.0, 8.0]),
        )
        for how in [
            *random.choices(["repeat", "lie", "pose", "forge"], [2, 4, 2, 1], k=random.randint(1, 4)),
            *["claim"] * random.randint(1, 2),
        ]
    ]


def _fault(random: Random, at: float, nodes: list[str], tasks: list[TaskSpec]) -> StormFault:
    node, service = random.choice(nodes), random.choice(SERVICES)
    back_s = random.choice([0.3, 0.8, 2.0, 8.0])
    number = random.randint(1, 999)
    kinds: list[StormFault] = [
        *[CrashService(at=at, service=service, writes=random.randint(1, 16) / 2, down_s=back_s)] * 3,
        DelayCommands(at=at, down_s=min(back_s, 2.0)),
        Cut(at=at, target=random.choice([*SERVICES, *nodes]), for_s=back_s + 0.5, noticed=random.random() < 0.5),
        *[LosePower(at=at, node=node, back_s=back_s, noticed=random.random() < 0.7)] * 2,
        CrashAgent(at=at, node=node, back_s=back_s),
        LeaveNode(at=at, node=node, back_s=back_s, notice_s=10.0 * (number % 2)),
        *[StrikeWorker(at=at, pick=number, how=how, for_s=back_s * 2) for how in ("kill", "stop", "raise")],
        Drain(at=at, node=node, for_s=back_s * 2),
        Submit(at=at, task=_task(random, f"task-{number}")),
        Remove(at=at, task=random.choice(tasks).name),
        Pause(at=at, task=random.choice(tasks).name, for_s=back_s * 2),
        # under a name that may be in use, when it is refused, or may have been, when it is another task's from now on
        Submit(at=at, task=_task(random, random.choice(tasks).name)),
    ]
    return random.choice(kinds)
