"""Runs of scripts as tasks of one cluster that is warm, so that each costs no more than its own processes."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from benchmarks.harness.cluster import Scene, task
from unicron.aio import retry_until_available
from unicron.contracts.events import ScriptDrilled
from unicron.contracts.tasks import UNCOUNTED, Healing, ParallelLayout, TaskState

T = TypeVar("T")
POLL_S = 0.03
OWN_CARRIER = re.compile(r"(?:can't be carried to another process as it is:|all ranks begin again:) (.+)")
REFUSAL = re.compile(r"InvalidInputError: .+|\b(?:can't be|is not) healed in place\b.*|.*\bheal: restart\b.*")


async def _answered(call: Callable[[], Awaitable[T]]) -> T:
    """Call until the bus answers: on a machine with much to do it is away now and then."""
    return await retry_until_available(call, "asking the cluster")


async def _drills(scene: Scene, after: int, until: int) -> list[ScriptDrilled]:
    return [fact async for _, fact in scene.client.follow(after, until) if isinstance(fact, ScriptDrilled)]


def _outcome(drill: ScriptDrilled) -> str:
    return drill.problem or (f"unproven: {drill.unproven}" if drill.unproven else "")


@dataclass(frozen=True)
class Ran:
    """One run of a script in place.

    Attributes:
        state: in which its task ended, `hung` where it did not.
        reason: of that.
        logs: of all its processes.
        drills: what came of each drill: what is wrong or unknown, empty where it has proven its point.
        seconds: from its submission to its end.
    """

    state: str
    reason: str = ""
    logs: str = ""
    drills: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether all ranks ended well."""
        return self.state == TaskState.FINISHED

    @property
    def refusal(self) -> str:
        """Why it isn't healed in place, where its task ended for that: what hampers it besides does not excuse it."""
        found = REFUSAL.search(self.reason)
        return found[0] if found else ""

    @property
    def told(self) -> str:
        """What it says of why another process can't take a rank's place."""
        found = OWN_CARRIER.search(self.logs)
        return found[1] if found else next(filter(None, self.drills), "")


async def in_place(scene: Scene, name: str, words: Sequence[str], ranks: int, patience_s: float, **own: Any) -> Ran:
    """Run a script in place on a cluster.

    Args:
        scene: the cluster.
        name: of the task, which is to be new.
        words: the script and its arguments.
        ranks: how many.
        patience_s: after which it hangs.
        own: fields of the task besides.
    """
    fields = {"iterations": UNCOUNTED, "heal": Healing.IN_PLACE, "layout": ParallelLayout(shard=ranks), **own}
    before, began = await _answered(scene.client.tail), time.monotonic()
    await _answered(partial(scene.client.submit, task(name, words, ranks, **fields)))
    state, reason = "hung", ""
    while time.monotonic() < began + patience_s:
        view = await scene.view(name)
        if view.state.ended:
            state, reason = str(view.state), view.reason
            break
        await asyncio.sleep(POLL_S)
    seconds, end = time.monotonic() - began, await _answered(scene.client.tail)
    facts = await _answered(partial(_drills, scene, before, end))
    paths = sorted(scene.cluster.root.glob(f"nodes/*/logs/{name}-*.log"))
    logs = "".join(path.read_text(errors="replace") for path in paths)
    await _answered(partial(scene.client.remove, name))
    return Ran(state, reason, logs, [_outcome(fact) for fact in facts if fact.task == name], seconds)
