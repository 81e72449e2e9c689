"""The life of a node: conditions to join, joining, draining and leaving. Pure functions on `state`."""

from msgspec.structs import replace

from unicron.checks import is_token
from unicron.contracts.answers import NodeView, Reply
from unicron.contracts.base import Message
from unicron.contracts.events import (
    Alert,
    FailureDetected,
    MachineRetired,
    NodeAdmitted,
    NodeDrained,
    NodeGone,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    NodePaced,
    NodeRefused,
    StandbyDied,
    StandbyRevived,
)
from unicron.contracts.failures import Severity
from unicron.contracts.stragglers import StragglerDetected
from unicron.contracts.tasks import NodeState
from unicron.errors import InvalidInputError, Problem
from unicron.services import ANSWERING
from unicron_registry.orders import list_names
from unicron_registry.state import RegistryState

PRESENT = {NodeState.UP, NodeState.DRAINING}
"""States of a node whose agent is held to be alive."""

BEATS = 2000
"""Heartbeats a second that all nodes together are to send at most: the detector takes 30 us for each."""

OFTEN_S, RARELY_S = 0.5, 9.0
"""Seconds between heartbeats in a small cluster, and at most: after ten seconds without any, a node is not healthy
(`SILENT_S` of the detector)."""

TOO_OFTEN = 1.25
"""A node gets a new interval between heartbeats only where that is so many times the one that it has."""

RESERVED = frozenset({*ANSWERING, "console"})
"""Names of services: a node under one of them would answer its queries."""


def heartbeat_s(nodes: int) -> float:
    """Return how often one of so many nodes is to beat, in seconds; 0 where it may do as it likes.

    Heartbeats are the second way of noticing that a node is lost: when its connection ends, the server reports that at
    once.
    """
    between = min(nodes / BEATS, RARELY_S)
    return between if between > OFTEN_S else 0.0


def refusal(joined: NodeJoined, present: NodeView) -> str:
    """Return why a node can't join while another one has its name; empty where it is that one itself.

    A node that took the name over would leave workers that nobody owns. An agent that is started again has the same
    home.
    """
    if not (joined.home and present.home) or joined.home == present.home:
        return ""
    return (
        f"a node called {present.node} is there already, on host {present.host}: give this one another --node, or end "
        "that agent first"
    )


def node_problems(joined: NodeJoined) -> list[Problem]:
    """Return everything that keeps a node from being taken in."""
    found = []
    if not is_token(joined.node) or joined.node in RESERVED:
        found.append(Problem("node", joined.node, "use 1 to 64 letters, digits, '-' or '_', and no service's name"))
    if joined.source != joined.node:
        found.append(Problem("source", joined.source, f"only {joined.node!r} itself can join as {joined.node!r}"))
    found += [
        Problem(field, "", "must not be empty") for field in ("incarnation", "host") if not getattr(joined, field)
    ]
    indices = [slot.index for slot in joined.slots]
    if not indices:
        found.append(Problem("slots", [], "a node needs at least one"))
    if len(set(indices)) < len(indices) or any(index < 0 for index in indices):
        found.append(Problem("slots", indices, "each needs an index of its own, from 0"))
    for slot in joined.slots:
        if slot.kind not in {"gpu", "cpu"}:
            found.append(Problem(f"slots.{slot.index}.kind", slot.kind, "must be 'gpu' or 'cpu'"))
    devices = [slot.device for slot in joined.slots if slot.device]
    if len(set(devices)) < len(devices):
        found.append(Problem("slots", devices, "each device can stand in one slot only"))
    strays = sorted({worker.slot for worker in joined.workers} - set(indices))
    if strays:
        found.append(Problem("workers", strays, f"they live in slots that the node does not have; it has {indices}"))
    return found


