"""A storm: the real services in virtual time while seeded faults strike them and the cluster."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b

from unicron.clock import VirtualClock
from unicron_simulator.storms import convergence, story
from unicron_simulator.storms.injection import FaultInjector
from unicron_simulator.storms.scene import Scene, scene
from unicron_simulator.storms.world import START, StormParts, World

BOUND_S = 400.0
"""Virtual seconds after the last fault within which everything must run again."""

STEADY_S = 2.0
"""Virtual seconds for which it must."""

INTACT = StormParts()


@dataclass(frozen=True)
class StormOutcome:
    """How a storm ended.

    Attributes:
        seed: of the storm; the same seed gives the same history, byte for byte.
        violation: the invariant that was broken, in words; empty where all held.
        story: the shrunk history that leads to the violation, one line an event; empty where all held.
        faults: how many faults struck.
        lies: how many lies stand in the journal.
        messages: length of the journal at the end.
        virtual_s: virtual seconds that the storm lasted.
        digest: of the journal.
    """

    seed: int
    violation: str = ""
    story: str = ""
    faults: int = 0
    lies: int = 0
    messages: int = 0
    virtual_s: float = 0.0
    digest: str = ""


def run(
    seed: int,
    parts: StormParts = INTACT,
    *,
    shrink: bool = True,
    lies: bool = False,
    pools: bool = False,
    clocks: bool = False,
    lacks: bool = False,
) -> StormOutcome:
    """Run the storm `seed`, with or without liars, pools, wrong clocks, lacks; shrink the history of a violation."""
    given = scene(seed, lies=lies, pools=pools, clocks=clocks, lacks=lacks)
    world = play(given, parts)
    text = ""
    if world.invariants.violation:
        if shrink:
            given = story.shrunk(given, lambda fewer: play(fewer, parts).invariants.violation)
        text = story.render_story(given, play(given, parts))
    digest = blake2b(digest_size=16)
    for entry in world.memory.journal:
        digest.update(f"{entry.sequence} {entry.subject} ".encode() + entry.data)
    return StormOutcome(
        seed=seed,
        violation=world.invariants.violation,
        story=text,
        faults=len(world.scene.faults),
        lies=len(world.liars.stored),
        messages=len(world.memory.journal),
        virtual_s=world.clock.elapsed(),
        digest=digest.hexdigest(),
    )


def play(given: Scene, parts: StormParts = INTACT) -> World:
    """Play a scene to its end, or to the first violation."""
    clock = VirtualClock(START)
    world = World(given, clock, parts)
    with _quiet():
        clock.run(_play(world))
    return world


async def _play(world: World) -> None:
    script = asyncio.ensure_future(_script(world))
    while not script.done() and not world.invariants.violation:
        await asyncio.wait({script}, timeout=0.25)
    if script.done():
        script.result()
    script.cancel()
    await world.end()


async def _script(world: World) -> None:
    await world.begin()
    await FaultInjector(world).inject_all()
    await _come_to_rest(world)
    if world.liars.stored and not world.invariants.violation:  # what is poisoned shows when it is read again
        await world.restart()
        await _come_to_rest(world)
    world.invariants.all_answered()


async def _come_to_rest(world: World) -> None:
    over = world.clock.elapsed()
    steady, before = 0.0, dict[str, int]()
    while steady < STEADY_S:
        lacking = await convergence.lacking(world)
        now = convergence.progress(world)
        moved = all(now.get(task, 0) > before.get(task, -1) for task in convergence.running(world))
        steady = 0.0 if lacking else steady + (1.0 if moved else 0.0)
        before = now
        if world.clock.elapsed() - over > BOUND_S:
            world.invariants.check(False, f"{BOUND_S:g} s after the last fault: {lacking or 'no task moves on'}")
            return
        await asyncio.sleep(1.0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep what services log out of the way: storms make them log a lot."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
