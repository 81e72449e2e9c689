"""From where a task is to where it should be: which commands come next (paper section 6). Pure functions on `state`.

They are level-triggered: they look at what is wanted and what is there, not at what just happened, so a message that
was lost or came twice changes nothing that the next look would not put right.
"""

from collections.abc import Iterable

from unicron.contracts.base import Message
from unicron.contracts.commands import Regroup, StartWorker
from unicron.contracts.events import Alert
from unicron.contracts.tasks import Healing, SlotRef
from unicron_transition.deadlines import Wait
from unicron_transition.evacuation import evacuate
from unicron_transition.membership import WorkerRun, WorkerStage
from unicron_transition.orders import remove, stop_order
from unicron_transition.replicas import choose, lacks_state, leavers, lost_places, next_place, slots_by_place, surplus
from unicron_transition.retiring import retire
from unicron_transition.saves import drop_older, nothing_is_left, order_saves, search
from unicron_transition.state import TaskRun, TransitionState
from unicron_transition.swaps import knot, to_give_up, waits

GIVEN_UP = "its slot is no longer the task's"


def settle(state: TransitionState, names: Iterable[str]) -> list[Message]:
    """Return the commands that bring the tasks `names` nearer to their targets."""
    names = list(names)
    out: list[Message] = []
    for name in names:
        out += search(state, state.tasks[name])
        out += _regroup(state, state.tasks[name])
        out += _stop_unwanted(state, state.tasks[name]) + _clear(state, state.tasks[name])
    out += _untie(state, names)
    for name in names:
        out += order_saves(state, state.tasks[name]) + drop_older(state, state.tasks[name])
    out += hand_over(state, [state.tasks[name] for name in names])
    for name in names:
        out += _start_missing(state, state.tasks[name])
    # a slot that one task has given up is what another may be waiting for; the stop has gone out before the start
    freed = state.freed - state.occupied.keys()
    state.freed.clear()
    for run in state.tasks.values() if freed else ():
        if not freed.isdisjoint(run.target):
            out += _start_missing(state, run)
    return out


def hand_over(state: TransitionState, runs: list[TaskRun]) -> list[Message]:
    """Return the commands that take states from where they are not to stay: to other nodes, or else to storage."""
    return evacuate(state, runs) + retire(state, runs)


def stop(state: TransitionState, run: TaskRun, worker: WorkerRun, reason: str) -> list[Message]:
    """Count on a worker no more, and have it killed if its node is there."""
    state.drop(run, worker.worker)
    run.membership.lose(worker.worker)
    node = state.nodes.get(worker.slot.node)
    if node is None or not node.alive:
        return []
    run.states.forget(worker.worker)
    return [stop_order(state, run.spec.name, worker, reason)]


# --- memberships -----------------------------------------------------------------------------------------------------


def _regroup(state: TransitionState, run: TaskRun) -> list[Message]:
    """Order a new membership where the present one is not the best that the living workers can form."""
    if not run.state.ended and not (run.target and run.present.is_like(run.shape)):
        return _leave(state, run)
    usable = [] if run.state.ended else state.usable(run)
    # a slot that another task still holds is not waited for: that task may be waiting for one of this task's
    awaited, present = False, list[str]()
    for slot in usable:
        other = state.occupied.get(slot)
        worker = run.workers.get(other.worker) if other else None
        if worker is not None and not worker.layout.is_like(run.shape):
            continue  # it is about to be stopped
        awaited = awaited or other is None or (worker is not None and worker.stage is WorkerStage.STARTING)
        if worker is not None and worker.stage is WorkerStage.READY:
            present.append(worker.worker)
    computes = run.membership.layout.is_like(run.shape)
    intact = computes and not run.membership.leaving and run.membership.intact(run.workers)
    if awaited and (intact or not computes or run.restarts or not run.membership.survivors(run.workers)):
        # those that compute go on until the new ones are ready; those that start wait for one another, and those that
        # each membership begins anew for whoever is to be in it
        return []
    chosen, computing = choose(run, present, final=not (awaited or intact))
    if not chosen or (intact and set(chosen) == set(run.membership.group)):
        return []
    if _searches(run):
        return []
    if lost := lost_places(run):
        return _begin_anew(state, run, lost)
    forsaken = forsake(state, run, chosen)
    run.saves.search = None
    run.membership = run.membership.next(chosen, run.shape.with_workers(computing))
    return forsaken + _order(state, run)


def _searches(run: TaskRun) -> bool:
    """Return whether copies of a state that nobody has any more are being looked for."""
    search = run.saves.search
    return search is not None and (not search.over or bool(nothing_is_left(run))) and lacks_state(run)