def join(state: RegistryState, joined: NodeJoined) -> list[Message]:
    """Admit a node, or refuse it with the reason."""
    problems = node_problems(joined)
    if problems:
        text = f"node {joined.node!r} was not taken in: " + "; ".join(map(str, problems))
        return [Alert(text=text, node=joined.node)]
    before = state.nodes.get(joined.node)
    present = before is not None and before.state in PRESENT
    if before and present and (reason := refusal(joined, before)):
        return [NodeRefused(node=joined.node, incarnation=joined.incarnation, reason=reason)]
    back = _readmit(state, joined, before)
    drained = joined.node in state.drained
    view = NodeView(
        node=joined.node,
        state=NodeState.DRAINING if drained else NodeState.UP,
        host=joined.host,
        incarnation=joined.incarnation,
        slots=joined.slots,
        since=before.since if before and present else joined.at,
        home=joined.home,
        rack=joined.rack,
        domain=joined.domain,
        machine=joined.machine,
        version=joined.version,
        problem=before.problem if before and before.incarnation == joined.incarnation else "",
    )
    if view == before:
        return []  # it only said again what is known
    state.nodes[joined.node] = view
    admitted = NodeAdmitted(
        node=joined.node,
        incarnation=joined.incarnation,
        host=joined.host,
        slots=joined.slots,
        rendezvous=joined.rendezvous,
        state_server=joined.state_server,
        workers=joined.workers,
        returned=present,
        kept=joined.kept,
        rack=joined.rack,
        domain=joined.domain,
        machine=joined.machine,
        pool=joined.pool,
        heartbeat_s=heartbeat_s(len(state.nodes)),
    )
    state.paced.pop(joined.node, None)
    state.paced[joined.node] = admitted.heartbeat_s
    then = [NodeDrained(node=joined.node)] if drained else []
    return [*back, admitted, *then, *_slow_one_node(state)]


def _slow_one_node(state: RegistryState) -> list[Message]:
    """Give the node that has had its interval between heartbeats for longest a new one, where that is much too short.

    Each node that joins slows one other down, so that never a thousand change at once; by the time that the nodes are
    twice as many, all have a new interval.
    """
    node, before = next(iter(state.paced.items()))
    now, view = heartbeat_s(len(state.nodes)), state.nodes[node]
    if now <= TOO_OFTEN * max(before, OFTEN_S):
        return []
    del state.paced[node]
    if view.state not in PRESENT:
        return []  # it gets one when it is back
    state.paced[node] = now
    return [NodePaced(node=node, incarnation=view.incarnation, heartbeat_s=now)]


def _readmit(state: RegistryState, joined: NodeJoined, before: NodeView | None) -> list[Message]:
    """Put a node back into use that was out of it only because its agent or machine was to go, or was helpless."""
    if state.retired.get(joined.node, joined.machine) != joined.machine:
        return drain(state, joined.node, drain=False)[1]
    causes = [cause for cause in (state.leaving, state.helpless) if joined.node in cause]
    if not causes or (before and before.incarnation == joined.incarnation):
        return []
    for cause in causes:
        cause.remove(joined.node)
    state.drained.remove(joined.node)
    return [NodeDrained(node=joined.node, drain=False)]


def record_admission(state: RegistryState, admitted: NodeAdmitted) -> list[Message]:
    """Use a node whose admission stands behind its loss in the journal, as all other readers of the journal do."""
    view = state.nodes.get(admitted.node)
    if view is not None and view.state == NodeState.LOST:
        up = NodeState.DRAINING if admitted.node in state.drained else NodeState.UP
        _set_state(state, admitted.node, up, admitted.at)
    return []


def record_failure(state: RegistryState, failure: FailureDetected) -> list[Message]:
    """Record that a node is lost, where a failure is that."""
    if failure.severity is Severity.SEV1:
        _set_state(state, failure.node, NodeState.LOST, failure.at)
    return []


def drain_straggler(state: RegistryState, detected: StragglerDetected) -> list[Message]:
    """Drain the node of a straggler where the straggler service asks for it, as if a user had said so."""
    wanted = detected.drain and detected.source == "straggler" and detected.node in state.nodes
    wanted = wanted and not state.observe_only
    return drain(state, detected.node, drain=True)[1] if wanted else []


