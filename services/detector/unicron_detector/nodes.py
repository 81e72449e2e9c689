"""Node health: a node is lost when its connection ends and stays away, or when it falls silent."""

from unicron.contracts.base import CancelTimer, ConnectionLost, Message
from unicron.contracts.events import Alert, NodeAdmitted, NodeGone, NodeHeartbeat, NodeLeft, NodePaced, NodeSuspected
from unicron.contracts.tasks import WorkerStatus
from unicron.contracts.watchdogs import AlertKind
from unicron.fabric_proofs import WINDOW_S
from unicron_detector.memberships import Memberships, connection_failure
from unicron_detector.processes import Processes
from unicron_detector.report import Reporter
from unicron_detector.state import NodeRecord
from unicron_detector.timers import TimerKind

TICK_S = 0.5
"""Period at which silence is counted."""

MISSED = 3
"""Periods without a heartbeat after which a node is lost that beats more rarely than the time-out is made for."""

CLOCK_S = WINDOW_S / 2
"""By which a node's clock may differ from ours, as another's may be as far off on the other side."""

OFF_TICKS = 4
"""Ticks in a row that show a clock to be off; heartbeats that waited while we were held up show it in one or two."""


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
            self._state.nodes[name] = NodeRecord(
                incarnation=joined.incarnation, host=joined.host, heartbeat_s=joined.heartbeat_s
            )
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
        self._books.suspect(lost.node, self._start_grace(out, lost.node))
        out.append(NodeSuspected(node=lost.node, reason=node.reason, grace_s=self._reporter.limits.grace_s))
        return out + self._memberships.report_all_explained()

    def expire_grace(self, name: str, timer: str) -> list[Message]:
        """Give up a node that is still suspect."""
        node = self._state.nodes.get(name)
        if node is None or node.suspect != timer:
            return []
        grace_s = self._reporter.limits.grace_s
        why = f"its connection ended ({node.reason}) and was not back within {grace_s:g} s"
        return self._reporter.report(connection_failure(name, why))

    def check_silence(self) -> list[Message]:
        """Report the nodes that have been silent for too long."""
        out = self._alert_clocks()
        at_least, silent = self._reporter.limits.heartbeat_timeout_s, dict[str, float]()
        for name, node in self._state.nodes.items():
            node.silent += 1
            if node.silent * TICK_S > (timeout_s := max(at_least, MISSED * node.heartbeat_s)):
                silent[name] = timeout_s
        for name, timeout_s in silent.items():
            out += self._reporter.report(connection_failure(name, f"no heartbeat for {timeout_s:g} s"))
        return out

    def _alert_clocks(self) -> list[Message]:
        """Alert once of each node's clock that is off; where all are off by as much, of this machine's own."""
        nodes, due = self._state.nodes, list[str]()
        for name, node in nodes.items():
            if not node.silent:  # else nothing was heard since the last tick
                node.off_ticks = node.off_ticks + 1 if abs(node.ahead_s) > CLOCK_S else 0
                due += [name] * (node.off_ticks == OFF_TICKS)
        if not due:
            return []
        apart = [node.ahead_s for node in nodes.values()]
        ours = len(nodes) > 1 and all(node.off_ticks for node in nodes.values()) and max(apart) - min(apart) < CLOCK_S
        if not ours:
            return [
                Alert(text=_clock_text(f"the clock of {name}", nodes[name].ahead_s), node=name, kind=AlertKind.CLOCK)
                for name in due
            ]
        for node in nodes.values():
            node.off_ticks = max(node.off_ticks, OFF_TICKS)
        which = f"the clocks of all {len(nodes)} nodes"
        return [
            Alert(text=f"{_clock_text(which, apart[0])}; it is the detector's own that is wrong", kind=AlertKind.CLOCK)
        ]

    def restart_grace(self) -> list[Message]:
        """Restart the grace of all suspect nodes."""
        out: list[Message] = []
        for name, node in self._state.nodes.items():
            if node.suspect:
                out.append(CancelTimer(name=node.suspect))
                node.suspect = self._start_grace(out, name)
        return out

    def _start_grace(self, out: list[Message], node: str) -> str:
        return self._reporter.request_timer(out, TimerKind.GRACE, node, self._reporter.limits.grace_s)

    def restart_silence(self) -> None:
        """Restart all counts of silence."""
        for node in self._state.nodes.values():
            node.silent = 0


def _clock_text(whose: str, ahead_s: float) -> str:
    side = "ahead of" if ahead_s > 0 else "behind"
    return (
        f"{whose}: {abs(ahead_s):.0f} s {side} the detector's, and {CLOCK_S:g} s are allowed: set both (by chrony or "
        "systemd-timesyncd)"
    )
