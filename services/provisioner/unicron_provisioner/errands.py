"""The next call of a provider, and the consequences of its answers. Pure functions on `state`.

A pool asks one thing at a time. What was asked without an answer may have been done: the machine is looked for in a
list, and asked for again under its old id; no other is asked for in its place.
"""

from unicron.contracts.base import Answer, MachineReport, MachinesListed, Message, ProviderAnswered
from unicron.contracts.events import Alert, MachineRefused, MachineReleased
from unicron.contracts.pools import Errand, Pool, Stage, Verb
from unicron_provisioner.nodes import retire
from unicron_provisioner.settle import fail, pause_s
from unicron_provisioner.state import Machine, PoolRun, State

COMING_S, STEADY_S = 5.0, 60.0
"""Between two lists of the machines: while some are to come, and otherwise."""

HOLD_S = 60.0
"""Seconds after which a machine is to be given back again whose provider has refused that."""

OFTEN = 3
"""Refusals in a row after which a person should look at it."""

COMING = (Stage.WANTED, Stage.UNKNOWN, Stage.ASKED)


def next_errand(state: State, pool: Pool, now: float) -> bool:
    """Give the shell something to do for a pool, where it has nothing to do; return whether it has got something."""
    run = state.pools[pool.name]
    if run.errand is not None or now < run.retry or pool.observe:
        return False
    errand = _request(state, pool, run, now) or _return(state, pool, now) or _look(state, pool, run, now)
    if errand is None:
        return False
    state.number += 1
    verb, machine, replaces, instance = errand
    about = state.machines.get(machine)
    run.errand = Errand(
        number=state.number,
        pool=pool.name,
        verb=verb,
        machine=machine,
        replaces=replaces,
        instance=instance,
        rack=about.rack if about else "",
        reason=about.reason if about else "",
    )
    return True


What = tuple[Verb, str, str, str]
"""A verb, the machine, the one that it replaces, and which of several of that id."""


def _request(state: State, pool: Pool, run: PoolRun, now: float) -> What | None:
    wanted = state.of(pool.name, Stage.WANTED) if now >= run.again else {}
    for id_, machine in wanted.items():
        old = state.machines.get(machine.replaces)
        if old is not None and old.stage is Stage.RELEASING and old.after <= now:
            return Verb.REPLACE, id_, machine.replaces, ""
        return Verb.ASK, id_, "", ""
    return None


def _return(state: State, pool: Pool, now: float) -> What | None:
    for id_, machine in state.of(pool.name, Stage.RELEASING).items():
        if machine.after <= now:
            return Verb.RELEASE, id_, "", ""
    for id_, instance in state.double_instances.items():
        if id_ in state.machines and state.machines[id_].pool == pool.name:
            return Verb.RELEASE, id_, "", instance
    return None


def _look(state: State, pool: Pool, run: PoolRun, now: float) -> What | None:
    unknown = state.of(pool.name, Stage.UNKNOWN)
    often_s = COMING_S if state.of(pool.name, *COMING) else STEADY_S
    if unknown or run.look or now - run.listed >= often_s:
        return Verb.LIST, "", "", ""
    return None


def forget_answers(run: PoolRun, state: State) -> None:
    """Take it that the errand under way was or was not done, as nobody knows after a start."""
    errand, run.errand = run.errand, None
    machine = state.machines.get(errand.machine) if errand else None
    if machine and machine.stage is Stage.WANTED:
        machine.stage = Stage.UNKNOWN
    run.look = True


# --- answers ---------------------------------------------------------------------------------------------------------


def answered(state: State, pool: Pool, fact: ProviderAnswered, now: float) -> list[Message]:
    """Take in what became of a call."""
    run = state.pools[pool.name]
    errand = run.errand
    if errand is None or errand.number != fact.errand or errand.verb is Verb.LIST:
        return []
    run.errand = None
    if fact.answer is Answer.UNKNOWN:
        machine = state.machines.get(errand.machine)
        if machine and machine.stage is Stage.WANTED:
            machine.go_to(Stage.UNKNOWN, fact.reason, now)
        return _trouble(pool, run, errand.verb, fact.reason, now)
    run.troubles, run.trouble = 0, ""
    if errand.verb is Verb.RELEASE:
        return _given_back(state, pool, errand, fact, now)
    out = _forgotten(state, errand.replaces) if errand.replaces else []
    machine = state.machines.get(errand.machine)
    if machine is None or machine.stage is not Stage.WANTED:
        return out  # it has joined meanwhile
    if fact.answer is Answer.DONE:
        machine.go_to(Stage.ASKED, machine.reason, now)
        machine.taken = now
        return out
    return out + _refused(pool, run, errand.machine, fact, now)


def _refused(pool: Pool, run: PoolRun, machine: str, fact: ProviderAnswered, now: float) -> list[Message]:
    run.refusals += 1
    pause = pause_s(run.refusals)
    run.again = now + pause
    quota, out = fact.answer is Answer.QUOTA, list[Message]()
    if run.said != fact.reason:
        run.said = run.reason = fact.reason
        out.append(
            MachineRefused(pool=pool.name, machine=machine, reason=fact.reason, quota=quota, again_s=pause),
        )
    if run.refusals == OFTEN and not quota:
        out.append(Alert(text=f"pool {pool.name}: its provider ({pool.provider}) refuses machines: {fact.reason}"))
    return out