def _begin_anew(state: TransitionState, run: TaskRun, lost: set[int]) -> list[Message]:
    """Give up what is left of a state that lacks some places."""
    if run.membership.through:
        return []  # who is through had it, and the rest of that replica is about to say the same: then it is over
    reason = f"nobody has place {min(lost)} of the state any more: the task begins anew"
    holders = [run.workers[name] for name in run.states.by_worker if name in run.workers]
    return _stop_all(state, run, holders, reason) + _regroup(state, run)  # those without a state may be enough


def _leave(state: TransitionState, run: TaskRun) -> list[Message]:
    """Have those with the state leave it behind: the task is to go on in another layout, or to go on later."""
    membership = run.membership
    whole = membership.shelf()
    if shelf := whole or run.shelf:
        in_vain = [] if whole else forsake(state, run)
        run.shelf, membership.left, run.saves.search = shelf, {}, None  # nothing that a node may yet find is newer
        return in_vain + _give_way(state, run, f"its state is kept, and the task goes on with {run.shape.degrees}")
    computes = not membership.leaving and membership.intact(run.workers)
    if membership.leaves(run.workers) or (computes and _are_awaited(state, run)):
        return []
    chosen = leavers(run)
    if not chosen and not run.target:
        return _give_way(state, run, GIVEN_UP)  # what was saved is as good
    if not chosen and (lost := lost_places(run)) and not _searches(run):
        return _begin_anew(state, run, lost)
    if not chosen:
        return []
    forsaken = forsake(state, run, chosen)
    run.membership = membership.next(chosen, run.present.with_workers(len(chosen)), leaving=True)
    return forsaken + _order(state, run)


def _give_way(state: TransitionState, run: TaskRun, reason: str) -> list[Message]:
    """Stop the workers of the old layout, and go on in the new one; or stop all, if the task is to go on later."""
    if not run.target:
        return _stop_all(state, run, list(run.workers.values()), GIVEN_UP)
    old = [worker for worker in run.workers.values() if not worker.layout.is_like(run.shape)]
    return _stop_all(state, run, old, reason) + _regroup(state, run)


def _are_awaited(state: TransitionState, run: TaskRun) -> bool:
    """Return whether workers of the layout to come are starting, or about to: in slots that nobody computes in."""
    for slot in state.usable(run):
        other = state.occupied.get(slot)
        worker = run.workers.get(other.worker) if other else None
        if other is None or (worker and worker.stage is WorkerStage.STARTING and worker.layout.is_like(run.shape)):
            return True
    return False


def release(state: TransitionState, run: TaskRun) -> list[Message]:
    """Have removed what workers of an earlier layout have left behind: living workers have a newer state, or none."""
    shelf, run.shelf = run.shelf, None
    return remove(state, run, shelf.states if shelf else [])


def forsake(state: TransitionState, run: TaskRun, staying: Iterable[str] = ()) -> list[Message]:
    """Have removed what members have left behind in vain; those that stay remove it themselves, if they live to."""
    left, run.membership.left = run.membership.left, {}
    run.membership.taken_back |= {name: left[name] for name in staying if name in left}
    return remove(state, run, [left[name] for name in sorted(left.keys() - set(staying))])


def _clear(state: TransitionState, run: TaskRun) -> list[Message]:
    """Have removed what members that are gone were to take back."""
    back = run.membership.taken_back
    return remove(state, run, [back.pop(name) for name in back.keys() - run.workers.keys()])


def _order(state: TransitionState, run: TaskRun) -> list[Message]:
    members = state.members(run)
    on: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        on.setdefault(member.node, []).append(rank)
    orders: list[Message] = [
        Regroup(
            **state.to(node),
            task=run.spec.name,
            epoch=run.membership.epoch,
            rendezvous=state.nodes[members[0].node].rendezvous,
            rendezvous_id=members[0].worker,
            world_size=len(members),
            members=[members[rank] for rank in ranks],
            ranks=ranks,
            layout=run.membership.layout,
            since=[run.membership.since_of(rank) for rank in ranks],
            leaving=run.membership.leaving,
            shelf=run.shelf if 0 in ranks else None,
            cause=run.cause if run.membership.epoch > 0 else "",
        )
        for node, ranks in on.items()
    ]
    return [*orders, *_anew(run), *run.wait(Wait.REGROUP)]


