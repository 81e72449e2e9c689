"""Who saves states where, and what is found of them when nobody has a task's state any more. Pure functions.

Each place's state is to lie in the memories of `COPIES` nodes (GEMINI, SOSP 2023). Where replicas are on different
nodes each of them saves its own, and nothing travels; else other nodes keep copies.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from unicron.contracts.base import Message
from unicron.contracts.commands import FindStates, SaveStates
from unicron.contracts.events import Alert, StateUnusable
from unicron.contracts.states import COPIES, SAVED, TURNS, Keeper, Saver, Shelf, StateRef
from unicron.contracts.tasks import Healing
from unicron_transition.deadlines import Deadline, Wait
from unicron_transition.holders import Search
from unicron_transition.orders import drop_order
from unicron_transition.replicas import lacks_state
from unicron_transition.state import TaskRun, TransitionState
from unicron_transition.storing import look, no_rewind, order

# --- who saves -------------------------------------------------------------------------------------------------------


def order_saves(state: TransitionState, run: TaskRun) -> list[Message]:
    """Return the commands that have the right workers save their states, where others did or none."""
    if run.state.ended or run.membership.through:
        return []
    saves, wanted = run.saves, _wanted(state, run)
    out: list[Message] = []
    for node in sorted({*wanted, *saves.ordered}):
        savers = wanted.get(node, [])
        if savers == saves.ordered.get(node, []) or not state.is_there(node):
            continue
        saves.ordered[node] = savers
        out.append(SaveStates(**state.to(node), task=run.spec.name, savers=savers))
        for saver in savers:
            saves.secured.pop(saver.worker, None)
            saves.wrote[saver.worker] = node
            at = saves.held.setdefault(saver.worker, {})
            at.update(dict.fromkeys([node, *(keeper.node for keeper in saver.keepers)]))
            state.note(run, at)
    saves.ordered = {node: savers for node, savers in saves.ordered.items() if savers}
    return out


def _chosen(run: TaskRun) -> list[tuple[str, ...]]:
    """Return the replicas that save: the first, and others that have each place on yet another node."""
    chosen: list[tuple[str, ...]] = []
    nodes: list[set[str]] = []
    for replica in run.membership.replicas():
        there = [run.workers[name].slot.node for name in replica if name in run.workers]
        if len(there) < len(replica):
            continue
        if not chosen:
            chosen, nodes = [replica], [{node} for node in there]
        elif all(node not in others for node, others in zip(there, nodes, strict=True)):
            chosen.append(replica)
            for node, others in zip(there, nodes, strict=True):
                others.add(node)
        if len(chosen) == COPIES:
            break
    return chosen


def _wanted(state: TransitionState, run: TaskRun) -> dict[str, list[Saver]]:
    """Return who is to save on which node, and with copies where; note whether there are fewer than there should be."""
    run.saves.short = False
    if not run.target or run.membership.leaving or run.spec.heal is Healing.RESTART or run.uncarried:
        return {}
    chosen = _chosen(run)
    found: dict[str, list[Saver]] = {}
    for index, replica in enumerate(chosen):
        for place, name in enumerate(replica):
            node = run.workers[name].slot.node
            taken = {run.workers[each[place]].slot.node for each in chosen}
            lacking = COPIES - len(chosen) if index == 0 else 0
            keepers = _keepers(state, node, taken, lacking)
            run.saves.short = run.saves.short or (len(keepers) < lacking and not run.restarts)
            store = order(run) if index == 0 and not run.restarts else None
            found.setdefault(node, []).append(Saver(worker=name, keepers=keepers, store=store))
    return found


def _keepers(state: TransitionState, node: str, taken: set[str], count: int) -> list[Keeper]:
    return [each for each in state.partners(node) if each.node not in taken][:count]


def secured(run: TaskRun, worker: str, node: str, nodes: list[str]) -> None:
    """Note that a worker's copies are whole: on those nodes that the newest order names, or it is of an earlier one."""
    for saver in run.saves.ordered.get(node, ()):
        if saver.worker == worker and [keeper.node for keeper in saver.keepers] == nodes:
            run.saves.secured[worker], run.saves.whole = None, True


