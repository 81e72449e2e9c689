"""Checks the workers ten times a second: which don't answer, are busy between iterations, or make no progress."""

from collections.abc import Collection, Mapping

import msgspec

from unicron.contracts import time_limits
from unicron.contracts.base import Message
from unicron.contracts.events import WorkerStalled
from unicron.contracts.worker import Ping
from unicron_agent.effects import Effect, SendToWorker, TakeStacks
from unicron_agent.stimuli import Tick
from unicron_agent.workers.workers import LocalWorker, StallLimits

PING_S = 0.2
"""How long a worker may be quiet before it is pinged."""

QUIET_S = time_limits.ANSWER_S
"""A living worker has answered a ping by then; one that is quiet for longer may be stopped."""


class Watch:
    """Watches the workers of a node.

    A worker whose processes all sleep in the middle of a microbatch, while others compute, waits for something that
    may never come, such as a lock or a dead helper process. It is reported after three microbatches, `asleep_s` at
    least. But it may wait for storage. So it is not reported while several workers of its task sleep, which then wait
    for something that they share; and once a task has slept for so long, its limit is twice as long.

    Args:
        node: its name.
        limits: how long workers may be silent.
    """

    def __init__(self, node: str, limits: StallLimits) -> None:
        self._node, self._limits = node, limits
        self._patience: dict[str, float] = {}
        self._slept: dict[str, tuple[str, float]] = {}

    def tick(self, workers: Mapping[str, LocalWorker], tick: Tick, now: float) -> list[Message | Effect]:
        """Ping the quiet workers, and report the ones that have stalled."""
        out: list[Message | Effect] = []
        for worker in workers.values():
            if worker.is_late(now):
                worker.record_cpu_use(tick.asleep.get(worker.worker), now)
        self._learn_patience(workers, now)
        asleep = [worker.task for worker in workers.values() if worker.asleep]
        for name, worker in workers.items():
            if worker.pid and now - worker.heard_at > PING_S:
                out.append(SendToWorker(name, Ping()))
            out += worker.check_away(self._node, self._limits, now)
            patience = self._patience.get(worker.task, 0.0)
            may_sleep_s = self._limits.hang_s
            if asleep.count(worker.task) == 1:
                may_sleep_s = min(max(self._limits.asleep_s, 2 * patience), self._limits.hang_s)
            stopped = name in tick.stopped
            if worker.asleep and not stopped:
                out += worker.check_asleep(self._node, self._limits, now, max(self._limits.asleep_s, 2 * patience))
            stalled = worker.check_stalled(self._node, self._limits, now, stopped=stopped, asleep_s=may_sleep_s)
            out += [_with_collectives(each, worker, workers) for each in stalled]
        for name, use in tick.used.items():
            if name in workers:
                others = [each for each in workers.values() if each.task == workers[name].task]
                silent = workers[name].check_silent(self._node, use, now, others)
                out += [_with_collectives(each, workers[name], workers) for each in silent]
        stuck = {workers[each.worker].task for each in out if isinstance(each, TakeStacks)}
        return out + _ask_collectives(workers, stuck) if stuck else out

    def _learn_patience(self, workers: Mapping[str, LocalWorker], now: float) -> None:
        """Record, by task, how long workers have slept that woke up or ended."""
        sleeping = {name: (each.task, each.asleep_s(now)) for name, each in workers.items() if each.asleep}
        for name, (task, slept) in self._slept.items():
            over = name not in sleeping or sleeping[name][1] < slept
            if over and slept >= self._limits.asleep_s / 2:
                self._patience[task] = max(self._patience.get(task, 0.0), slept)
        self._slept = sleeping

    def keep_tasks(self, tasks: Collection[str]) -> None:
        """Forget the tasks that have no worker here any more."""
        self._patience = {task: slept for task, slept in self._patience.items() if task in tasks}
        self._slept = {name: slept for name, slept in self._slept.items() if slept[0] in tasks}


def _ask_collectives(workers: Mapping[str, LocalWorker], tasks: Collection[str]) -> list[Message | Effect]:
    """Ask all workers of these tasks for their collectives: a stopped worker itself can't answer."""
    asked = [worker for worker in workers.values() if worker.pid and worker.task in tasks]
    for worker in asked:
        worker.collectives = []
    return [SendToWorker(worker.worker, Ping(collectives=True)) for worker in asked]


def _with_collectives(
    fact: WorkerStalled | TakeStacks, stalled: LocalWorker, workers: Mapping[str, LocalWorker]
) -> WorkerStalled | TakeStacks:
    """Return the fact with the collectives of its task's workers; workers in no collective come last."""
    if isinstance(fact, TakeStacks) or stalled.looked_at != (fact.epoch, fact.iteration):
        return fact
    of_task = [worker for worker in workers.values() if worker.task == stalled.task and worker is not stalled]
    named = [(worker.worker, line) for worker in (stalled, *of_task) for line in worker.collectives]
    named.sort(key=lambda each: each[1].startswith("none"))
    return msgspec.structs.replace(fact, collectives=[f"{name}: {line}" for name, line in named])
