"""How a node stands in the cluster: when it joins, how often it beats, and when it leaves. Pure."""

import math
from collections.abc import Iterable

import msgspec

from unicron.contracts.base import Message
from unicron.contracts.events import (
    Alert,
    FailureDetected,
    NodeAdmitted,
    NodeHeartbeat,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodePaced,
    NodeRefused,
)
from unicron.contracts.failures import DetectionMethod
from unicron.contracts.tasks import WorkerStatus
from unicron_agent.effects import Out
from unicron_agent.stimuli import EntryRead

FRESH = 6
"""Heartbeats after joining that come at the agent's own pace. In that time the server may report the end of an earlier
connection, and the node is given up for it unless a heartbeat arrives within the grace period."""

EARLY_S = 0.005
"""How much earlier than its due moment a heartbeat may be sent, so that a tick just before it sends it."""

AGAIN_S, NAME_TAKEN_S = 5.0, 15.0
"""How often, and for how long, a node tries to join under a name that another node has: that one may be lost without
anybody having noticed."""

ADOPTION_S = 0.5
"""How long to wait for adopted workers to reconnect; they try ten times a second."""


class Presence:
    """A node's membership of the cluster, as its agent knows it.

    Args:
        card: what the node joins with, but for incarnation and workers.
        boot: a name for this start of the agent, unlike that of any other.
        heartbeat_s: seconds between signs of life.

    Attributes:
        incarnation: name under which the node joined last, a new one each time, so that commands to an earlier one can
            be ignored. Empty before the first join.
        joined: sequence in the journal of the last join; None until it is published.
        given_up: sequence of the newest fact that declares this node lost for its silence, -1 if there is none.
        leave_s: seconds until the node has to go; None while it stays.
        left: the agent has published its goodbye, and reads nothing more.
        fault: why it left by itself; empty where it was asked to.
    """

    def __init__(self, card: NodeJoined, boot: str, heartbeat_s: float) -> None:
        self._card, self._boot, self._heartbeat_s = card, boot, heartbeat_s
        self.incarnation, self.fault = "", ""
        self.joined: int | None = None
        self.given_up = -1
        self.leave_s: float | None = None
        self.left = False
        self._awaited: set[str] = set()
        self._joins = self._beats = 0
        self._join_by = self._beat_at = self._paced_s = 0.0
        self._refused_at, self._join_again_at = math.inf, math.inf

    # --- joining -----------------------------------------------------------------------------------------------------

    def await_workers(self, names: Iterable[str], now: float) -> bool:
        """Join only once adopted workers have reconnected or ended; return whether there are any."""
        self._awaited, self._join_by = set(names), now + ADOPTION_S
        return bool(self._awaited)

    def is_complete(self, name: str) -> bool:
        """Return whether the node can join for the first time, now that an adopted worker has reconnected or ended."""
        self._awaited.discard(name)
        return not (self._awaited or self.incarnation or self.left)

    def join(self, workers: list[WorkerStatus], kept: list[str]) -> Out:
        """Publish what is on this node under a new incarnation, which makes commands to the old one void."""
        self._joins += 1
        self.incarnation, self.joined = f"{self._boot}.{self._joins}", None
        self._join_again_at = math.inf
        self._beats, self._beat_at = 0, 0.0
        joined = msgspec.structs.replace(self._card, incarnation=self.incarnation, workers=workers, kept=kept)
        return [joined, *self.announce_departure()]

    def must_join(self, now: float) -> bool:
        """Return whether to join because the time for it has come."""
        return now >= (self._join_again_at if self.incarnation else self._join_by)

    def is_given_up(self) -> bool:
        """Return whether the node was declared lost for its silence after it joined.

        That fact may be late: it may be about an earlier connection or an earlier agent.
        """
        return self.joined is not None and self.given_up > self.joined

    def record_published(self, fact: Message, sequence: int) -> None:
        """Record where in the journal a join stands."""
        if isinstance(fact, NodeJoined) and fact.incarnation == self.incarnation:
            self.joined = sequence

    def record_entry(self, message: Message, entry: EntryRead, now: float) -> str:
        """Record what others say of this node.

        Args:
            message: what they say.
            entry: of the journal.
            now: monotonic seconds.

        Returns:
            Why the node has to leave; empty where it may stay.
        """
        match message:
            case NodeRefused(incarnation=self.incarnation):
                return self._record_refusal(message.reason, now)
            case NodeAdmitted(incarnation=self.incarnation) | NodePaced(incarnation=self.incarnation):
                self._paced_s, self._refused_at = message.heartbeat_s, math.inf
            case FailureDetected(node=self._card.node, method=DetectionMethod.NODE_HEALTH):
                self.given_up = entry.sequence  # for what happens on it, a node is not to come back by itself
        return ""

    def _record_refusal(self, reason: str, now: float) -> str:
        """Join again later, without heartbeats, which would count as the other node's; leave if that one stays."""
        self._refused_at = min(self._refused_at, now)
        if now - self._refused_at > NAME_TAKEN_S:
            return reason
        self._join_again_at = now + AGAIN_S
        return ""

    # --- leaving -----------------------------------------------------------------------------------------------------

    def announce_departure(self) -> Out:
        """Publish, if the node is to go, that it is, under its current incarnation."""
        if self.leave_s is None or not self.incarnation:
            return []
        return [NodeLeaving(node=self._card.node, incarnation=self.incarnation, seconds=self.leave_s)]

    def say_goodbye(self, fault: str) -> Out:
        """Publish the goodbye; a node whose name another one holds must not announce that name's leave."""
        self.fault, self.left, node = fault, True, self._card.node
        if self._refused_at < math.inf:
            return [Alert(text=f"a second node was not taken in: {fault}", node=node)] if fault else []
        return [NodeLeft(node=node, incarnation=self.incarnation, reason=fault)]

    # --- signs of life -----------------------------------------------------------------------------------------------

    def beat(self, now: float) -> Out:
        """Return the heartbeat where it is due."""
        if not self.incarnation or now < self._beat_at or self._refused_at < math.inf:
            return []
        self._beats += 1
        self._beat_at = self._next_beat(now)
        return [NodeHeartbeat(node=self._card.node, incarnation=self.incarnation)]

    def _next_beat(self, now: float) -> float:
        """Return when to send the next heartbeat: aligned with other agents of this machine, or at the detector's pace.

        The detector asks for a slower pace in a large cluster.
        """
        if self._beats >= FRESH and self._paced_s > self._heartbeat_s:
            return now + self._paced_s
        return ((now + EARLY_S) // self._heartbeat_s + 1) * self._heartbeat_s - EARLY_S

    def due_at(self) -> float:
        """Return when there is something to do (monotonic seconds); minus infinity where the next tick may have it."""
        return min(self._beat_at, self._join_again_at) if self.incarnation and not self.left else -math.inf
