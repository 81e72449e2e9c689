"""All watchdogs of a node: samples in, alerts and facts out, each of them once in a while. Pure."""

from collections.abc import Mapping, Sequence

from unicron.contracts.base import Message
from unicron.contracts.events import Alert, WorkerGrows
from unicron.contracts.hardware import Gpu
from unicron.contracts.tasks import WorkerPhase
from unicron.contracts.watchdogs import AlertKind, LogPattern
from unicron_agent.stimuli import MachineMeasured, PatternMatched, Store
from unicron_agent.watchdogs.limits import WatchdogLimits
from unicron_agent.watchdogs.logs import LogWatch
from unicron_agent.watchdogs.memory import Growing, WorkerMemory
from unicron_agent.watchdogs.stores import Stores
from unicron_agent.workers.workers import LocalWorker

AGAIN_S = 6 * 3600.0
"""The same alert is given so often at most, as long as its reason lasts."""

NUMBERS_S = 600.0
"""Least time between two alerts that a task writes a number that is not finite."""


class Watchdogs:
    """The watchdogs of a node.

    Args:
        node: its name.
        limits: when to give an alert.
    """

    def __init__(self, node: str, limits: WatchdogLimits) -> None:
        self._node, self._limits = node, limits
        self._stores, self._memory, self._logs = Stores(limits.ahead_s), WorkerMemory(), LogWatch(node)
        self._given: dict[str, float] = {}

    def started(self, task: str, patterns: Sequence[LogPattern], now: float) -> None:
        """Watch what a worker writes that is to start, or was left by an earlier agent."""
        self._logs.started(task, patterns, now)

    def measured(self, measured: MachineMeasured, workers: Mapping[str, LocalWorker], now: float) -> list[Message]:
        """Look at what was measured of the machine; return what there is to say."""
        out: list[Message] = []
        for store, text in self._stores.look(measured.stores, now):
            out += self._alert(store.kind, store.name, text, now)
        if measured.memory is not None:
            used = {name: each for name, each in measured.used.items() if name in workers and _trains(workers[name])}
            for name, grows in self._memory.look(measured.memory, used, now).items():
                if grows.full_s is not None and grows.full_s <= self._limits.memory_ahead_s:
                    task = workers[name].task
                    out += self._alert(AlertKind.MEMORY, task, _growth(name, grows, self._node), now, task=task)
        return [*out, *self._logs.look(now)]

    def sampled(self, gpus: tuple[Gpu, ...], now: float) -> list[Message]:
        """Look at the memory of GPUs."""
        stores = [
            Store(
                AlertKind.GPU_MEMORY,
                f"the memory of GPU {gpu.slot} of {self._node}",
                gpu.memory_used,
                gpu.memory_total,
                self._limits.gpu_free,
            )
            for gpu in gpus
            if gpu.memory_used is not None and gpu.memory_total is not None
        ]
        found = self._stores.look(stores, now) if self._limits.gpu_free else []
        return [each for store, text in found for each in self._alert(store.kind, store.name, text, now)]

    def matched(self, matched: PatternMatched, worker: LocalWorker, now: float) -> list[Message]:
        """Record a line of a worker that has matched; return an alert if a number in it is not finite."""
        out: list[Message] = [*self._logs.matched(worker.task, matched.index, now)]
        if matched.wrong:
            text = f"{worker.worker} wrote what is no finite number: {matched.wrong}"
            key = f"{worker.task} {matched.index}"
            out += self._alert(AlertKind.LOG, key, text, now, task=worker.task, again_s=NUMBERS_S)
        return out

    def iterated(self, worker: LocalWorker, iteration: int, now: float) -> list[Message]:
        """Return, at the end of an iteration, an alert if the worker is to be replaced before the memory is full."""
        grows = self._memory.to_replace(worker.worker, self._limits.replace_s, now)
        if grows is None:
            return []
        return [
            WorkerGrows(
                node=self._node,
                slot=worker.slot,
                task=worker.task,
                worker=worker.worker,
                epoch=worker.epoch,
                iteration=iteration,
                used=grows.used,
                left=grows.left,
                rate=grows.rate,
            )
        ]

    def keep(self, workers: Mapping[str, LocalWorker]) -> None:
        """Forget the workers that are gone, and tasks that have none here any more."""
        self._memory.keep(workers)
        self._logs.keep({worker.task for worker in workers.values() if not worker.finished})

    def _alert(
        self, kind: AlertKind, about: str, text: str, now: float, *, task: str = "", again_s: float = AGAIN_S
    ) -> list[Message]:
        key = f"{kind} {about}"
        if now - self._given.get(key, -again_s) < again_s:
            return []
        self._given = {each: at for each, at in self._given.items() if now - at < AGAIN_S}
        self._given[key] = now
        return [Alert(text=text, node=self._node, task=task, kind=kind)]


def _trains(worker: LocalWorker) -> bool:
    """Return whether it has begun to train: before that it loads what it needs."""
    return worker.phase not in {WorkerPhase.STARTING, WorkerPhase.WAITING, WorkerPhase.FINISHED}


def _growth(worker: str, grows: Growing, node: str) -> str:
    pace, minutes = grows.rate * 60 / 2**20, (grows.full_s or 0.0) / 60
    held, left = f"{grows.used / 2**30:.1f} GiB", f"{grows.left / 2**30:.1f} GiB"
    return (
        f"the memory of {worker} grows by {pace:.0f} MiB a minute without end: it holds {held}, and {left} are left on "
        f"{node}, for {minutes:.0f} minutes"
    )
