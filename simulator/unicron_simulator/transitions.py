"""One node of a cluster is lost: how long the transition takes, by cluster size (paper figure 9).

For Unicron the real services and agents' cores play it in virtual time on the bus in memory, with a modelled worker on
each GPU; what they say on the bus is counted. What only GPUs could show, the phases of `parameters.toml`, is added
where it falls: forming communicators, and moving states to a new layout.
"""

import asyncio
import logging
from typing import NamedTuple

import msgspec

from unicron.clock import VirtualClock
from unicron.contracts.base import Message
from unicron.contracts.commands import Command
from unicron.contracts.events import FailureDetected, PlanDecided, Regrouped, TaskRecovered
from unicron.contracts.tasks import TaskSpec
from unicron.costmodel import catalogue, formulas, planning
from unicron.costmodel.planning import Configuration
from unicron.errors import InvalidInputError, UnicronError
from unicron.service.commit import Commit
from unicron_simulator.policies import parameters
from unicron_simulator.policies.parameters import Phases
from unicron_simulator.storms.faults import LosePower
from unicron_simulator.storms.injection import FaultInjector
from unicron_simulator.storms.links import Commits
from unicron_simulator.storms.scene import CALM, FOREVER, Scene
from unicron_simulator.storms.training import Trainer, WorkerDelays
from unicron_simulator.storms.world import START, StormParts, World

SLOTS = 8
BOOT_S = 0.05
"""Between the starts of two agents."""

FIRST_S = 5.0
"""For the planner and the workers to begin."""

LONG_S = 1000.0
"""After which a transition that is not over counts as failed."""


class Transition(NamedTuple):
    """The outcome for a lost node, in virtual seconds.

    Attributes:
        gpus, left: workers before and after.
        detect_s: from the loss to the verdict of the detector.
        plan_s: from there to the plan; on a virtual clock, computing it takes no time.
        regroup_s: from there until all workers of the new plan compute together, `meet_s` and `move_s` included.
        meet_s, move_s: the parts of it that are parameters: communicators and states.
        recompute_s: to compute again what workers that are gone had of the iteration.
        iteration_s: of an iteration before.
        messages, commands: in the journal, from the loss to the end of the transition; commands are among them.
        kilobytes: of all of these.
        writes: values that services wrote meanwhile: commits, and parts of large ones.
        largest_kilobytes: of one value on the bus.
    """

    gpus: int
    left: int
    detect_s: float
    plan_s: float
    regroup_s: float
    meet_s: float
    move_s: float
    recompute_s: float
    iteration_s: float
    messages: int
    commands: int
    kilobytes: float
    writes: int
    largest_kilobytes: float

    @property
    def seconds(self) -> float:
        """From the verdict until all computes anew and nothing is lost any more, as figure 9 counts."""
        return self.plan_s + self.regroup_s + self.recompute_s


def unicron(task: TaskSpec, gpus: int, seed: int = 1) -> Transition:
    """Lose a node of a cluster on which only `task` runs.

    Args:
        task: what is trained; it has a model.
        gpus: of the cluster, eight on each node.
        seed: decides at which moment of an iteration the node is lost.

    Raises:
        InvalidInputError: the task has no model, or it can't run on so many GPUs or on a node less.
        UnicronError: the services did not do what they should.
    """
    play = _Play(task, gpus, seed)
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # services log much, and here it is no news
    try:
        play.clock.run(play.run())
    finally:
        logging.disable(before)
    return play.result()


def restart_s(task: TaskSpec, gpus: int, known: Phases) -> float:
    """Return the seconds of a restart from the last checkpoint on `gpus` GPUs, without any wait for them.

    Each node reads what its GPUs need, once: other ranks of the node find it in memory.
    """
    size = _layout(task, gpus)
    degree = size.configuration.tensor * size.configuration.pipeline
    share = min(1.0, SLOTS / degree)
    read = gpus / SLOTS * share * size.parameters * known.state_bytes
    return known.setup_s + read / known.storage_bandwidth + known.recompute_s


class _Layout(NamedTuple):
    configuration: Configuration
    parameters: float
    iteration_s: float
    node_bandwidth: float


def _layout(task: TaskSpec, gpus: int) -> _Layout:
    """Return how the task runs on the largest feasible size up to `gpus`."""
    if task.model is None:
        raise InvalidInputError(f"task {task.name}: no model; its state has no known size")
    curve = planning.curve(task.model, gpus)
    if not curve.sizes.size:
        raise InvalidInputError(f"task {task.name} can't run on {gpus} GPUs: {planning.why_not(task.model, gpus)}")
    last = len(curve.sizes) - 1
    bandwidth = catalogue.accelerator(task.model.accelerator).node_bandwidth
    return _Layout(curve.configuration(last), formulas.parameters(task.model), float(curve.seconds[last]), bandwidth)


