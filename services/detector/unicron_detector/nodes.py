"""Node health: a node is lost when its connection ends and stays away, or when it falls silent."""

from unicron.contracts.base import CancelTimer, ConnectionLost, Message
from unicron.contracts.events import NodeAdmitted, NodeGone, NodeHeartbeat, NodeLeft, NodePaced, NodeSuspected
from unicron.contracts.tasks import WorkerStatus
from unicron_detector.clocks import check_clocks
from unicron_detector.memberships import Memberships, connection_failure
from unicron_detector.processes import Processes
from unicron_detector.report import Reporter
from unicron_detector.state import NodeRecord
from unicron_detector.timers import TimerKind

STALE = "Stale Connection"
"""Why a server ends a connection over which a client has not answered its pings."""

TICK_S = 0.5
"""Period at which silence is counted."""

MISSED = 3
"""Periods without a heartbeat after which a node is lost that beats more rarely than the time-out is made for."""


class Nodes:
    """Watches the nodes."""

    def __init__(self, reporter: Reporter, processes: Processes, memberships: Memberships) -> None:
        self._reporter = reporter
        self._state = reporter.state
        self._books = reporter.books
        self._processes = processes
        self._memberships = memberships

    def admit(self, joined: NodeAdmitted) -> list[Message]:
        """Record a node that joins, with the workers that its agent found alive.

        The admission counts, not the `NodeJoined` before it. A failure reported between the two would stand before the
        admission in the journal: all others would use the node, and nobody would watch it.
        """
        name, out = joined.node, list[Message]()
        known = self._state.nodes.get(name)
        self._state.lost.pop(name, None)
        if known is None or known.incarnation != joined.incarnation:
            out += self._books.clear_suspicion(name)
            node = NodeRecord(incarnation=joined.incarnation, host=joined.host, heartbeat_s=joined.heartbeat_s)
            self._books.add_node(name, node)
            out += self._processes.report_missing(name, {status.worker for status in joined.workers}) if known else []
        else:
            known.heartbeat_s = joined.heartbeat_s
        for status in joined.workers:
            self._adopt(name, status, anew=known is None)
        if known is None or known.incarnation != joined.incarnation:
            self._state.starting.pop(name, None)  # what was ordered of it before has no effect any more
        return out

    def _adopt(self, node: str, status: WorkerStatus, *, anew: bool) -> None:
        """Watch a worker that its node lists and that was ordered there; resume one that outlived its node's loss.

        A node may name any worker. Of one that was forgotten meanwhile it is heard when somebody counts on it.
        """
        worker, place = self._state.workers.get(status.worker), (status.task, node, status.slot)
        if worker is None:
            if self._state.may_exist(status.worker, *place):
                self._reporter.worker(status.worker, *place)
        elif anew and not worker.failed and (worker.task, worker.node, worker.slot) == place:
            self._reporter.watch(status.worker, *place)

    def record_interval(self, paced: NodePaced) -> list[Message]:
        """Record a node's new heartbeat interval."""
        node = self._state.nodes.get(paced.node)
        if node is not None and node.incarnation == paced.incarnation:
            node.heartbeat_s = paced.heartbeat_s
        return []

    def forget(self, left: NodeLeft) -> list[Message]:
        """Forget a node that said goodbye."""
        node = self._state.nodes.get(left.node)
        return self._reporter.drop_node(left.node) if node and node.incarnation == left.incarnation else []

    def forget_unadmitted(self, gone: NodeGone) -> list[Message]:
        """Forget a node that said goodbye before its admission was read."""
        return self._reporter.drop_node(gone.node)

    def record_heartbeat(self, heartbeat: NodeHeartbeat) -> list[Message]:
        """Record a heartbeat, which clears any suspicion of its node."""
        node = self._state.nodes.get(heartbeat.node)
        if node is None:
            return []
        node.silent = 0
        node.ahead_s = heartbeat.at - self._state.now if heartbeat.at else 0.0
        return self._books.clear_suspicion(heartbeat.node)

    def suspect_disconnected(self, lost: ConnectionLost) -> list[Message]:
        """Suspect the node whose connection was lost, if its present agent had made it.

        The advisory of an old connection of it may come after the agent is back; the next heartbeat clears the node.
        """
        node, out = self._state.nodes.get(lost.node), list[Message]()
        if node is None or node.suspect or node.incarnation.partition(".")[0] != lost.boot:
            return []
        node.reason = lost.reason or "the server gave no reason"
        grace_s = self._grace_s(node)
        self._books.suspect(lost.node, self._start_grace(out, lost.node))
        out.append(NodeSuspected(node=lost.node, reason=node.reason, grace_s=grace_s))
        return out + self._memberships.report_all_explained()

    def expire_grace(self, name: str, timer: str) -> list[Message]:
        """Give up a node that is still suspect."""
        node = self._state.nodes.get(name)
        if node is None or node.suspect != timer:
            return []
        grace_s = self._grace_s(node)
        why = f"its connection ended ({node.reason}) and was not back within {grace_s:g} s"
        return self._reporter.report(connection_failure(name, why))

    def check_silence(self) -> list[Message]:
        """Report the nodes that have been silent for too long."""
        out = check_clocks(self._state)
        at_least, silent = self._reporter.limits.heartbeat_timeout_s, dict[str, float]()
        for name, node in self._state.nodes.items():
            node.silent += 1
            if node.silent * TICK_S > (timeout_s := max(at_least, MISSED * node.heartbeat_s)):
                silent[name] = timeout_s
        for name, timeout_s in silent.items():
            out += self._reporter.report(connection_failure(name, f"no heartbeat for {timeout_s:g} s"))
        return out

    def restart_grace(self) -> list[Message]:
        """Restart the grace of all suspect nodes."""
        out: list[Message] = []
        for name, node in self._state.nodes.items():
            if node.suspect:
                out.append(CancelTimer(name=node.suspect))
                node.suspect = self._start_grace(out, name)
        return out

    def _start_grace(self, out: list[Message], node: str) -> str:
        return self._reporter.request_timer(out, TimerKind.GRACE, node, self._grace_s(self._state.nodes[node]))

    def _grace_s(self, node: NodeRecord) -> float:
        """Return the grace of a node whose connection ended: after silence, as much as any silent node has."""
        limits = self._reporter.limits
        return limits.heartbeat_timeout_s if node.reason == STALE else limits.grace_s

    def restart_silence(self) -> None:
        """Restart all counts of silence."""
        for node in self._state.nodes.values():
            node.silent = 0
