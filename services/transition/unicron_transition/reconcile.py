"""From where a task is to where it should be: which commands come next (paper section 6). Pure functions on `state`.

They are level-triggered: they look at what is wanted and what is there, not at what just happened, so a message that
was lost or came twice changes nothing that the next look would not put right.
"""

from collections.abc import Iterable

from msgspec.structs import replace

from unicron.contracts.base import Message
from unicron.contracts.commands import Regroup, StartWorker
from unicron.contracts.events import Alert
from unicron.contracts.tasks import Healing, SlotRef
from unicron.contracts.time_limits import TRIAL_S
from unicron.healing import healed_by, way_of
from unicron_transition.deadlines import TIMEOUT_S, Deadline, WaitKind
from unicron_transition.membership import TaskMembership, WorkerRun
from unicron_transition.moves import MoveCause, move_task
from unicron_transition.orders import stop_order
from unicron_transition.state import TaskRun, TransitionState
from unicron_transition.swaps import choose_workers_to_stop, find_wait_cycle, slots_waited_for

GIVEN_UP = "its slot is no longer the task's"
UNTRIED = "no process has shown that it could take a rank's place"


def reconcile(state: TransitionState, names: Iterable[str]) -> list[Message]:
    """Return the commands that bring the tasks `names` nearer to their targets."""
    runs = [state.tasks[name] for name in names]
    out: list[Message] = []
    for run in runs:
        out += run.snapshots.start_search(state, run)  # what no worker has, and what nodes and storage may have
        out += _regroup(state, run)  # the best membership that can be formed, and the present one
        out += _stop_unwanted(state, run)  # workers, and slots of the plan
    out += _break_slot_cycle(state, runs)  # slots that tasks hold, and that others of them wait for
    for run in runs:
        out += run.snapshots.order_saves(state, run)  # who is to save where, and who was ordered to; what is of no use
    out += move_snapshots(state, runs)  # where snapshots are parked, and where they are safe
    for run in runs:
        out += _start_missing(state, run)  # slots of the plan, and workers
    # a slot that one task has given up is what another may be waiting for; the stop has gone out before the start
    freed = state.freed - state.occupied.keys()
    state.freed.clear()
    for run in state.tasks.values() if freed else ():
        if not freed.isdisjoint(run.target):
            out += _start_missing(state, run)
    return out


def move_snapshots(state: TransitionState, runs: Iterable[TaskRun]) -> list[Message]:
    """Return the commands that move parked snapshots off draining nodes, and to storage."""
    out: list[Message] = []
    for run in runs:
        out += run.snapshots.order_moves(state, run)
        state.index_nodes(run, run.snapshots.nodes())
    return out


def stop_worker(state: TransitionState, run: TaskRun, worker: WorkerRun, reason: str) -> list[Message]:
    """Remove a worker from its task; return the command that kills it, if its node is there."""
    state.drop_worker(run, worker.worker)
    run.membership.record_loss(worker.worker)
    if not state.is_there(worker.slot.node):
        return []
    run.holders.pop(worker.worker, None)
    return [stop_order(state, run.spec.name, worker, reason)]


def rewind(state: TransitionState, run: TaskRun) -> list[Message]:
    """Discard a task's state for the earlier checkpoint that its user wants, once that has been found."""
    rewind, snapshots = run.snapshots.rewind, run.snapshots
    if rewind is None or rewind.stored is None:
        return []
    reason = f"a user has it go back to iteration {rewind.stored.iteration}"
    out = snapshots.release_parked(state, run) + snapshots.drop_exported(state, run)
    out += _stop_all(state, run, list(run.workers.values()), reason)
    out += snapshots.drop_saved(state, run)
    snapshots.park_rewound(run, rewind.stored)
    return out + move_task(state, run, MoveCause.FAILURE, reason)


def begin_anew(state: TransitionState, run: TaskRun, reason: str) -> list[Message]:
    """Stop all workers of a task, in whose place others come."""
    stops = _stop_all(state, run, list(run.workers.values()), reason)
    return stops + move_task(state, run, MoveCause.FAILURE, reason)


# --- memberships -----------------------------------------------------------------------------------------------------


def _regroup(state: TransitionState, run: TaskRun) -> list[Message]:
    """Order a new membership where the present one is not the best that the living workers can form."""
    if run.state.ended:
        return []
    if run.changes_layout:
        return _export_state(state, run)
    better = run.better_membership(state.usable(run.target), state.occupied)
    if better is None or run.snapshots.is_searching(run):
        return []
    if lost := _lost_places(run):
        return _discard_state(state, run, _without(lost))
    if run.is_untried and len({name in run.membership.met for name in better.group}) > 1:
        return _await_trial(state, run) if run.is_on_trial else _discard_state(state, run, _anew(UNTRIED))
    return _order_membership(state, run, better)


