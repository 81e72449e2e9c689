"""The registry's decisions: which nodes there are, which tasks, and how each of them stands.

Facts keep the picture current; orders of users change it and go out as facts for everybody else.
"""

from msgspec.structs import asdict, replace

from unicron.checks import check_task
from unicron.contracts.answers import RECENT, Reply, SaverView, Status
from unicron.contracts.answers import TaskView as View
from unicron.contracts.base import Message, TimerFired
from unicron.contracts.commands import FindCheckpoint, SaveStates
from unicron.contracts.events import (
    Alert,
    CheckpointFailed,
    CheckpointFound,
    CheckpointStored,
    FailureDetected,
    IterationFinished,
    MachineRetired,
    NodeAdmitted,
    NodeJoined,
    NodeLeaving,
    NodeLeft,
    ObserveOnlySwitched,
    OrdersWithheld,
    PatternMissed,
    PlanDecided,
    ScriptDrilled,
    StandbyDied,
    StandbyRevived,
    StateSecured,
    StateUnprotected,
    TaskBroken,
    TaskRemoved,
    TaskStateChanged,
    TaskSubmitted,
)
from unicron.contracts.plans import TaskShare
from unicron.contracts.queries import DrainNode, GetStatus, PauseTask, RemoveTask, RewindTask, SaveTask, SubmitTask
from unicron.contracts.ranges import SHORTEST_S
from unicron.contracts.slowdowns import SlowdownDetected, SlowdownEnded
from unicron.contracts.stragglers import StragglerDetected
from unicron.contracts.tasks import TaskState
from unicron.errors import InvalidInputError
from unicron.healing import way_of
from unicron.service.core import Answers, Core, Handlers
from unicron_registry import nodes, orders, watchdogs
from unicron_registry.doubts import find_contradiction
from unicron_registry.state import RegistryState

NO_PLAN_YET = "the planner has not planned for it yet"


