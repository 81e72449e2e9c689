"""Nodes that join, leave and are lost, as the provisioner takes them in. Pure functions on `state`."""

from unicron.contracts.base import Message
from unicron.contracts.events import (
    Alert,
    FailureDetected,
    MachineDelivered,
    MachineRetired,
    NodeAdmitted,
    NodeDrained,
    NodeGone,
    NodeLeaving,
)
from unicron.contracts.failures import Severity
from unicron.contracts.pools import Stage
from unicron_provisioner.losses import owe
from unicron_provisioner.state import Machine, Node, Owed, State


def retire(state: State, id_: str, stage: Stage, reason: str, now: float) -> list[Message]:
    """Decide to give a machine back: once its node has no work (`RETIRING`), or now (`RELEASING`)."""
    machine = state.machines[id_]
    machine.go_to(stage, reason, now)
    node = machine.node if state.node_of(id_) else ""
    return [MachineRetired(pool=machine.pool, machine=id_, node=node, reason=reason)]


def admitted(state: State, fact: NodeAdmitted, now: float) -> list[Message]:
    """Take in a node that has joined, or has come back."""
    before, out = state.nodes.get(fact.node), list[Message]()
    if before and before.machine != fact.machine:
        out = _out(state, fact.node, f"another machine is {fact.node} now", fact.id, now, up=False)
    state.nodes[fact.node] = Node(
        pool=fact.pool,
        machine=fact.machine,
        rack=fact.rack,
        slots=len(fact.slots),
        drained=bool(before and before.drained and before.machine == fact.machine),
        quiet=now,
    )
    state.note_quiet(now)
    state.doubles.pop(fact.node, None)
    run = state.pools.get(fact.pool)
    if run:
        run.owed = [each for each in run.owed if each.replaces not in {fact.node, fact.machine}]
    if not fact.machine or run is None or run.observe:
        return out  # a person has started it
    machine = state.machines.get(fact.machine)
    if machine is None:
        return out + _unknown(state, fact, now)
    if machine.node not in {"", fact.node} and _is_there(state, machine.node, fact.machine):
        return out + _double(state, fact, machine)
    run.refusals, run.again = 0, 0.0
    return out + _joined(state, fact, machine, now)


def _joined(state: State, fact: NodeAdmitted, machine: Machine, now: float) -> list[Message]:
    """Take in that a machine has joined, or has come back."""
    machine.node, machine.rack = fact.node, fact.rack or machine.rack
    if machine.stage is Stage.RELEASING:
        return retire(state, fact.machine, Stage.RELEASING, machine.reason, now)
    if machine.stage in {Stage.DRAINED, Stage.RETIRING}:
        return []
    new = machine.stage not in {Stage.UP, Stage.LOST}
    machine.go_to(Stage.UP, "it has joined" if new else "it has joined again", now)
    delivered = MachineDelivered(
        pool=machine.pool,
        machine=fact.machine,
        node=fact.node,
        seconds=max(0.0, now - machine.asked),
        replaces=machine.replaces,
    )
    return [delivered] if new else []


def _is_there(state: State, node: str, machine: str) -> bool:
    other = state.nodes.get(node)
    return other is not None and other.up and other.machine == machine


def _unknown(state: State, fact: NodeAdmitted, now: float) -> list[Message]:
    """Take in a machine that is not known: given back before it came, or asked for in another life of the state."""
    machine = Machine(
        pool=fact.pool, stage=Stage.UP, node=fact.node, rack=fact.rack, reason="found", asked=now, since=now
    )
    late = fact.machine in state.released
    state.machines[fact.machine] = machine
    return retire(state, fact.machine, Stage.RELEASING, "it was given back before it joined", now) if late else []


def _double(state: State, fact: NodeAdmitted, machine: Machine) -> list[Message]:
    """Keep a second node under one machine's id out of use, until it is given back or a person ends it."""
    state.doubles[fact.node] = fact.machine
    state.pools[machine.pool].look = True
    reason = f"{machine.node} is {fact.machine} already"
    text = (
        f"pool {machine.pool}: {fact.node} says that it is machine {fact.machine}, and so does {machine.node}: it gets "
        "no work; if the provider does not list it as a second one, end that agent"
    )
    return [
        MachineRetired(pool=machine.pool, machine=fact.machine, node=fact.node, reason=reason),
        Alert(text=text, node=fact.node),
    ]


def lost(state: State, fact: FailureDetected, now: float) -> list[Message]:
    """Take in that a node was given up."""
    if fact.severity is not Severity.SEV1 or fact.node not in state.nodes:
        return []
    return _out(state, fact.node, f"{fact.node} is lost: {fact.reason or fact.status}", fact.id, now, up=False)


LEFT = "(nodes that have left)"
"""Stands for a rack: what says goodbye within a moment, as when a cluster is taken down, is one event."""


def gone(state: State, fact: NodeGone, now: float) -> list[Message]:
    """Take in that a node has said goodbye."""
    if fact.node not in state.nodes:
        return []
    state.nodes[fact.node].rack = LEFT
    out = _out(state, fact.node, f"{fact.node} has left", fact.id, now, up=False)
    machine = state.machines.get(state.nodes[fact.node].machine)
    if machine and machine.node == fact.node and machine.stage is Stage.LOST:  # it has left, and does not come back
        out += retire(state, state.nodes[fact.node].machine, Stage.RELEASING, machine.reason, now)
    return out


def leaving(state: State, fact: NodeLeaving, now: float) -> list[Message]:
    """Take in that a node is to go; the registry drains it."""
    if fact.node not in state.nodes:
        return []
    return _out(state, fact.node, f"{fact.node} is to go", fact.id, now, up=True)


def drained(state: State, fact: NodeDrained, now: float) -> list[Message]:
    """Take in that a node gets no work any more, or does again."""
    node = state.nodes.get(fact.node)
    if node is None:
        return []
    if fact.drain:
        return _out(state, fact.node, f"{fact.node} is drained", fact.id, now, up=True)
    node.drained, node.quiet = False, now
    if run := state.pools.get(node.pool):
        run.owed = [each for each in run.owed if each.replaces not in {fact.node, node.machine}]
    machine = state.machines.get(node.machine)
    if machine and machine.node == fact.node and machine.stage in {Stage.DRAINED, Stage.RETIRING}:
        machine.go_to(Stage.UP, "it is in use again", now)
    return []


def _out(state: State, name: str, reason: str, cause: str, now: float, *, up: bool) -> list[Message]:
    """Take a node out of those that its pool has: it is to be replaced, once.

    Args:
        state: of the core.
        name: of the node.
        reason: what has happened to it.
        cause: id of the fact that says so.
        now: Unix seconds.
        up: whether it is still there, without new work.
    """
    node, served = state.nodes[name], state.serves(name)
    machine = state.machines.get(node.machine) if node.machine else None
    mine = machine if machine and machine.node == name else None
    if node.up and not node.drained:
        node.quiet = now
    node.up, node.drained = up and node.up, node.drained or up
    if served and node.pool in state.pools:
        replaces = node.machine if mine else name
        owe(state.pools[node.pool], Owed(replaces=replaces, loss=cause, reason=reason), node.rack, now)
    if not node.up:
        state.doubles.pop(name, None)
    if mine is None:
        return []
    if not node.up and mine.stage in {Stage.DRAINED, Stage.RETIRING}:
        return retire(state, node.machine, Stage.RELEASING, mine.reason, now)
    if mine.stage is Stage.UP:
        mine.go_to(Stage.DRAINED if node.up else Stage.LOST, reason, now)
    return []