def _lost_places(run: TaskRun) -> set[int]:
    return set() if run.snapshots.parked else run.lost_places()


def _without(lost: set[int]) -> str:
    return _anew(f"nobody has place {min(lost)} of the state any more")


def _anew(why: str) -> str:
    return f"{why}: the task begins anew"


def _await_trial(state: TransitionState, run: TaskRun) -> list[Message]:
    """Have the workers wait for what the trial that is under way shows, as long as what they would do again took."""
    if run.awaits_trial:
        return []
    run.awaits_trial = True
    wait_s = min(max(TIMEOUT_S[WaitKind.TRIAL], state.now - run.begun_at), TRIAL_S)
    text = (
        f"task {run.spec.name} lost a rank before it was known whether another process can take its place: the others "
        f"wait for the trial that is under way, for {wait_s:.0f} s at most"
    )
    return [Alert(text=text, task=run.spec.name), Deadline(WaitKind.TRIAL, run.spec.name).set(wait_s)]


def end_trial(state: TransitionState, run: TaskRun, why: str = "") -> list[Message]:
    """Wait for no trial any more.

    Args:
        state: of the service.
        run: the task.
        why: nobody can take the place of a rank, so that who waits for that begins anew; empty where somebody can.
    """
    out: list[Message] = [Deadline(WaitKind.TRIAL, run.spec.name).cancel()] if run.awaits_trial else []
    run.trial, run.trial_node, run.awaits_trial = "", "", False
    return out + (begin_anew(state, run, _anew(why)) if why and run.lacks_members else [])


def _discard_state(state: TransitionState, run: TaskRun, reason: str) -> list[Message]:
    """Stop the workers that may hold a state, or what is left of one, that can't be gone on with."""
    if run.membership.through:
        return []  # who is through had it, and the rest of that replica is about to say the same: then it is over
    holders = [worker for name, worker in run.workers.items() if name in run.holders or worker.called]
    return _stop_all(state, run, holders, reason) + _regroup(state, run)  # those without a state may be enough


def _export_state(state: TransitionState, run: TaskRun) -> list[Message]:
    """Order the workers that hold the state to export it, as the task will continue in another layout or later."""
    out = run.snapshots.park_exported(state, run)
    if run.snapshots.parked:
        return out + _stop_old_layout(state, run, f"its state is kept, and the task goes on with {run.shape.degrees}")
    if run.is_exporting(state.usable(run.target), state.occupied):
        return []
    if last := run.last_membership():
        return _order_membership(state, run, last)
    if not run.target:
        return _give_up_slots(state, run)  # what was saved is as good
    lost = _lost_places(run)
    return _discard_state(state, run, _without(lost)) if lost and not run.snapshots.is_searching(run) else []


def _stop_old_layout(state: TransitionState, run: TaskRun, reason: str) -> list[Message]:
    """Stop the workers of the old layout, and regroup in the new one; stop all if the task has no slots now."""
    if not run.target:
        return _give_up_slots(state, run)
    old = [worker for worker in run.workers.values() if not worker.layout.is_like(run.shape)]
    return _stop_all(state, run, old, reason) + _regroup(state, run)


def _order_membership(state: TransitionState, run: TaskRun, membership: TaskMembership) -> list[Message]:
    """Order a membership, and remove the states that members of the previous one exported in vain."""
    in_vain = run.snapshots.drop_exported(state, run, membership.group)
    run.snapshots.search = None
    run.membership = membership
    for name in membership.group:
        run.workers[name].called = True
    return in_vain + _regroup_orders(state, run)


def _regroup_orders(state: TransitionState, run: TaskRun) -> list[Message]:
    members, membership = state.members(run), run.membership
    since = membership.unchanged_since(range(len(members)))
    on: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        on.setdefault(member.node, []).append(rank)
    orders: list[Message] = [
        Regroup(
            **state.command_fields(node),
            task=run.spec.name,
            epoch=membership.epoch,
            rendezvous=state.nodes[members[0].node].rendezvous,
            rendezvous_id=members[0].worker,
            world_size=len(members),
            members=[members[rank] for rank in ranks],
            ranks=ranks,
            layout=membership.layout,
            since=[since[rank] for rank in ranks],
            leaving=membership.leaving,
            shelf=run.snapshots.parked if 0 in ranks else None,
            cause=run.cause if membership.epoch > 0 else "",
        )
        for node, ranks in on.items()
    ]
    return [*orders, *_alert_restart_from_scratch(run), *run.request_timer(WaitKind.REGROUP)]


