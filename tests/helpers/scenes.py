"""Scenes: the product's own services, agents and workers in virtual time, and a test that plays what happens when.

A scene reads like a test on a real cluster (`helpers.training.RunningCluster`) and takes no time: all that waits is
asleep in virtual time. What must never be in a storm must not be in a scene either, and when a scene is over all that
can run must run again, at the best plan.
"""

import asyncio
import contextlib
import functools
import inspect
import logging

from unicron_simulator.storms import convergence
from unicron_simulator.storms.scene import CALM, FOREVER, Scene
from unicron_simulator.storms.training import Trainer
from unicron_simulator.storms.world import START, StormParts, World

from helpers.observer import ClusterObserver
from unicron.client import Client
from unicron.clock import VirtualClock
from unicron.contracts.events import Regrouped
from unicron.contracts.tasks import TaskSpec
from unicron.errors import BusUnavailableError
from unicron.train.worker.iteration import WorkerCore

PATIENCE_S = 120.0
"""Virtual seconds within which what is waited for must come."""


def task(name="t", **fields):
    """Return a task of three workers at most, which does not end unless it is ordered to."""
    fields = {"max_workers": 3, "microbatches": 6, "iterations": FOREVER, **fields}
    fields.setdefault("throughput", {size: 1e12 * size**0.8 for size in range(1, fields["max_workers"] + 1)})
    return TaskSpec(name=name, command=["train"], **fields)


def scene(nodes=3, slots=1, *, script=Trainer, worker=WorkerCore, **wirings):
    """Make a test of a coroutine function: it is given a `Stage`, and played to its end.

    Args:
        nodes: how many there are; they are called node-1 and so on.
        slots: of each.
        script: that workers run, and all of a worker that is modelled.
        worker: makes the cores of workers.
        wirings: of services, by name, where they are to be others than usual.
    """

    def made(story):
        @functools.wraps(story)
        def test(**given):
            machines = {f"node-{number}": slots for number in range(1, nodes + 1)}
            cluster = Scene(seed=1, slots=machines, tasks=[], standbys=[], weather=CALM, faults=[])
            clock = VirtualClock(START)
            world = World(cluster, clock, StormParts(worker=worker))
            world._wirings |= wirings
            for machine in world.machines.values():
                machine.make_trainer = script
            with _quiet():
                clock.run(_play(Stage(world), story, given))

        signature = inspect.signature(story)
        others = [each for name, each in signature.parameters.items() if name != "stage"]
        test.__signature__ = signature.replace(parameters=others)  # what pytest is to give
        del test.__wrapped__
        return test

    return made


async def _play(stage, story, given):
    await stage.begin()
    try:
        await story(stage, **given)
        await stage.rest()
        stage.check()
    finally:
        await stage.end()


@contextlib.contextmanager
def _quiet():
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


class Stage(ClusterObserver):
    """A cluster in virtual time, a client, and all messages.

    Attributes:
        world: the services, nodes and workers.
        client: a user's.
        iterations: that were reported, of all tasks.
    """

    def __init__(self, world):
        self.world = world
        self.client = Client(world.network.link("test"), "ada")
        self.iterations = []
        self._listening = None

    async def begin(self):
        await self.world.begin()
        self._listening = asyncio.ensure_future(self.listen())
        await self.until(self._all_up)

    async def end(self):
        self._listening.cancel()
        await self.world.end()

    async def _all_up(self):
        return len((await self.status()).nodes) == len(self.world.machines)

    # --- messages -----------------------------------------------------------------------------------------------------

    @property
    def journal(self):
        return self.world.invariants.messages

    def check(self):
        assert not self.world.invariants.violation, self.world.invariants.violation

    async def until(self, condition):
        """Wait until `condition`, a function or a coroutine function, returns something true; return it."""
        deadline = self.now() + PATIENCE_S
        while True:
            found = condition()
            found = await found if inspect.isawaitable(found) else found
            self.check()
            if found:
                return found
            tail = "\n".join(map(str, self.journal[-8:]))
            assert self.now() < deadline, f"not within {PATIENCE_S} s; the journal ends with\n{tail}"
            await asyncio.sleep(0.02)

    def now(self):
        """Return the virtual seconds since the beginning."""
        return self.world.clock.elapsed()

    async def wait(self, seconds):
        """Let virtual time pass."""
        await asyncio.sleep(seconds)
        self.check()

    async def status(self):
        while True:
            with contextlib.suppress(BusUnavailableError):
                return await self.client.status()
            await asyncio.sleep(0.1)

    async def submit(self, spec):
        self.world.specs[spec.name] = spec
        return await self.client.submit(spec)

    async def running(self, spec, iteration=5):
        """Submit a task and wait until it has finished an iteration; return its members."""
        await self.submit(spec)
        await self.reached(spec.name, iteration)
        return (await self.view(spec.name)).members

    async def regrouped(self, name="t", *, above=-1, **fields):
        """Wait until a worker of a task computes in an epoch above that; return the report."""
        newer = lambda: [each for each in self.of(Regrouped, task=name, **fields) if each.epoch > above]  # noqa: E731
        return (await self.until(newer))[0]

    async def rest(self):
        """Wait until all runs that can, and each fault was answered."""
        why = "nothing"

        async def at_rest():
            nonlocal why
            why = await convergence.lacking(self.world)
            return not why

        try:
            await self.until(at_rest)
        except AssertionError as error:
            raise AssertionError(f"{why}: {error}") from None
        self.world.invariants.all_answered()

    # --- what happens ------------------------------------------------------------------------------------------------

    def worker(self, name):
        """Return the living process of a worker."""
        return next(trainer for trainer in self.world.trainers() if trainer.name == name)

    def kill(self, *workers):
        """End workers by SIGKILL, in one moment."""
        for victim in map(self.worker, workers):
            victim.end(None, 9)
            self.world.record_struck(victim)

    def machine(self, node):
        return self.world.machines[node]

    async def lose_power(self, *nodes, noticed=True):
        """End all that runs on nodes, in one moment; `noticed`: the server sees their connections end."""
        for node in nodes:
            await self.machine(node).lose_power()
        for node in nodes if noticed else ():
            self.world.publish_disconnect(node, "Client Closed")

    async def kill_agent(self, node):
        """End the agent of a node by SIGKILL; its workers live on."""
        await self.machine(node).crash_agent()
        self.world.publish_disconnect(node, "Client Closed")

    async def leave(self, *nodes, notice_s=10.0):
        """Order the agents of nodes to end, and wait until they have: they may hand over for that long."""
        await asyncio.gather(*(self.machine(node).leave(notice_s) for node in nodes))

    def boot(self, *nodes):
        """Start the agents of nodes."""
        for node in nodes:
            self.machine(node).boot()