class _Play:
    """One scene: a cluster begins, computes, loses a node, and computes again."""

    def __init__(self, task: TaskSpec, gpus: int, seed: int) -> None:
        before, after, known = _layout(task, gpus), _layout(task, gpus - SLOTS), parameters.phases()
        degree = after.configuration.tensor * after.configuration.pipeline
        self.gpus, self.known = gpus, known
        self.meet_s = known.communicators_s + known.communicator_s * gpus
        self.move_s = known.state_bytes * after.parameters / degree / (after.node_bandwidth / SLOTS)
        self.iteration_s = before.iteration_s
        self.micro_s = before.iteration_s * gpus / task.microbatches
        begun = BOOT_S * gpus / SLOTS + FIRST_S + self.meet_s + self.move_s
        part = (seed * 0.618) % 1.0  # spread evenly over an iteration, whatever seeds are taken
        self.lost_at = begun + (1 + part) * self.iteration_s
        names = [f"node-{number}" for number in range(gpus // SLOTS)]
        self.task = msgspec.structs.replace(task, iterations=FOREVER)
        scene = Scene(
            seed=seed,
            slots=dict.fromkeys(names, SLOTS),
            tasks=[self.task],
            standbys=[],
            weather=CALM,
            faults=[LosePower(at=self.lost_at, node=names[-1], back_s=LONG_S, noticed=True)],
        )
        self.clock = VirtualClock(START)
        self.world = World(scene, self.clock, StormParts())
        pace = WorkerDelays(meet=self.meet_s + self.move_s, microbatch=(self.micro_s, self.micro_s))
        for machine in self.world.machines.values():
            machine.pace = pace
        self.world.memory.buckets["state"] = Commits(self.clock, self._wrote)
        self.writes: list[tuple[float, int]] = []
        self.computing: list[Trainer] = []

    def _wrote(self, service: str, value: bytes, commit: Commit | None) -> None:
        if commit is not None:
            self.world.invariants.committed(service, commit)
        self.writes.append((self.clock.now(), len(value)))

    async def run(self) -> None:
        world = self.world
        await world.begin()
        faults = asyncio.ensure_future(FaultInjector(world).inject_all())
        await asyncio.sleep(self.lost_at - self.clock.elapsed() - 1e-3)
        self.computing = world.trainers()
        while not (self._over() or world.invariants.violation or self.clock.elapsed() > self.lost_at + LONG_S):
            await asyncio.sleep(1.0)
        faults.cancel()
        await world.end()

    def _over(self) -> bool:
        return self._first(TaskRecovered) is not None

    def _first(self, kind: type[Message]) -> int | None:
        """Return the place in the journal of the first message of a kind after the loss."""
        lost_at = START + self.lost_at
        messages = self.world.invariants.messages
        return next((at for at, each in enumerate(messages) if isinstance(each, kind) and each.at >= lost_at), None)

    def result(self) -> Transition:
        """Return what is to be read in the journal."""
        messages, violation = self.world.invariants.messages, self.world.invariants.violation
        detected, planned = self._first(FailureDetected), self._first(PlanDecided)
        recovered = self._first(TaskRecovered)
        if violation or detected is None or planned is None or recovered is None:
            why = violation or f"no end within {LONG_S:g} s"
            raise UnicronError(f"{self.gpus} GPUs: the transition was not made: {why}")
        lost_at, over = START + self.lost_at, messages[recovered].at
        during = [at for at, each in enumerate(messages[: recovered + 1]) if each.at >= lost_at]
        sizes = [len(self.world.memory.journal[at].data) for at in during]
        writes = [size for at, size in self.writes if lost_at <= at <= over]
        reports = [each for at in during if isinstance(each := messages[at], Regrouped)]
        members = {each.worker for each in reports if each.epoch == reports[-1].epoch}
        again = sum(len(worker.core.done) for worker in self.computing if worker.name not in members)
        return Transition(
            gpus=self.gpus,
            left=len(members),
            detect_s=messages[detected].at - lost_at,
            plan_s=messages[planned].at - messages[detected].at,
            regroup_s=over - messages[planned].at,
            meet_s=self.meet_s,
            move_s=self.move_s,
            recompute_s=again * self.micro_s / len(members),
            iteration_s=self.iteration_s,
            messages=len(during),
            commands=sum(isinstance(messages[at], Command) for at in during),
            kilobytes=sum(sizes) / 1000,
            writes=len(writes),
            largest_kilobytes=max(sizes + writes) / 1000,
        )