def _alert_restart_from_scratch(run: TaskRun) -> list[Message]:
    """Alert that a script healed in place restarts from its beginning, as no complete state of it exists."""
    began = way_of(run.spec).begins_again and run.membership.epoch > 0 and bool(run.membership.met)
    membership = run.membership
    goes_on = run.snapshots.saved_whole or any(name in membership.met for name in membership.group)
    if not began or goes_on or run.held_places(membership.group):
        return []
    why = "no copy of its state is complete"
    if not run.is_replaceable:
        why = "no other process can go on with what its ranks had" if run.uncarried else UNTRIED
    early = "as it did at first: up to its first loop it finds no file made since"
    later = "from a checkpoint of its own if it has one"
    whence = early if run.is_early else later
    text = f"the program of task {run.spec.name} begins again, {whence}: {why}"
    return [Alert(text=text, task=run.spec.name)]


# --- slots -----------------------------------------------------------------------------------------------------------


def _stop_unwanted(state: TransitionState, run: TaskRun) -> list[Message]:
    """Stop the workers whose slots are no longer the task's."""
    if run.state.ended or not (run.target or run.membership.is_exporting(run.workers)):
        return _give_up_slots(state, run)
    return _stop_all(state, run, run.unneeded_workers(), GIVEN_UP)


def _give_up_slots(state: TransitionState, run: TaskRun) -> list[Message]:
    """Stop the workers of a task without slots, but none that has reported the end of the last iteration.

    The others are about to report it, too, unless they have exported their states: then they wait.
    """
    through = {} if run.state.ended else run.membership.through
    if through and not run.snapshots.parked:
        return []
    run.membership.group = []
    return _stop_all(state, run, [worker for name, worker in run.workers.items() if name not in through], GIVEN_UP)


def _stop_all(state: TransitionState, run: TaskRun, workers: list[WorkerRun], reason: str) -> list[Message]:
    return [message for worker in workers for message in stop_worker(state, run, worker, reason)]


def _break_slot_cycle(state: TransitionState, runs: Iterable[TaskRun]) -> list[Message]:
    """Stop workers of a task where several tasks each wait for slots in which another of them computes."""
    out: list[Message] = []
    if not any(slots_waited_for(state, run) for run in runs):
        return out
    while tied := find_wait_cycle(state):
        run, workers, reason = choose_workers_to_stop(state, tied)
        if not workers:
            break  # a state is being handed over; then there is more to give up
        out += _stop_all(state, run, workers, reason)
        out += _regroup(state, run)
    return out


def _start_missing(state: TransitionState, run: TaskRun) -> list[Message]:
    """Start workers in free slots of the task; stop spare ones while replicas lack other places."""
    usable = [] if run.state.ended else state.usable(run.target)
    spare, started = run.fill_slots(usable, state.occupied)
    reason = "its place of the model is there often enough, and its slot is needed for another"
    out = _stop_all(state, run, spare, reason)
    for worker in started:
        state.add_worker(run, worker)
    slots = _script_slots(run) if started else []
    for worker in started:
        out.append(_start_order(state, run, worker, slots))
        out += run.request_timer(WaitKind.START, worker.worker)
    return out


def order_again(state: TransitionState, run: TaskRun, worker: WorkerRun) -> list[Message]:
    """Order the start of a worker once more; the time that it has for that goes on."""
    return [_start_order(state, run, worker, _script_slots(run))]


def _script_slots(run: TaskRun) -> list[SlotRef]:
    return run.slots_by_place() if way_of(run.spec).seats_ranks else []


def _start_order(state: TransitionState, run: TaskRun, worker: WorkerRun, slots: list[SlotRef]) -> StartWorker:
    """Return the order for a worker, of this instance.

    Args:
        state: of the service.
        run: the task.
        worker: of it.
        slots: of each place, where its script reads who is beside it before there is a membership.
    """
    node, worker.token = worker.slot.node, state.token
    run.begun_at = run.begun_at or state.now
    nodes = list(dict.fromkeys(slot.node for slot in slots)) or [node]
    return StartWorker(
        **state.command_fields(worker.slot.node),
        slot=worker.slot.slot,
        worker=worker.worker,
        task=run.spec.name,
        spec=healed_by(Healing.RESTART, run.spec)
        if run.as_is
        else replace(run.spec, drill=run.spec.drill and not run.tried),
        place=worker.place,
        layout=worker.layout,
        cause=run.cause,
        wait_s=run.wait_s,
        uncarried=run.uncarried,
        anew=run.is_early and not (run.is_replaceable or (run.is_on_trial and run.lacks_members)),
        anew_s=max(0.0, state.now - run.begun_at) if run.is_early else 0.0,
        trained_s=max(0.0, state.now - run.trained_since) if run.is_early else 0.0,
        local_slots=[slot.slot for slot in slots if slot.node == node],
        group=nodes.index(node),
        groups=len(nodes),
    )