def _given_back(state: State, pool: Pool, errand: Errand, fact: ProviderAnswered, now: float) -> list[Message]:
    id_ = errand.machine
    if fact.answer is Answer.DONE:
        if errand.instance:
            state.double_instances.pop(id_, None)
            return []
        return _forgotten(state, id_)
    if errand.instance:
        state.double_instances.pop(id_, None)  # the next list names it again
    elif id_ in state.machines:
        state.machines[id_].after = now + HOLD_S
    text = f"pool {pool.name}: its provider ({pool.provider}) does not take {id_} back: {fact.reason}"
    return [Alert(text=text)]


def _forgotten(state: State, id_: str) -> list[Message]:
    machine = state.machines.get(id_)
    if machine is None:
        return []
    state.forget(id_)
    return [MachineReleased(pool=machine.pool, machine=id_, node=machine.node, reason=machine.reason)]


def _trouble(pool: Pool, run: PoolRun, verb: Verb, reason: str, now: float) -> list[Message]:
    """Pause calls of a provider that gave no usable answer; alert once."""
    run.troubles, run.failing = run.troubles + 1, verb
    run.retry = now + pause_s(run.troubles)
    run.look = True
    before, run.trouble = run.trouble, reason
    text = f"pool {pool.name}: its provider ({pool.provider}) can't be used: {reason}"
    return [] if before else [Alert(text=text)]


# --- lists -----------------------------------------------------------------------------------------------------------


def listed(state: State, pool: Pool, fact: MachinesListed, now: float) -> list[Message]:
    """Take in which machines a provider has."""
    run = state.pools[pool.name]
    if run.errand is None or run.errand.number != fact.errand or run.errand.verb is not Verb.LIST:
        return []
    run.errand = None
    if fact.problem:
        return _trouble(pool, run, Verb.LIST, fact.problem, now)
    run.look, run.listed = False, now
    if run.failing is Verb.LIST:
        run.troubles, run.trouble = 0, ""
    found: dict[str, list[MachineReport]] = {}
    for report in fact.machines:
        found.setdefault(report.machine, []).append(report)
    out: list[Message] = []
    for id_, reports in found.items():
        out += _one(state, pool, run, id_, reports, f"{fact.id}:{id_}", now)
    for id_, machine in state.of(pool.name, Stage.UNKNOWN, Stage.ASKED).items():
        if id_ not in found:
            out += _missing(run, machine, now)
    return out


def _one(
    state: State, pool: Pool, run: PoolRun, id_: str, reports: list[MachineReport], loss: str, now: float
) -> list[Message]:
    machine = state.machines.get(id_)
    if machine is None:
        return _found(state, pool, id_, reports[0], now)
    living = [report for report in reports if report.state != "ended"]
    if len(living) > 1:
        return _several(state, pool, id_, machine, living)
    if not living and machine.stage in {Stage.UNKNOWN, Stage.ASKED}:
        reason = f"{id_} has ended before it joined: {reports[0].reason or 'its provider does not say why'}"
        return fail(state, run, id_, reason, loss, now)
    if machine.stage is Stage.UNKNOWN:
        machine.go_to(Stage.ASKED, machine.reason, now)
        machine.taken = machine.taken or now
    return []


def _missing(run: PoolRun, machine: Machine, now: float) -> list[Message]:
    """Ask again, under its old id, for a machine that the provider does not have."""
    if machine.stage is Stage.ASKED:
        run.refusals += 1
        run.again = now + pause_s(run.refusals)
    machine.go_to(Stage.WANTED, "its provider does not list it", now)
    return []


def _found(state: State, pool: Pool, id_: str, report: MachineReport, now: float) -> list[Message]:
    """Take in a machine that is not known: it was given back, or was asked for in another life of the state."""
    node = report.node if state.nodes.get(report.node) and state.nodes[report.node].machine == id_ else ""
    state.machines[id_] = Machine(
        pool=pool.name, stage=Stage.UP if node else Stage.ASKED, node=node, asked=now, since=now, taken=now
    )
    if id_ in state.released:
        return retire(state, id_, Stage.RELEASING, "it was given back, and is there again", now)
    return []


def _several(state: State, pool: Pool, id_: str, machine: Machine, living: list[MachineReport]) -> list[Message]:
    """Give back all but one of the machines that have one id; which, their nodes say, or a person has to."""
    if not machine.node:
        return []  # either may be the first to join, and is used then
    keep = next((report.instance for report in living if report.node == machine.node), None)
    surplus = [report.instance for report in living if report.instance != keep]
    if keep is None or not surplus:
        text = (
            f"pool {pool.name}: its provider ({pool.provider}) has {len(living)} machines under the id {id_}, and it "
            f"can't be seen which of them is {machine.node or id_}: end the other one there"
        )
        return [Alert(text=text)]
    busy = state.busy()
    nodes = [report.node for report in living if report.instance == surplus[0]]
    if not any(node in busy for node in nodes):
        state.double_instances[id_] = surplus[0]
    return []