def drop_older(state: TransitionState, run: TaskRun) -> list[Message]:
    """Return the commands that remove what others saved, once the copies of all who save now are whole."""
    orders = [(node, saver) for node, each in run.saves.ordered.items() for saver in each]
    savers = {saver.worker: (node, saver) for node, saver in orders if saver.worker}  # none: it is told when it is back
    if not savers or not run.saves.secured.keys() >= savers.keys() or not run.membership.has_met:
        return []
    run.saves.tried, run.saves.before = [], None
    current = {name: {node, *(keeper.node for keeper in saver.keepers)} for name, (node, saver) in savers.items()}
    return _drop_all_but(state, run, current)


def drop_saved(state: TransitionState, run: TaskRun) -> list[Message]:
    """Have all that was saved removed, and nothing saved any more."""
    run.saves.ordered, run.saves.search = {}, None
    return _drop_all_but(state, run, {})


def _drop_all_but(state: TransitionState, run: TaskRun, current: dict[str, set[str]]) -> list[Message]:
    names: dict[str, list[str]] = {}
    ended: dict[str, list[str]] = {}
    for worker, nodes in run.saves.held.items():
        for node in [node for node in nodes if node not in current.get(worker, ())]:
            del nodes[node]
            if worker in run.workers:
                names.setdefault(node, []).extend(f"{worker}.{turn}.{SAVED}" for turn in range(TURNS))
            else:
                ended.setdefault(node, []).append(worker)
    run.saves.held = {worker: nodes for worker, nodes in run.saves.held.items() if nodes}
    run.saves.wrote = {worker: node for worker, node in run.saves.wrote.items() if worker in run.saves.held}
    there = [node for node in sorted({*names, *ended}) if state.is_there(node)]
    return [drop_order(state, run.spec.name, node, names.get(node, ()), ended.get(node, ())) for node in there]


# --- who has what ----------------------------------------------------------------------------------------------------


def search(state: TransitionState, run: TaskRun) -> list[Message]:
    """Ask the nodes that may have copies, where nobody living has some part of a task's state."""
    if run.state.ended or not lacks_state(run):
        run.saves.search = None
        return []
    if run.saves.search is not None:
        return []
    asked = sorted({node for nodes in run.saves.held.values() for node in nodes if state.is_there(node)})
    run.saves.searches += 1
    run.saves.search = Search(number=run.saves.searches, asked=dict.fromkeys(asked))
    orders: list[Message] = [
        FindStates(**state.to(node), task=run.spec.name, search=run.saves.searches) for node in asked
    ]
    return orders or conclude(state, run)


def found(state: TransitionState, run: TaskRun, node: str, number: int, states: Iterable[StateRef]) -> list[Message]:
    """Take in what a node has."""
    search = run.saves.search
    if search is None or search.number != number or node not in search.asked:
        return []
    del search.asked[node]
    search.found += [ref for ref in states if node in run.saves.held.get(ref.location.worker, ())]
    return conclude(state, run)


def forget_node(state: TransitionState, run: TaskRun, node: str) -> list[Message]:
    """Wait for the answer of a node no more."""
    run.saves.ordered.pop(node, None)
    out = no_rewind(run, node, f"{node}, which looked for it, is gone")
    search = run.saves.search
    if search is None or (node not in search.asked and search.looking != node):
        return out
    search.asked.pop(node, None)
    search.looking = "" if search.looking == node else search.looking
    return out + conclude(state, run)


def count_on(state: TransitionState, node: str, names: Iterable[str]) -> None:
    """Note what a node that joins has of tasks' states, known before or not: it goes when newer ones are whole."""
    for name in names:
        worker, kind = _parts(name)
        task, _, number = worker.rpartition("-")
        run = state.tasks.get(task)
        if kind == SAVED and run and not run.state.ended and number.isdecimal() and int(number) > run.before:
            run.saves.held.setdefault(worker, {})[node] = None
            state.note(run, [node])


def forget_orders(run: TaskRun, node: str) -> None:
    """Take it that an agent that joins saves others than it was told to: it may have heard nothing, or all of it."""
    run.saves.ordered[node] = [Saver(worker="")]


