"""What a node must be like to be taken in."""

from unicron.checks import Problem, is_token
from unicron.contracts.events import NodeJoined
from unicron.contracts.queries import NodeView
from unicron.services import NAMED

BEATS = 2000
"""Heartbeats a second that all nodes together are to send at most: the detector takes 30 us for each."""

OFTEN_S, RARELY_S = 0.5, 9.0
"""As often nodes beat while that is fewer, and at least; who says nothing for ten seconds is not healthy (`SILENT_S`).
"""

TOO_OFTEN = 1.25
"""How much more rarely a node must be to beat than it was told before it is told again."""

RESERVED = frozenset({*NAMED, "console"})
"""Names of services: a node under one of them would answer its queries."""


def heartbeat_s(nodes: int) -> float:
    """Return how often one of so many nodes is to beat, in seconds; 0 where it may do as it likes.

    They are the second way of noticing that a node is lost; that its connection ends, the server tells at once.
    """
    between = min(nodes / BEATS, RARELY_S)
    return between if between > OFTEN_S else 0.0


def refusal(joined: NodeJoined, there: NodeView) -> str:
    """Return why a node can't join as long as one of its name is there; empty where it is that one itself.

    Who took over would leave workers that nobody owns. An agent that is started again where it was has the same home.
    """
    if not (joined.home and there.home) or joined.home == there.home:
        return ""
    return (
        f"a node called {there.node} is there already, on host {there.host}: give this one another --node, or end that "
        "agent first"
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