def _anew(run: TaskRun) -> list[Message]:
    """Tell that a program in place begins from its beginning, as nobody has a state of it and none was saved whole."""
    began = run.spec.heal is Healing.IN_PLACE and run.membership.epoch > 0 and bool(run.membership.met)
    if not began or run.shelf is not None or run.saves.whole or run.states.places(run.membership.group):
        return []
    text = f"of what task {run.spec.name} has computed no whole copy was saved yet: its program begins again"
    return [Alert(text=f"{text}, from a checkpoint of its own if it has one")]


# --- slots -----------------------------------------------------------------------------------------------------------


def _stop_unwanted(state: TransitionState, run: TaskRun) -> list[Message]:
    """Stop the workers whose slots are no longer the task's.

    Who has its state stays until those that go on have met: they may be dying unseen.
    """
    if run.state.ended or not (run.target or run.membership.leaves(run.workers)):
        run.membership.group = []
        return _stop_all(state, run, list(run.workers.values()), GIVEN_UP)
    group = {name for name in run.membership.group if name in run.workers}
    group = {name for name in group if run.workers[name].layout.is_like(run.present)}
    outside = [worker for name, worker in run.workers.items() if name not in group]
    kept = set(run.target) if outside else set()
    unwanted = [worker for worker in outside if worker.slot not in kept or not worker.layout.is_like(run.shape)]
    if not run.membership.has_met:
        unwanted = [worker for worker in unwanted if run.states.place(worker.worker) is None]
    return _stop_all(state, run, unwanted, GIVEN_UP)


def _stop_all(state: TransitionState, run: TaskRun, workers: list[WorkerRun], reason: str) -> list[Message]:
    return [message for worker in workers for message in stop(state, run, worker, reason)]


def _untie(state: TransitionState, names: list[str]) -> list[Message]:
    """Let a task give slots up where each of several waits for slots that another of them computes in."""
    out: list[Message] = []
    if not any(waits(state, state.tasks[name]) for name in names):
        return out
    while tied := knot(state):
        run, workers, reason = to_give_up(state, tied)
        if not workers:
            break  # a state is being handed over; then there is more to give up
        out += _stop_all(state, run, workers, reason)
        out += _regroup(state, run)
    return out


def _change_places(
    state: TransitionState, run: TaskRun, usable: list[SlotRef]
) -> tuple[list[Message], list[WorkerRun]]:
    """Stop workers that are spare while replicas lack other places; return also who stays in the task's slots."""
    occupants = [(slot, state.occupied.get(slot)) for slot in usable]
    workers = [run.workers[other.worker] for _, other in occupants if other and other.worker in run.workers]
    there = [worker for worker in workers if worker.layout.is_like(run.shape)]
    if run.shape.replica_workers == 1 or len(there) < len(usable):
        return [], there
    spare = surplus(run, there)
    reason = "its place of the model is there often enough, and its slot is needed for another"
    return _stop_all(state, run, spare, reason), [worker for worker in there if worker not in spare]


def _start_missing(state: TransitionState, run: TaskRun) -> list[Message]:
    usable = [] if run.state.ended else state.usable(run)
    out, there = _change_places(state, run, usable)
    started = list[WorkerRun]()
    for slot in usable:
        if slot in state.occupied:
            continue
        run.started += 1
        place = next_place(run, there, slot, len(usable) // run.shape.replica_workers)
        worker = WorkerRun(worker=f"{run.spec.name}-{run.started}", slot=slot, place=place, layout=run.shape)
        there.append(worker)
        started.append(worker)
        state.add(run, worker)
    slots = slots_by_place(run) if started and run.spec.heal is Healing.IN_PLACE else []
    for worker in started:
        out.append(_start_order(state, run, worker, slots))
        out += run.wait(Wait.START, worker.worker)
    return out


def _start_order(state: TransitionState, run: TaskRun, worker: WorkerRun, slots: list[SlotRef]) -> StartWorker:
    """Return the order for a worker.

    Args:
        state: of the service.
        run: the task.
        worker: of it.
        slots: of each place, where its script reads who is beside it before there is a membership.
    """
    node = worker.slot.node
    nodes = list(dict.fromkeys(slot.node for slot in slots)) or [node]
    return StartWorker(
        **state.to(worker.slot.node),
        slot=worker.slot.slot,
        worker=worker.worker,
        task=run.spec.name,
        spec=run.spec,
        place=worker.place,
        layout=run.shape,
        cause=run.cause,
        wait_s=run.wait_s,
        uncarried=run.uncarried,
        local_slots=[slot.slot for slot in slots if slot.node == node],
        group=nodes.index(node),
        groups=len(nodes),
    )