def conclude(state: TransitionState, run: TaskRun) -> list[Message]:
    """Go on with the newest state that is whole, once all have answered; or wait for nodes that may have more."""
    search = run.saves.search
    if search is None or search.asked or search.over or search.looking:
        return []
    before = run.saves.before
    run.shelf = _newest(ref for ref in search.found if before is None or ref.iteration < before)
    if run.shelf is not None:
        run.membership.broken, run.saves.search = True, None
        return [Deadline(Wait.STATES, run.spec.name).cancel()]
    away = any(not state.is_there(node) for nodes in run.saves.held.values() for node in nodes)
    if not away:
        if not run.restarts:
            return look(state, run)
        search.over = True  # what is in its folder of checkpoints is its script's affair
        text = f"what task {run.spec.name} had saved in memory is gone with its nodes: its program begins again"
        return [Alert(text=f"{text}, from a checkpoint of its own if it has one")]
    return [Deadline(Wait.REGROUP, run.spec.name).cancel(), Deadline(Wait.STATES, run.spec.name).set()]


def give_up_waiting(state: TransitionState, run: TaskRun) -> list[Message]:
    """Count no more on what nodes have that are gone; ask the others again: what was on its way has arrived since."""
    on = run.saves.search
    if on is None or on.asked or on.looking or on.over:
        return []
    for nodes in run.saves.held.values():
        for node in [node for node in nodes if not state.is_there(node)]:
            del nodes[node]
    run.saves.search = None
    return search(state, run)


def _newest(states: Iterable[StateRef]) -> Shelf | None:
    """Return the newest iteration of which every place is there, in one layout."""
    by_version: dict[tuple[int, str], list[StateRef]] = {}
    for ref in states:
        by_version.setdefault((ref.iteration, ref.layout.degrees), []).append(ref)
    for _, refs in sorted(by_version.items(), key=lambda each: each[0], reverse=True):
        if len({ref.place for ref in refs}) == refs[0].layout.replica_workers:
            return Shelf(layout=refs[0].layout, iteration=refs[0].iteration, states=refs)
    return None


def reject(state: TransitionState, run: TaskRun, bad: StateRef) -> list[Message]:
    """Have a copy removed that is not what it should be, and go on without it."""
    where, name = bad.location.node, bad.location.name
    out: list[Message] = [drop_order(state, run.spec.name, where, [name])] if state.is_there(where) else []
    if run.shelf is None:
        return out
    left = [ref for ref in run.shelf.states if (ref.location.node, ref.location.name) != (where, name)]
    if len(left) < len(run.shelf.states):
        run.membership.broken = True  # its members were told of more
        whole = len({ref.place for ref in left}) == run.shelf.layout.replica_workers
        run.shelf = replace(run.shelf, states=left) if whole else None
    return out


def disown(state: TransitionState, run: TaskRun, worker: str, node: str) -> list[Message]:
    """Have copies of what a worker saved removed that is in doubt; on its own `node` they are, and it saves anew."""
    forget_orders(run, node)
    names = [f"{worker}.{turn}.{SAVED}" for turn in range(TURNS)]
    shelved = run.shelf.states if run.shelf else ()
    out: list[Message] = []
    for ref in [each for each in shelved if each.location.worker == worker]:
        out += reject(state, run, ref)
    run.saves.search = None  # what was found may be among them
    others = [each for each in run.saves.held.get(worker, ()) if each != node and state.is_there(each)]
    return out + [drop_order(state, run.spec.name, each, names) for each in others]


def rule_out(run: TaskRun, fact: StateUnusable) -> None:
    """Note that a state which was taken is no good: nobody has one any more, and an older one is looked for."""
    run.saves.tried.append(f"iteration {fact.iteration} from {fact.copies} ({fact.reason})")
    run.saves.before, run.saves.search, run.shelf = fact.iteration, None, None
    run.states.by_worker.clear()
    run.membership.broken = True


def nothing_is_left(run: TaskRun) -> str:
    """Return why a task can't go on whose states were all tried in vain; empty as long as it may.

    A script that is healed in place begins again from its top: as often as it is said of all memberships that fail.
    """
    search = run.saves.search
    if search is None or not search.over or not run.saves.tried or run.spec.heal is Healing.IN_PLACE:
        return ""
    return f"no copy of its state can be used: {'; '.join(run.saves.tried)}; nothing older is there"


def is_saved(state: TransitionState, node: str, name: str) -> bool:
    """Return whether somebody may still want a state that was saved under this name and lies on a node."""
    worker, kind = _parts(name)
    return kind == SAVED and any(node in run.saves.held.get(worker, ()) for run in state.tasks.values())


def _parts(name: str) -> tuple[str, str]:
    """Return of a state, as its name tells, the worker and the kind; a node may say any name."""
    return name.partition(".")[0], name.rpartition(".")[2]
