"""The state that a storm must reach: every task that can run runs, at the plan in force, and that plan is the best."""

from math import hypot

from msgspec.structs import replace
from unicron_planner.core import PlannerCore

from unicron.contracts.events import NodeAdmitted, ReplacementDelayed, TaskSubmitted
from unicron.contracts.plans import TaskShare
from unicron.contracts.tasks import NodeState, Slot, TaskState
from unicron.errors import tells_lack
from unicron_simulator.storms.training import Trainer
from unicron_simulator.storms.world import OPTIONS, World


def running(world: World) -> list[str]:
    """Return the tasks that the plan in force gives workers."""
    plan = world.invariants.plan
    return [share.task for share in plan.shares if share.slots] if plan else []


def progress(world: World) -> dict[str, int]:
    """Return how far each task has come: iterations of its workers, in its newest epoch."""
    found: dict[str, int] = {}
    for trainer in world.trainers():
        mark = trainer.core.epoch * 1_000_000 + trainer.core.iteration
        found[trainer.spec.name] = max(found.get(trainer.spec.name, -1), mark)
    return found


async def lacking(world: World) -> str:
    """Return what is not yet as the plan in force says, empty where all is."""
    plan, status = world.invariants.plan, await world.status()
    shares = {share.task: share for share in plan.shares} if plan else {}
    for view in status.tasks:
        task = view.spec.name
        if not view.state.ended and (problem := _amiss(world, task, shares.get(task), view.state)):
            return problem
    known = {view.spec.name for view in status.tasks if not view.state.ended}
    orphans = [trainer.name for trainer in world.trainers() if trainer.spec.name not in known]
    if orphans:
        return f"{', '.join(orphans)} of a task that ended still live"
    given_up = world.invariants.given_up() | {name for name, each in world.machines.items() if each.lost}
    away = [view.node for view in status.nodes if view.state is not NodeState.UP and view.node not in given_up]
    if away:
        return f"{', '.join(away)} not in use though there"
    return world.invariants.unplanned() or await _pools_lack(world) or _better_plan(world)


async def untold(world: World) -> str:
    """Return what is not as the plan in force says, of a task whose status does not say what a machine lacks.

    One whose slots another task has not left yet waits for that one, of which the same is asked.
    """
    plan, status = world.invariants.plan, await world.status()
    shares = {share.task: share for share in plan.shares} if plan else {}
    for view in status.tasks:
        share = shares.get(view.spec.name)
        wanted = {(slot.node, slot.slot) for slot in share.slots} if share else set()
        held = any(
            (each.host.name, each.slot) in wanted for each in world.trainers() if each.spec.name != view.spec.name
        )
        if view.state.ended or tells_lack(view.reason) or held:
            continue
        if problem := _misplaced(world, view.spec.name, share, view.state):
            return f"{problem}, and its status says {view.reason!r}"
    return ""


def _budget_spent(world: World, pool: str) -> bool:
    """Return whether a pool has replaced as many nodes as it may; what else it lacks, it lacks for an hour."""
    delays = [each for each in world.invariants.messages if isinstance(each, ReplacementDelayed) and each.pool == pool]
    return any("within an hour" in each.reason for each in delays)


async def _pools_lack(world: World) -> str:
    """Return what is amiss with a pool that may get what it wants."""
    for view in (await world.pools()).pools if world.providers else ():
        idle = view.have > view.wanted and view.spare  # those that have work stay
        if (view.have < view.wanted or idle) and not _budget_spent(world, view.pool.name):
            return f"pool {view.pool.name} has {view.have} nodes, {view.wanted} are wanted: {view.reason}"
        if view.asked or view.going:
            return f"pool {view.pool.name} has machines on their way: {view.machines}"
    return ""


def _amiss(world: World, task: str, share: TaskShare | None, state: TaskState) -> str:
    """Return what is wrong with one task, or with what it has left behind."""
    mine = [trainer for trainer in world.trainers() if trainer.spec.name == task]
    left = _not_as_laid_out(world, share, mine) if share and share.slots else ""
    return _misplaced(world, task, share, state) or left


