"""From where a task is to where it should be: which commands come next (paper section 6). Pure functions on `state`.

They are level-triggered: they look at what is wanted and what is there, not at what just happened, so a message that
was lost or came twice changes nothing that the next look would not put right.
"""

from unicron.contracts.base import Message, SetTimer
from unicron.contracts.commands import Regroup, StartWorker, StopWorker
from unicron.contracts.tasks import Member, SlotRef, TaskState
from unicron_transition.state import TaskRun, TransitionState, WorkerRun

START_TIMEOUT_S = 180.0
"""How long a worker may take from its start until its model is built."""

REGROUP_TIMEOUT_S = 30.0
"""How long the members may take to meet in a new membership, states included."""


def settle(state: TransitionState, names: list[str]) -> list[Message]:
    """Return the commands that bring the tasks `names` nearer to their targets."""
    out: list[Message] = []
    for name in names:
        out += _regroup(state, state.tasks[name])
        out += _stop_unwanted(state, state.tasks[name])
    # a slot that one task gives up is what another may be waiting for; the stop goes out before the start
    freed = any(isinstance(message, StopWorker) for message in out)
    for name in sorted(state.tasks) if freed else names:
        out += _start_missing(state, state.tasks[name])
    return out


def stop(state: TransitionState, run: TaskRun, worker: WorkerRun, reason: str) -> list[Message]:
    """Forget a worker, and have it killed if its node is there."""
    run.workers.pop(worker.worker, None)
    if worker.worker in run.group:
        run.broken = True
    node = state.nodes.get(worker.place.node)
    if node is None or not node.alive:
        return []
    return [
        StopWorker(
            node=worker.place.node,
            token=state.token,
            incarnation=node.incarnation,
            slot=worker.place.slot,
            worker=worker.worker,
            task=run.spec.name,
            reason=reason,
        )
    ]


def _wanted(state: TransitionState, run: TaskRun) -> list[SlotRef]:
    if run.state.ended:
        return []
    return [place for place in run.target if place.node in state.nodes and state.nodes[place.node].alive]


def _regroup(state: TransitionState, run: TaskRun) -> list[Message]:
    """Order a new membership where the present one is not the best that the living workers can form."""
    wanted = _wanted(state, run)
    by_place = {worker.place: worker for worker in run.workers.values()}
    present = [by_place[place] for place in wanted if place in by_place and by_place[place].phase == "ready"]
    # a slot that another task still holds is not waited for: that task may be waiting for one of this task's
    foreign = {worker.place for other in state.tasks.values() if other is not run for worker in other.workers.values()}
    awaited = [
        place
        for place in wanted
        if (by_place[place].phase == "starting" if place in by_place else place not in foreign)
    ]
    intact = bool(run.group) and not run.broken and all(_takes_part(run, name) for name in run.group)
    if awaited and (intact or not _survivors(run)):
        return []  # those that compute go on until the new ones are ready; those that start wait for one another
    ranks = {name: rank for rank, name in enumerate(run.group)}
    present.sort(key=lambda worker: ranks.get(worker.worker, len(ranks)))  # stable: members keep their order
    size = max((size for size in run.spec.sizes if size <= len(present)), default=0)
    chosen = [worker.worker for worker in present[:size]]
    if chosen and not any(run.workers[name].computed for name in chosen):
        # none of them has the task's state yet: one who has comes along, and leaves when they have it
        chosen = sorted(_holders(run), key=lambda name: ranks.get(name, len(ranks)))[:1] + chosen
    if not chosen or (intact and chosen == run.group):
        return []
    run.epoch += 1
    run.group, run.joined, run.broken = chosen, set(), False
    return _order(state, run)


def _takes_part(run: TaskRun, name: str) -> bool:
    """Whether a member is in the newest membership, or can still come: who is through with its work can't."""
    return name in run.workers and (name in run.joined or run.workers[name].phase == "ready")


def _survivors(run: TaskRun) -> list[str]:
    """Members of the newest membership that live and still compute."""
    return [name for name in run.group if name in run.workers and run.workers[name].phase == "ready"]


def _order(state: TransitionState, run: TaskRun) -> list[Message]:
    members = members_of(state, run)
    task = run.spec.name
    on: dict[str, list[int]] = {}
    for rank, member in enumerate(members):
        on.setdefault(member.node, []).append(rank)
    orders: list[Message] = [
        Regroup(
            node=node,
            token=state.token,
            incarnation=state.nodes[node].incarnation,
            task=task,
            epoch=run.epoch,
            rendezvous=state.nodes[members[0].node].rendezvous,
            rendezvous_id=members[0].worker,
            world_size=len(members),
            members=[members[rank] for rank in ranks],
            ranks=ranks,
        )
        for node, ranks in on.items()
    ]
    return [*orders, SetTimer(name=f"regroup.{task}", after_s=REGROUP_TIMEOUT_S)]


def members_of(state: TransitionState, run: TaskRun) -> list[Member]:
    """Return the newest membership in rank order, without members that are gone."""
    return [
        Member(
            worker=name,
            node=run.workers[name].place.node,
            slot=run.workers[name].place.slot,
            state_server=state.nodes[run.workers[name].place.node].state_server,
        )
        for name in run.group
        if name in run.workers
    ]


def _stop_unwanted(state: TransitionState, run: TaskRun) -> list[Message]:
    wanted = set(_wanted(state, run))
    if not wanted:
        run.group = []
    unwanted = [
        worker for worker in run.workers.values() if worker.place not in wanted and worker.worker not in run.group
    ]
    holders = _holders(run)
    if wanted and holders and all(run.workers[name] in unwanted for name in holders):
        unwanted.remove(run.workers[holders[0]])  # who stays does not have the task's state yet
    return [message for worker in unwanted for message in stop(state, run, worker, "its slot is no longer the task's")]


def _holders(run: TaskRun) -> list[str]:
    """Return the living workers that have the task's state."""
    return [worker.worker for worker in run.workers.values() if worker.phase == "ready" and worker.computed]


def _start_missing(state: TransitionState, run: TaskRun) -> list[Message]:
    taken = {worker.place for other in state.tasks.values() for worker in other.workers.values()}
    out: list[Message] = []
    for place in _wanted(state, run):
        if place in taken:
            continue
        run.started += 1
        name = f"{run.spec.name}-{run.started}"
        run.workers[name] = WorkerRun(worker=name, place=place)
        if run.state is TaskState.WAITING:
            run.state = TaskState.STARTING
        out.append(
            StartWorker(
                node=place.node,
                token=state.token,
                incarnation=state.nodes[place.node].incarnation,
                slot=place.slot,
                worker=name,
                task=run.spec.name,
                spec=run.spec,
            )
        )
        out.append(SetTimer(name=f"start.{run.spec.name}.{name}", after_s=START_TIMEOUT_S))
    return out