class RegistryCore(Core):
    """The one truth about nodes, tasks and the plan in force.

    Args:
        state: what an earlier instance remembered, None at the very first start.
        idle_s: seconds without a running worker after which a task gets an alert.
    """

    doubts = staticmethod(find_contradiction)

    def __init__(self, state: RegistryState | None = None, *, idle_s: float = watchdogs.IDLE_S) -> None:
        self._idle_s = idle_s
        self.state: RegistryState = state or RegistryState()
        self.handlers: Handlers = {
            NodeJoined: lambda fact: nodes.join(self.state, fact),
            NodeAdmitted: lambda fact: nodes.record_admission(self.state, fact),
            NodeLeaving: lambda fact: nodes.drain_leaving(self.state, fact),
            NodeLeft: lambda fact: nodes.record_departure(self.state, fact),
            FailureDetected: lambda fact: nodes.record_failure(self.state, fact),
            PlanDecided: self._plan,
            TaskStateChanged: self._change,
            TaskBroken: self._broken,
            IterationFinished: self._progress,
            SaveStates: lambda order: orders.allow_reports(self.state, order, [saver.worker for saver in order.savers]),
            FindCheckpoint: lambda order: orders.allow_reports(self.state, order),
            StateSecured: lambda fact: self._record_saver(fact, SaverView(nodes=[fact.node, *fact.nodes])),
            CheckpointStored: lambda fact: orders.stop_if_stored(self.state, fact),
            CheckpointFound: lambda fact: orders.record_rewind(self.state, fact),
            CheckpointFailed: lambda fact: orders.cancel_stop(self.state, fact),
            StateUnprotected: lambda fact: self._record_saver(fact, SaverView(problem=fact.reason)),
            StragglerDetected: lambda fact: nodes.drain_straggler(self.state, fact),
            StandbyDied: lambda fact: nodes.record_standby_death(self.state, fact),
            StandbyRevived: lambda fact: nodes.record_revival(self.state, fact),
            MachineRetired: lambda fact: nodes.drain_retired(self.state, fact),
            ObserveOnlySwitched: lambda fact: orders.switch_observing(self.state, on=fact.on),
            OrdersWithheld: lambda fact: orders.record_withheld(self.state, fact),
            SlowdownDetected: lambda fact: self._slow(fact.task, fact.text),
            SlowdownEnded: lambda fact: self._slow(fact.task, ""),
            ScriptDrilled: self._drilled,
            PatternMissed: lambda fact: watchdogs.missed(self.state, fact),
            TimerFired: self._fired,
        }
        self.answers: Answers = {
            GetStatus: lambda _: (Reply(status=self._status()), []),
            SubmitTask: self._submit,
            RemoveTask: self._remove,
            DrainNode: lambda query: nodes.drain(self.state, query.node, drain=query.drain),
            PauseTask: lambda query: orders.pause(self.state, query),
            SaveTask: lambda query: orders.save(self.state, query),
            RewindTask: lambda query: orders.rewind(self.state, query),
        }

    # --- tasks: orders -----------------------------------------------------------------------------------------------

    def _submit(self, query: SubmitTask) -> tuple[Reply, list[Message]]:
        spec = query.spec
        check_task(spec)
        view = self.state.tasks.get(spec.name)
        if view is not None and view.state == TaskState.REMOVED:  # its end is not published yet
            raise InvalidInputError(f"task {spec.name!r} is just being removed; submit it again in a moment")
        if view is not None and not view.state.ended:
            if view.spec == replace(spec, commit=view.spec.commit):  # whose code was begun goes on
                return Reply(text=f"task {spec.name} was submitted before and is {view.state}; nothing changed"), []
            old, new = asdict(view.spec), asdict(spec)
            changed = ", ".join(
                f"{field} {old[field]!r} -> {new[field]!r}"
                for field in new
                if new[field] != old[field] and field != "commit"
            )
            raise InvalidInputError(
                f"task {spec.name!r} is {view.state} with another spec ({changed}); "
                "remove it first, or give the new one another name"
            )
        self.state.told.pop(spec.name, None)
        self.state.tasks.pop(spec.name, None)  # a name used again goes to the end of the list
        self.state.tasks[spec.name] = View(spec=spec, state=TaskState.WAITING, reason=NO_PLAN_YET)
        awaited = watchdogs.follow(self.state, spec.name, TaskState.WAITING, self._idle_s)
        return Reply(text=f"task {spec.name} submitted"), [TaskSubmitted(task=spec.name, spec=spec), *awaited]

    def _remove(self, query: RemoveTask) -> tuple[Reply, list[Message]]:
        task, view = query.task, orders.known_task(self.state, query.task)
        if view.state == TaskState.REMOVED:  # its name is free once its end is published: that end would be another's
            return Reply(text=f"task {task} is just being removed; nothing changed"), []
        if view.state.ended:
            del self.state.tasks[task]
        else:  # shown until the transition service says that its workers are gone
            self._update(task, state=TaskState.REMOVED, reason="removed by a user", waf=0.0)
        over = watchdogs.follow(self.state, task, TaskState.REMOVED, self._idle_s)
        return Reply(text=f"task {task} removed"), [TaskRemoved(task=task), *over]

    def _status(self) -> Status:
        views = sorted(self.state.nodes.values(), key=lambda view: view.node)
        tasks = list(self.state.tasks.values())
        return Status(nodes=views, tasks=tasks, plan=self.state.plan, observe_only=self.state.observe_only)

    def is_credible(self, message: Message) -> bool:
        """Return whether telemetry is of a task that there is."""
        return not isinstance(message, IterationFinished) or message.task in self.state.tasks

    # --- tasks: facts ------------------------------------------------------------------------------------------------

    def _plan(self, decided: PlanDecided) -> list[Message]:
        before = self.state.plan
        if before is not None and decided.plan.number <= before.number:
            return []
        self.state.plan = plan = decided.plan.whole(before)
        for share in plan.shares:
            view = self.state.tasks.get(share.task)
            if view is not None and view.state == TaskState.WAITING:
                self._update(share.task, reason=share.reason)
        return []

    def _broken(self, broken: TaskBroken) -> list[Message]:
        if broken.task in self.state.tasks:
            self._update(broken.task, reason=broken.reason, traceback=broken.traceback)
        return []

    def _change(self, change: TaskStateChanged) -> list[Message]:
        view = self.state.tasks.get(change.task)
        if view is None:
            return []
        if view.state.ended:
            if view.state == TaskState.REMOVED and change.state.ended:
                del self.state.tasks[change.task]  # it may have ended in another way just before
            return []  # what comes late from before the end changes nothing
        reason = change.reason
        if change.state == TaskState.WAITING:
            reason = reason or self._share(change.task).reason
        elif change.state == TaskState.FAILED:
            reason = reason or view.reason
        self._update(
            change.task,
            state=change.state,
            reason=reason,
            traceback=change.traceback or view.traceback,
            epoch=max(change.epoch, view.epoch),
            members=change.computing,
            savers=_remaining_savers(view, change),
            recent_s=view.recent_s if change.epoch == view.epoch else [],
            waf=view.waf if change.state == TaskState.RUNNING else 0.0,
            slow="" if change.state.ended else view.slow,
        )
        orders.allow_member_reports(self.state, change)
        if change.state == TaskState.FINISHED and way_of(view.spec).counts_iterations:
            # telemetry of the last iteration may have been lost
            self._update(change.task, iteration=view.spec.iterations - 1)
        return watchdogs.follow(self.state, change.task, change.state, self._idle_s)

    def _fired(self, timer: TimerFired) -> list[Message]:
        return watchdogs.look(self.state, timer.name.removeprefix(watchdogs.IDLE), self._idle_s)

    def _record_saver(self, fact: StateSecured | StateUnprotected, saver: SaverView) -> list[Message]:
        view = self.state.tasks.get(fact.task)
        may_report = fact.worker in self.state.told.get(fact.task, {}).get(fact.node, ())
        if view is not None and not view.state.ended and may_report:
            self._update(fact.task, savers={**view.savers, fact.worker: saver})
        return []

    def _progress(self, done: IterationFinished) -> list[Message]:
        view = self.state.tasks.get(done.task)
        if view is None or view.state.ended or view.state == TaskState.WAITING or done.epoch < view.epoch:
            return []  # not of this run of the task, or from a rank that missed a regroup
        place = (done.worker, done.node, done.slot)
        if not any((each.worker, each.node, each.slot) == place for each in view.members):
            return []  # of a membership that is not reported yet, or nobody's
        waf = view.spec.weight * view.spec.flops_per_iteration / done.seconds if done.seconds >= SHORTEST_S else 0.0
        recent = [*view.recent_s, done.seconds][-RECENT:]
        self._update(
            done.task, iteration=done.iteration, loss=done.loss, iteration_s=done.seconds, recent_s=recent, waf=waf
        )
        return []

    def _slow(self, task: str, text: str) -> list[Message]:
        view = self.state.tasks.get(task)
        if view is not None and not view.state.ended:
            self._update(task, slow=text)
        return []

    def _drilled(self, fact: ScriptDrilled) -> list[Message]:
        view = self.state.tasks.get(fact.task)
        if view is None or view.state.ended:
            return []
        nodes = {each.node for each in view.members} | {each.node for each in self._share(fact.task).slots}
        if fact.node in nodes:  # of the plan, too: a script may be refused before any are members
            self._update(fact.task, drill=fact.outcome)
            if fact.problem:
                lost = f"whenever task {fact.task} loses a rank, all its ranks begin again: in its drill "
                text = f"task {fact.task}: {fact.outcome}" if fact.as_is else f"{lost}{fact.outcome}"
                return [Alert(text=text, task=fact.task)]
        return []

    def _share(self, task: str) -> TaskShare:
        shares = self.state.plan.shares if self.state.plan else []
        return next((share for share in shares if share.task == task), TaskShare(task=task))

    def _update(self, task: str, **fields: object) -> None:
        self.state.tasks[task] = replace(self.state.tasks[task], **fields)


def _remaining_savers(view: View, change: TaskStateChanged) -> dict[str, SaverView]:
    """Return who saves that is still there; what was saved by those that are not goes when newer ones are whole."""
    names = {member.worker for member in change.computing}
    return {name: saver for name, saver in view.savers.items() if name in names} if names else {}