def _misplaced(world: World, task: str, share: TaskShare | None, state: TaskState) -> str:
    """Return what is wrong with the workers of one task."""
    if share is None:
        return f"{task} is {state} and in no plan"
    wanted = sorted(map(str, share.slots))
    mine = [trainer for trainer in world.trainers() if trainer.spec.name == task]
    places = sorted(f"{trainer.host.name}:{trainer.slot}" for trainer in mine)
    if places != wanted:
        return f"{task} has workers in {', '.join(places) or 'no slot'}; the plan says {', '.join(wanted) or 'none'}"
    if wanted and state is not TaskState.RUNNING:
        return f"{task} is {state} to the registry"
    return _apart(mine, len(wanted))


def _apart(mine: list[Trainer], wanted: int) -> str:
    """Return why the workers of a task don't compute together."""
    if len({trainer.core.epoch for trainer in mine}) > 1 or not all(trainer.computes for trainer in mine):
        where = ", ".join(f"{trainer.name} in epoch {trainer.core.epoch}" for trainer in mine)
        return f"the workers of a task do not compute together: {where}"
    if any(trainer.core.membership.world_size != wanted or trainer.paused for trainer in mine):
        return f"{mine[0].spec.name} computes with other than {wanted} workers"
    return ""


def _not_as_laid_out(world: World, share: TaskShare, mine: list[Trainer]) -> str:
    """Return what of an earlier layout is still there, of a task that runs."""
    if not all(trainer.layout.is_like(share.layout) for trainer in mine):
        return f"{share.task} has workers of another layout than the plan says"
    living, gone = {trainer.name for trainer in mine}, world.invariants.given_up()  # which remove it when they are back
    left = [
        f"{name} on {node}"
        for node, machine in world.machines.items()
        for name, ref in (machine.kept | machine.saved).items()
        if ref.task == share.task and node not in gone
        if name in machine.kept or ref.location.worker not in living
    ]
    return f"{', '.join(left)} still lies where it was left behind, though {share.task} runs" if left else ""


def _better_plan(world: World) -> str:
    """Return by how much a planner that is started afresh does better, empty where by no more than it may.

    The fresh one takes any gain. The plan in force may be behind it by what the tasks pay that would lose workers or be
    reconfigured: the error of the estimates, and the time in transition. A task that is confined to domains gets what
    these have left beside the others, who do not move for it: one that places all anew may find more.
    """
    shares = world.invariants.plan.shares if world.invariants.plan else []
    if any(world.specs[share.task].within_domain for share in shares):
        return ""
    fresh = PlannerCore(None, replace(OPTIONS, estimate_error=0.0))
    for name, machine in world.machines.items():
        if name in world.invariants.given_up() or machine.agent is None:
            continue
        slots = [Slot(index=index) for index in range(machine.slots)]
        admitted = NodeAdmitted(node=name, incarnation="x", host=name, slots=slots)
        fresh.handle(replace(admitted, rack=machine.place[0], domain=machine.place[1]))
    for share in shares:
        fresh.handle(TaskSubmitted(task=share.task, spec=world.specs[share.task]))
    best, plan = fresh.state.plan, world.invariants.plan
    if best is None or plan is None:
        return ""
    allowed, error = 0.0, hypot(OPTIONS.estimate_error, OPTIONS.estimate_error)
    for now, then in zip(plan.shares, best.shares, strict=True):
        allowed += error * max(0.0, now.waf - then.waf)
        allowed += (len(now.slots) != len(then.slots)) * now.waf * plan.transition_s / plan.running_s
    rounding = 1e-9 * best.waf
    if -rounding <= best.waf - plan.waf <= allowed + rounding:
        return ""
    return f"the plan in force earns {plan.waf:.4g}; a planner started afresh finds {best.waf:.4g}"
