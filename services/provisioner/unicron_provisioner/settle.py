"""Compares what a pool is to have with what it has, and decides. Pure functions on `state`.

It does not depend on what has just happened, so what was lost or said twice is mended at the next look.
"""

from hashlib import blake2b

from unicron.contracts.base import Message
from unicron.contracts.events import Alert, MachineAsked, MachineReleased, MachineRetired, ReplacementDelayed
from unicron.contracts.pools import Pool, Stage
from unicron_provisioner.demand import emptiest_rack
from unicron_provisioner.losses import may_replace, next_replacement_s, owe
from unicron_provisioner.nodes import retire
from unicron_provisioner.state import Machine, Owed, PoolRun, State

HELD_S = 60.0
"""Seconds for which a lost machine is kept that can't be replaced yet: it may come back."""

SETTLED_S = 3.0
"""Seconds after which a node that is drained and without work gets none by an order that was under way."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 300.0
"""After a refusal, or a call without an answer; it doubles from one to the other."""


def pause_s(times: int) -> float:
    """Return how long to wait after so many refusals in a row."""
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(times - 1, 20)))


def settle(state: State, pool: Pool, wanted: int, cause: str, now: float) -> list[Message]:
    """Decide what is asked for and what is given back, of one pool.

    Args:
        state: of the core.
        pool: its rules.
        wanted: nodes that it is to have.
        cause: id of the message that led to it; ids of machines are made of it.
        now: Unix seconds.
    """
    run = state.pools[pool.name]
    out = _give_up(state, pool, run, cause, now)
    short = wanted - len(state.serving(pool.name)) - state.expected(pool.name)
    run.owed = run.owed[: max(0, short)]
    lacking = short - state.doubtful(pool.name)
    if lacking <= 0:
        out += _drop(state, pool, run, -short)
    if pool.observe:
        return out + _plan(state, pool, run, lacking, wanted)
    if lacking > 0:
        out += _ask(state, pool, run, lacking, cause, now)
    elif not state.coming(pool.name):
        run.said = ""
    out += _retire(state, pool, lacking, wanted, now)
    return out + _release(state, pool, now)


def _give_up(state: State, pool: Pool, run: PoolRun, cause: str, now: float) -> list[Message]:
    """Give machines back that have not joined in time; each is replaced once that is done."""
    out: list[Message] = []
    for id_, machine in state.of(pool.name, Stage.ASKED).items():
        if now - machine.taken > pool.join_s:
            reason = f"{id_} has not joined within {pool.join_s:g} s"
            out += fail(state, run, id_, reason, f"{cause}:{id_}", now)
            text = (
                f"pool {pool.name}: {reason} and is given back: see its log at the provider ({pool.provider}), whether "
                "it reaches the bus and has a key; or raise join_s"
            )
            out.append(Alert(text=text))
    return out


def fail(state: State, run: PoolRun, id_: str, reason: str, loss: str, now: float) -> list[Message]:
    """Give a machine back that was promised and does not come; another is owed for it."""
    machine = state.machines[id_]
    run.refusals += 1
    run.again = now + pause_s(run.refusals)
    owe(run, Owed(replaces=machine.replaces or id_, loss=loss, reason=reason), "", now)
    return retire(state, id_, Stage.RELEASING, reason, now)


def _drop(state: State, pool: Pool, run: PoolRun, surplus: int) -> list[Message]:
    """Take requests back that nobody has made yet."""
    out: list[Message] = []
    at_work = run.errand.machine if run.errand else ""
    for id_ in [id_ for id_ in state.of(pool.name, Stage.WANTED) if id_ != at_work][:surplus]:
        state.forget(id_)
        out.append(MachineReleased(pool=pool.name, machine=id_, reason="it is not needed any more"))
    return out


def _ask(state: State, pool: Pool, run: PoolRun, lacking: int, cause: str, now: float) -> list[Message]:
    """Ask for what is lacking, as far as that is allowed now."""
    if now < run.retry:
        return delay(pool, run, lacking, f"its provider can't be used: {run.trouble}", run.retry - now)
    if now < run.again:
        if state.of(pool.name, Stage.WANTED):
            return []  # it was said when that one was refused
        return delay(pool, run, lacking, "its provider has refused, or a machine did not come", run.again - now)
    replaced, out = run.owed[:lacking], list[Message]()
    growth = lacking - len(run.owed)
    for owed in replaced:
        if not may_replace(pool, run, owed, now):
            text = f"it has replaced nodes {pool.replacements} times within an hour, its `replacements`"
            out += delay(pool, run, lacking - len(out), text, next_replacement_s(run, now), alert=True)
            break
        run.owed.remove(owed)
        out += _request(state, pool, cause, now, owed)
    for _ in range(growth):
        out += _request(state, pool, cause, now, None)
    return out


def _request(state: State, pool: Pool, cause: str, now: float, owed: Owed | None) -> list[Message]:
    state.made += 1
    digest = blake2b(f"{pool.name}:{state.made}:{cause}".encode(), digest_size=4).hexdigest()
    id_, rack = f"{pool.name}-{digest}", emptiest_rack(state, pool)
    reason, replaces = (
        (owed.reason, owed.replaces)
        if owed
        else ("it is to have more: its minimum, or what tasks can use, and spares", "")
    )
    state.machines[id_] = Machine(
        pool=pool.name, stage=Stage.WANTED, rack=rack, replaces=replaces, reason=reason, asked=now, since=now
    )
    state.pools[pool.name].reason = reason
    out: list[Message] = [
        MachineAsked(pool=pool.name, machine=id_, reason=reason, replaces=replaces, rack=rack),
    ]
    old = state.machines.get(replaces)
    if old is not None and old.stage is Stage.LOST:
        out += retire(state, replaces, Stage.RELEASING, old.reason, now)
    return out


def delay(pool: Pool, run: PoolRun, missing: int, reason: str, again_s: float, *, alert: bool = False) -> list[Message]:
    """Say why a pool lacks nodes and asks for none, once."""
    if run.said == reason:
        return []
    run.said = run.reason = reason
    out: list[Message] = [ReplacementDelayed(pool=pool.name, reason=reason, missing=missing, again_s=again_s)]
    if alert:
        text = f"pool {pool.name} lacks {missing} nodes, and waits {again_s:.0f} s: {reason}; see why nodes are lost"
        out.append(Alert(text=text))
    return out


def _plan(state: State, pool: Pool, run: PoolRun, lacking: int, wanted: int) -> list[Message]:
    """Say what would be done, once."""
    reason = f"it has {len(state.serving(pool.name))} nodes, and is to have {wanted}"
    if run.said == reason:
        return []
    run.said = run.reason = reason
    if lacking > 0:
        owed = run.owed[0].reason if run.owed else reason
        return [MachineAsked(pool=pool.name, machine="", reason=owed, planned=True)] * lacking
    return [
        MachineRetired(pool=pool.name, machine=machine, node=state.machines[machine].node, reason=reason, planned=True)
        for machine in _idle(state, pool, 0.0, -lacking)
    ]


def _idle(state: State, pool: Pool, quiet_before: float, most: int) -> list[str]:
    """Return machines whose nodes have no work since then, those longest that have it longest; so many at most."""
    up = state.of(pool.name, Stage.UP)
    quiet = {id_: node.quiet for id_ in up if (node := state.node_of(id_)) and state.serves(up[id_].node)}
    idle = [id_ for id_, since in quiet.items() if since and (not quiet_before or since <= quiet_before)]
    return sorted(idle, key=lambda id_: quiet[id_])[:most]


def _retire(state: State, pool: Pool, lacking: int, wanted: int, now: float) -> list[Message]:
    """Give back what is idle and not needed, and what is drained and was replaced."""
    out: list[Message] = []
    surplus = max(0, len(state.serving(pool.name)) - wanted)
    for id_ in _idle(state, pool, now - pool.idle_s, surplus):
        reason = f"no task has used it for {pool.idle_s:g} s, and {wanted} are enough"
        state.pools[pool.name].reason = reason
        out += retire(state, id_, Stage.RETIRING, reason, now)
    for id_, machine in state.of(pool.name, Stage.DRAINED).items() if lacking <= 0 else ():
        node = state.node_of(id_)
        if node and node.quiet and now - max(node.quiet, machine.since) > pool.idle_s:
            out += retire(state, id_, Stage.RETIRING, f"{machine.reason}, for {pool.idle_s:g} s", now)
    return out


def _release(state: State, pool: Pool, now: float) -> list[Message]:
    """Let go what has no work any more, and what is lost and does not come back."""
    out: list[Message] = []
    for id_, machine in state.of(pool.name, Stage.LOST).items():
        if now - machine.since > HELD_S:
            out += retire(state, id_, Stage.RELEASING, machine.reason, now)
    busy = state.busy()
    for id_, machine in state.of(pool.name, Stage.RETIRING).items():
        node = state.node_of(id_)
        through = node is None or (node.drained and machine.node not in busy and now - node.quiet > SETTLED_S)
        if through and now - machine.since > SETTLED_S:
            machine.go_to(Stage.RELEASING, machine.reason, now)
    return out
