"""The records of workers and suspect nodes, found by node and by task without a search through the whole cluster."""

from collections import Counter, defaultdict
from collections.abc import Iterable

from unicron.contracts.base import CancelTimer, Message
from unicron_detector.state import DetectorState, NodeRecord, WatchedWorker


class RecordIndex:
    """Keeps the records of a state, with indexes that find them by node and by task.

    What stands beside the state follows from it, and is made anew at each start. A worker is *watched* until
    everything has been said about its process.
    """

    def __init__(self, state: DetectorState) -> None:
        self._state = state
        self._on_node: defaultdict[str, set[str]] = defaultdict(set)
        self._of_task: defaultdict[str, defaultdict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._gone: dict[str, None] = {}
        self._machines = Counter(node.host or name for name, node in state.nodes.items())
        self._suspects = {name for name, node in state.nodes.items() if node.suspect}
        for name, worker in sorted(state.workers.items(), key=lambda item: item[1].gone_at or 0.0):
            self._index(name, worker)

    # --- nodes -------------------------------------------------------------------------------------------------------

    def add_node(self, name: str, node: NodeRecord) -> None:
        """Add a new record, in place of any older one."""
        self.remove_node(name)
        self._state.nodes[name] = node
        self._machines[node.host or name] += 1

    def remove_node(self, name: str) -> None:
        """Drop a record, if there is one."""
        node = self._state.nodes.pop(name, None)
        if node is not None:
            self._machines -= Counter([node.host or name])

    def on_one_machine(self) -> bool:
        """Return whether all nodes are on one machine."""
        return len(self._machines) == 1

    # --- workers -----------------------------------------------------------------------------------------------------

    def add(self, name: str, worker: WatchedWorker) -> None:
        """Add a new record."""
        self._state.workers[name] = worker
        self._index(name, worker)

    def remove(self, name: str) -> None:
        """Drop a record."""
        self._unindex(name, self._state.workers.pop(name))

    def close(self, name: str) -> None:
        """Record that nothing more is to be reported of a process."""
        self._move(name, self._state.now)

    def reopen(self, name: str) -> None:
        """Watch a process again."""
        self._move(name, None)

    def is_closed(self, name: str) -> bool:
        """Return whether nothing more is to be reported of this process."""
        found = self._state.workers.get(name)
        return found is not None and found.gone_at is not None

    def forget(self, since: float) -> None:
        """Drop the records of processes about which everything had been said before `since`."""
        while self._gone:
            name = next(iter(self._gone))
            gone_at = self._state.workers[name].gone_at
            if gone_at is None or gone_at >= since:
                return
            self.remove(name)

    def watched_on(self, node: str) -> list[str]:
        """Return the watched workers on a node, in an order that does not depend on how they came there."""
        return sorted(self._on_node.get(node, ()))

    def watched_in_task(self, task: str) -> list[str]:
        """Return the watched workers of a task."""
        return sorted(name for names in self._of_task.get(task, {}).values() for name in names)

    def nodes_of_task(self, task: str) -> list[str]:
        """Return the nodes with watched workers of a task."""
        return sorted(self._of_task.get(task, {}))

    def close_all(self, names: Iterable[str]) -> None:
        """Record that nothing more is to be reported of these workers."""
        for name in names:
            self.close(name)

    # --- suspect nodes -----------------------------------------------------------------------------------------------

    def suspect(self, node: str, timer: str) -> None:
        """Record that a node's connection is lost, and the timer that ends its grace."""
        self._state.nodes[node].suspect = timer
        self._suspects.add(node)

    def clear_suspicion(self, node: str) -> list[Message]:
        """Clear the suspicion of a node; return the messages that cancel its timer."""
        if node not in self._suspects:
            return []
        self._suspects.remove(node)
        timer, self._state.nodes[node].suspect = self._state.nodes[node].suspect, ""
        return [CancelTimer(name=timer)]

    def suspects(self, task: str) -> set[str]:
        """Return the nodes with watched workers of the task whose connection is lost and whose grace runs."""
        return self._suspects & self._of_task[task].keys() if task in self._of_task else set()

    # --- what finds them ---------------------------------------------------------------------------------------------

    def _move(self, name: str, gone_at: float | None) -> None:
        worker = self._state.workers[name]
        self._unindex(name, worker)
        worker.gone_at = gone_at
        self._index(name, worker)

    def _index(self, name: str, worker: WatchedWorker) -> None:
        if worker.gone_at is not None:
            self._gone[name] = None
            return
        self._on_node[worker.node].add(name)
        self._of_task[worker.task][worker.node].add(name)

    def _unindex(self, name: str, worker: WatchedWorker) -> None:
        if worker.gone_at is not None:
            del self._gone[name]
            return
        _discard(self._on_node, worker.node, name)
        _discard(self._of_task[worker.task], worker.node, name)
        if not self._of_task[worker.task]:
            del self._of_task[worker.task]


def _discard(sets: defaultdict[str, set[str]], key: str, name: str) -> None:
    """Take `name` out of a set, and the set out of its map when nothing is left in it."""
    sets[key].remove(name)
    if not sets[key]:
        del sets[key]
