"""The scene of a storm, drawn from a seed: cluster, tasks, weather and faults."""

from random import Random

from unicron.contracts.base import Record
from unicron.contracts.pools import Pool
from unicron.contracts.tasks import ParallelLayout, TaskSpec
from unicron_simulator.storms import clocks as wrong_clocks
from unicron_simulator.storms import domains, faults, resources
from unicron_simulator.storms.faults import StormFault
from unicron_simulator.storms.invariants import SERVICES
from unicron_simulator.storms.links import Weather

CALM = Weather()

BEGIN_S = 8.0
"""Faults strike from then on, virtual seconds after the start."""

FOREVER = 1_000_000
"""Iterations of a task that does not end within a storm."""


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


def scene(seed: int, *, lies: bool = False, pools: bool = False, clocks: bool = False, lacks: bool = False) -> Scene:
    """Make the scene of a seed; with `lies` what it is without, and somebody lies; with `pools`, machines come.

    With `clocks`, those of parties are wrong; with `lacks`, nodes have too little of what healing takes.
    """
    random = Random(f"scene:{seed}")
    slots = {f"node-{number}": random.randint(1, 3) for number in range(1, random.randint(3, 5) + 1)}
    tasks = [_task(random, f"task-{letter}") for letter in "abc"[: random.randint(1, 3)]]
    drawn = [
        _fault(random, random.uniform(BEGIN_S, BEGIN_S + 22), list(slots), tasks) for _ in range(random.randint(3, 9))
    ]
    more = _lies(Random(f"lies:{seed}"), list(slots)) if lies else []
    chance = Random(f"pools:{seed}")
    more += _to_machines(chance) if pools else []
    parties = [*SERVICES, *slots]
    more += wrong_clocks.faults_of(Random(f"clocks:{seed}"), parties, BEGIN_S) if clocks else []
    more += resources.faults_of(Random(f"lacks:{seed}"), list(slots), BEGIN_S) if lacks else []
    more += _to_standbys(Random(f"standbys:{seed}"), list(slots))
    drawn = sorted([*drawn, *_to_states(Random(f"states:{seed}")), *more], key=lambda fault: fault.at)
    return Scene(
        seed=seed,
        slots=slots,
        places=domains.locate(seed, slots),
        tasks=domains.confine(seed, tasks),
        standbys=[name for name in SERVICES if random.random() < 0.25],
        weather=_weather(random),
        faults=drawn,
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
        rot = [
            faults.Rot(at=at - random.uniform(0.0, 0.5), pick=random.randint(1, 999))
            for _ in range(random.randint(0, 3))
        ]
        found += [*rot, faults.KillTask(at=at, pick=pick)]
    if random.random() < 0.15:
        found.append(faults.Blackout(at=random.uniform(BEGIN_S, BEGIN_S + 22), back_s=random.uniform(0.5, 4.0)))
    for _ in range(random.choice([0, 1, 2])):
        at, pick = random.uniform(BEGIN_S, BEGIN_S + 22), random.randint(1, 999)
        found.append(faults.Flip(at=at, pick=pick, infinite=random.random() < 0.3))
    if random.random() < 0.15:
        at = random.uniform(BEGIN_S, BEGIN_S + 22)
        found.append(faults.Blackout(at=at, back_s=random.uniform(0.5, 4.0), notice_s=10.0))
    return found


def _to_standbys(random: Random, nodes: list[str]) -> list[StormFault]:
    """Return what strikes what forks workers; apart, so that scenes stay what they were but for it."""
    return [
        faults.KillStandby(
            at=random.uniform(BEGIN_S, BEGIN_S + 22), node=random.choice(nodes), for_s=random.choice([0, 0, 10, 60])
        )
        for _ in range(random.choice([0, 1, 3]))
    ]


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
        faults.LoseMachine(
            at=random.uniform(BEGIN_S, BEGIN_S + 22),
            pick=random.randint(1, 999),
            notice_s=random.choice([0.0, 0.0, 5.0]),
        )
        for _ in range(random.randint(1, 4))
    ]
    found += [
        faults.Mood(at=random.uniform(0.0, BEGIN_S + 22), how=how, for_s=random.uniform(2.0, 15.0))
        for how in random.choices(faults.MOODS, k=random.randint(0, 3))
    ]
    return found


def _lies(random: Random, nodes: list[str]) -> list[StormFault]:
    """Return what liars do; apart, so that scenes stay what they were but for it."""
    return [
        faults.Lies(
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
        *[faults.CrashService(at=at, service=service, writes=random.randint(1, 16) / 2, down_s=back_s)] * 3,
        faults.DelayCommands(at=at, down_s=min(back_s, 2.0)),
        faults.Cut(at=at, target=random.choice([*SERVICES, *nodes]), for_s=back_s + 0.5, noticed=random.random() < 0.5),
        *[faults.LosePower(at=at, node=node, back_s=back_s, noticed=random.random() < 0.7)] * 2,
        faults.CrashAgent(at=at, node=node, back_s=back_s),
        faults.LeaveNode(at=at, node=node, back_s=back_s, notice_s=10.0 * (number % 2)),
        *[faults.StrikeWorker(at=at, pick=number, how=how, for_s=back_s * 2) for how in ("kill", "stop", "raise")],
        faults.Drain(at=at, node=node, for_s=back_s * 2),
        faults.Submit(at=at, task=_task(random, f"task-{number}")),
        faults.Remove(at=at, task=random.choice(tasks).name),
        faults.Pause(at=at, task=random.choice(tasks).name, for_s=back_s * 2),
        # under a name that may be in use, when it is refused, or may have been, when it is another task's from now on
        faults.Submit(at=at, task=_task(random, random.choice(tasks).name)),
    ]
    return random.choice(kinds)