def drain_retired(state: RegistryState, retired: MachineRetired) -> list[Message]:
    """Drain a node whose machine is given back, until another machine has its name."""
    view = state.nodes.get(retired.node)
    if view is None or view.machine != retired.machine or retired.planned or view.node in state.drained:
        return []
    facts = drain(state, view.node, drain=True)[1]
    state.retired[view.node] = view.machine
    return facts


def drain_leaving(state: RegistryState, leaving: NodeLeaving) -> list[Message]:
    """Drain a node that is to go until its agent joins again."""
    view = state.nodes.get(leaving.node)
    if view is None or view.incarnation != leaving.incarnation:
        return []
    if view.state != NodeState.UP and leaving.node not in state.helpless:
        return []
    facts = drain(state, leaving.node, drain=True)[1]
    state.leaving.append(leaving.node)
    return facts


def record_standby_death(state: RegistryState, died: StandbyDied) -> list[Message]:
    """Show that no worker can start on a node; drain it, with an alert, where that is so for long."""
    view = state.nodes.get(died.node)
    if view is None or view.state not in PRESENT:
        return []
    state.nodes[died.node] = replace(view, problem=str(died))
    if not died.helpless or died.node in state.drained or state.observe_only:
        return []
    facts = drain(state, died.node, drain=True)[1]
    state.helpless.append(died.node)
    return [*facts, Alert(text=f"{died.node} gets no more work until it can start workers: {died}", node=died.node)]


def record_revival(state: RegistryState, revived: StandbyRevived) -> list[Message]:
    """Show that workers can start on a node again, and use it where it was drained only because they could not."""
    view = state.nodes.get(revived.node)
    if view is not None:
        state.nodes[revived.node] = replace(view, problem="")
    return drain(state, revived.node, drain=False)[1] if revived.node in state.helpless else []


def record_departure(state: RegistryState, left: NodeLeft) -> list[Message]:
    """Record that a node has said goodbye, and give an alert where it left by itself."""
    view = state.nodes.get(left.node)
    # A goodbye of an earlier incarnation says nothing about the one that is here now.
    if view is None or view.incarnation != left.incarnation or view.state == NodeState.LEFT:
        return []
    _set_state(state, left.node, NodeState.LEFT, left.at)
    text = f"node {left.node} was not taken in: {left.reason}"
    why = [Alert(text=text, node=left.node)] if left.reason else []
    return [NodeGone(node=left.node), *why]


def _set_state(state: RegistryState, node: str, now: NodeState, at: float) -> None:
    view = state.nodes.get(node)
    if view is not None and view.state != now:
        state.nodes[node] = replace(view, state=now, since=at)


def drain(state: RegistryState, node: str, *, drain: bool) -> tuple[Reply, list[Message]]:
    """Take a node out of use, or put it back.

    Raises:
        InvalidInputError: there is none of this name.
    """
    view = state.nodes.get(node)
    if view is None:
        raise InvalidInputError(f"no node {node!r}; the known ones are {list_names(state.nodes)}")
    for cause in (state.leaving, state.helpless):
        if node in cause:
            cause.remove(node)  # what is said now holds when it is back
    state.retired.pop(node, None)
    if drain == (node in state.drained):
        return Reply(text=f"{node} is {'drained' if drain else 'in use'} already; nothing changed"), []
    if drain:
        state.drained.append(node)
    else:
        state.drained.remove(node)
    if view.state in PRESENT:
        state.nodes[node] = replace(view, state=NodeState.DRAINING if drain else NodeState.UP)
        text = f"{node} gets no more work; its workers move away" if drain else f"{node} is in use again"
    else:
        text = f"{node} is {view.state}; it will {'stay out of use' if drain else 'be used'} when it comes back"
    return Reply(text=text), [NodeDrained(node=node, drain=drain)]
