"""A task's workers: which live, which place of the state each has, and which of them can compute together. Pure.

A worker has built one place of the model. Only whole replicas compute. Those that are whole stay as they are; what is
left of broken ones is put together where places fit, and where too many have the same place, some are to be started
again with another.
"""

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Container, Iterable

import msgspec

from unicron.contracts.ranges import Count, Moment, Stamp
from unicron.contracts.tasks import ParallelLayout, SlotRef, TaskSpec, TaskState
from unicron.healing import way_of
from unicron_transition.membership import HeldState, TaskMembership, WorkerRun, WorkerStage


class WorkerGroup(msgspec.Struct, kw_only=True):
    """The workers of one task.

    Attributes:
        started: counts worker processes, for their names.
        before: how many of them were an earlier task's of this name.
        submitted_at: Unix seconds; what was stored before under its name is another task's.
        target: slots that the newest plan gives it, in rank order; `TransitionState.set_target` changes it.
        aimed: the shape of a replica that the plan wants; None before the first.
        workers: living worker processes by name; `TransitionState.add_worker` and `drop_worker` change it.
        membership: the newest one ordered.
        holders: which worker has which place of its state; who is not in it has none. A worker whose node is given up
            may still live and come back with its state: it is in it until it is known to have ended.
        uncarried: why nobody can take the place of a rank of its script; empty where somebody can.
        as_is: its script is run as torchrun would from now on, and begins again whenever a rank is lost.
        tried: a process has taken a rank's place of its script on trial, or none can.
        trial, trial_node: the worker in whose place a process is on trial, and where; empty where none is.
        awaits_trial: a rank was lost meanwhile, and the others wait for what comes of it.
        begun_at, trained_since: Unix seconds at which workers were first started, and first computed; 0 before that.
    """

    spec: TaskSpec
    state: TaskState = TaskState.WAITING
    started: Count = 0
    before: Count = 0
    submitted_at: Stamp = 0.0
    target: list[SlotRef] = []
    aimed: ParallelLayout | None = None
    workers: dict[str, WorkerRun] = {}
    membership: TaskMembership = msgspec.field(default_factory=TaskMembership)
    holders: dict[str, HeldState] = {}
    uncarried: str = ""
    as_is: bool = False
    tried: bool = False
    trial: str = ""
    trial_node: str = ""
    awaits_trial: bool = False
    begun_at: Moment = 0.0
    trained_since: Moment = 0.0

    @property
    def shape(self) -> ParallelLayout:
        """The shape that the newest plan gives a replica."""
        return self.aimed or self.spec.layout.with_workers(0)

    @property
    def present_shape(self) -> ParallelLayout:
        """The shape of a replica among the workers that hold the task's state; the planned shape where none does."""
        holders = (self.workers[name] for name in self.holders if name in self.workers)
        return next((worker.layout for worker in holders), self.shape)

    @property
    def changes_layout(self) -> bool:
        """Whether the workers that hold the state must export it: the plan changes the shape, or takes all slots."""
        return not (self.target and self.present_shape.is_like(self.shape))

    @property
    def fewest_workers(self) -> int:
        """The smallest number of workers that can compute in the planned shape."""
        return min(self.spec.sizes_like(self.shape), default=self.shape.replica_workers)

    @property
    def as_planned(self) -> bool:
        """Whether the newest membership computes in the very slots of the plan."""
        membership = self.membership
        if not membership.has_met or not membership.complete or not membership.layout.is_like(self.shape):
            return False
        slots = [self.workers[name].slot for name in membership.group if name in self.workers]
        return len(slots) == len(membership.group) and set(slots) == set(self.target)

    def ready_workers(self) -> list[str]:
        """Return the workers of the present layout that are ready, in a membership or not."""
        shape = self.present_shape
        return [
            name
            for name, worker in self.workers.items()
            if worker.stage is WorkerStage.READY and worker.layout.is_like(shape)
        ]

    @property
    def is_untried(self) -> bool:
        """Whether nobody knows yet if another process can take the place of a rank of its script: a drill will show."""
        tries = self.spec.drill and way_of(self.spec).may_be_uncarried and self.spec.max_workers > 1
        return tries and not (self.tried or self.as_is)

    @property
    def is_replaceable(self) -> bool:
        """Whether another process may go on with what a rank of it has."""
        return not (self.uncarried or self.is_untried)

    @property
    def is_on_trial(self) -> bool:
        """Whether that is being shown now."""
        return bool(self.trial) and self.is_untried and not self.uncarried

    @property
    def lacks_members(self) -> bool:
        """Whether some of those that computed last are there, and others are not any more."""
        there = sum(name in self.workers for name in self.membership.met)
        return 0 < there < len(self.membership.met)

    def lost_with(self, worker: str) -> list[WorkerRun]:
        """Return the workers that end with `worker`: all that compute, where nobody is to take its place.

        While a trial is under way the others wait for what it shows, if there are any, and with the last of them those
        end who were to go on with what they have.
        """
        met, through = self.membership.met, self.membership.through
        if self.is_replaceable or worker not in met or through:
            names: Iterable[str] = [worker]
        elif not self.is_on_trial:
            names = met
        else:
            names = [worker] if any(name in self.workers for name in met if name != worker) else [*self.workers]
        return [self.workers[name] for name in names if name in self.workers]

    # --- who has which place of the state ----------------------------------------------------------------------------

    def record_state(self, worker: str, place: int, iteration: int, node: str) -> None:
        """Record that `worker` has the state of `place`, where the task's way of healing tracks states."""
        if way_of(self.spec).tracks_states:
            self.holders[worker] = HeldState(place=place, iteration=iteration, node=node)

    def forget_others(self, node: str, workers: Collection[str]) -> None:
        """Drop the states held on `node` by workers other than these, which no longer live."""
        gone = [name for name, held in self.holders.items() if held.node == node and name not in workers]
        for name in gone:
            del self.holders[name]

    def held_places(self, workers: Iterable[str]) -> set[int]:
        """Return the places of which any of `workers` has the state."""
        return {held.place for name in workers if (held := self.holders.get(name))}

    def newest_holder(self, place: int, workers: Iterable[str]) -> str:
        """Return the one of `workers` that has the newest state of `place`."""
        held = [(name, found) for name in workers if (found := self.holders.get(name)) and found.place == place]
        return max(held, key=lambda each: each[1].iteration)[0]

    def lost_places(self) -> set[int]:
        """Return the places whose state no worker has, where one has that of another place."""
        held = self.held_places(self.ready_workers())
        return set(range(self.present_shape.replica_workers)) - held if held else set()

    def lacks_places(self) -> bool:
        """Return whether there is a place whose state no worker has."""
        return len(self.held_places(self.ready_workers())) < self.present_shape.replica_workers

    # --- memberships -------------------------------------------------------------------------------------------------

    def better_membership(self, slots: Iterable[SlotRef], taken: Container[SlotRef]) -> TaskMembership | None:
        """Return the membership that is to replace the present one; None where none can, or better ones are coming.

        Args:
            slots: of the target, that are there.
            taken: all slots that any task has a worker in.
        """
        shape, membership = self.shape, self.membership
        ready, awaited = self._ready_in_slots(slots, taken)
        computes = membership.layout.is_like(shape)
        intact = computes and not membership.leaving and membership.intact(self.workers)
        waits = way_of(self.spec).waits_for_replacements
        if awaited and (intact or not computes or waits or not membership.survivors(self.workers)):
            # those that compute go on until the new ones are ready; those that start wait for one another, and those
            # that each membership begins anew wait for all who are to be in it
            return None
        chosen, computing = self._best_members(ready, final=not (awaited or intact))
        if not chosen or (intact and set(chosen) == set(membership.group)):
            return None
        return membership.successor(chosen, shape.with_workers(computing))

    def last_membership(self) -> TaskMembership | None:
        """Return the membership in which those with the state leave it behind; None where they are no whole replica.

        They may be in slots that are no longer the task's, and fewer or more than it is allowed to have.
        """
        names = [name for name in self.ready_workers() if name in self.holders]
        chosen = self._arrange_replicas(names, len(names))
        layout = self.present_shape.with_workers(len(chosen))
        return self.membership.successor(chosen, layout, leaving=True) if chosen else None

    def is_exporting(self, slots: Iterable[SlotRef], taken: Container[SlotRef]) -> bool:
        """Return whether members are leaving their states behind, or compute until workers of another layout are ready.

        Those may be starting, or about to: in slots that nobody computes in.
        """
        membership = self.membership
        computes = not membership.leaving and membership.intact(self.workers)
        return membership.is_exporting(self.workers) or (computes and self._ready_in_slots(slots, taken)[1])

    def _ready_in_slots(self, slots: Iterable[SlotRef], taken: Container[SlotRef]) -> tuple[list[str], bool]:
        """Return the workers in these slots that could compute, and whether others are to come there.

        A slot that another task still holds is not waited for: that task may be waiting for one of this task's.
        """
        own = {worker.slot: worker for worker in self.workers.values()}
        awaited, ready, shape = False, list[str](), self.shape
        for slot in slots:
            worker = own.get(slot)
            if worker is None:
                awaited = awaited or slot not in taken
            elif worker.layout.is_like(shape):  # else it is about to be stopped
                awaited = awaited or worker.stage is WorkerStage.STARTING
                if worker.stage is WorkerStage.READY:
                    ready.append(worker.worker)
        return ready, awaited

    def _best_members(self, ready: list[str], *, final: bool) -> tuple[list[str], int]:
        """Return the best membership that can be formed, in rank order, and how many of it compute; empty if none can.

        Where none of `ready` holds some place, a worker in a slot that is no longer the task's comes along to hand it
        over, and leaves when that is done; who takes a state from it and is in no whole replica yet computes nothing.
        With nothing more to come, that is done even with too few workers to go on with: the state is in the task's own
        slots then, and the other slot can be given up.

        Args:
            ready: workers in its slots that could compute, in the order of the slots.
            final: nothing better than these is there or on its way.
        """
        ranks = {name: rank for rank, name in enumerate(self.membership.group)}
        ready = sorted(ready, key=lambda name: ranks.get(name, len(ranks)))  # stable: members keep their order
        replica = self.present_shape.replica_workers
        size, givers = self._largest_size(len(ready)), self._state_givers(ready)
        if givers and (size or (ready and final)):
            group = self._arrange_replicas(givers + ready, max(1, (size or len(ready)) // replica) + 1)
            takers = [name for name in ready if name not in group and name not in self.holders] if group else []
            return [*group, *(takers if replica > 1 else [])], len(group)
        group = self._arrange_replicas(ready, len(ready))
        group = group[: self._largest_size(len(group))]
        return group, len(group)

    def unneeded_workers(self) -> list[WorkerRun]:
        """Return the workers that can be stopped: they are in no membership, and in no slot of the task.

        Who has its state is among them only when those that go on have met: they may be dying unseen.
        """
        present, shape = self.present_shape, self.shape
        group = {name for name in self.membership.group if name in self.workers}
        group = {name for name in group if self.workers[name].layout.is_like(present)}
        outside = [worker for name, worker in self.workers.items() if name not in group]
        kept = set(self.target) if outside else set()
        unwanted = [worker for worker in outside if worker.slot not in kept or not worker.layout.is_like(shape)]
        if self.membership.has_met:
            return unwanted
        return [worker for worker in unwanted if worker.worker not in self.holders]

    def describe_waiting(self) -> str:
        """Return which workers of broken replicas wait for which places, in words; empty where none do."""
        idle = [name for name in self.ready_workers() if name not in self.membership.group]
        coming = sorted({worker.place for worker in self.workers.values() if worker.stage is WorkerStage.STARTING})
        if self.present_shape.replica_workers == 1 or not idle or not coming:
            return ""
        return f"; the replica of {', '.join(idle)} waits for place {', '.join(map(str, coming))}"

    def _largest_size(self, count: int) -> int:
        """Return the largest size of the task that `count` workers make, 0 where they are too few."""
        sizes = self.spec.sizes_like(self.present_shape)
        index = bisect_right(sizes, count)
        return sizes[index - 1] if index else 0

    def _state_givers(self, ready: list[str]) -> list[str]:
        """Return, for each place that none of `ready` holds, the worker in another slot that has its newest state."""
        everybody = self.ready_workers()
        missing = self.held_places(everybody) - self.held_places(ready)
        return [self.newest_holder(place, everybody) for place in sorted(missing)]

    def _arrange_replicas(self, names: list[str], most: int) -> list[str]:
        """Return up to `most` whole replicas made of `names`, one after the other."""
        there, places = set(names), self.present_shape.replica_workers
        whole = [list(replica) for replica in self._whole_replicas() if there.issuperset(replica)][:most]
        there.difference_update(*whole)
        waiting: list[deque[str]] = [deque() for _ in range(places)]
        for name in sorted(names, key=lambda name: name not in self.holders):  # who has a state first
            if name in there and self.workers[name].place < places:
                waiting[self.workers[name].place].append(name)
        while len(whole) < most and all(waiting):
            whole.append([each.popleft() for each in waiting])
        return [name for replica in whole for name in replica]

    def _whole_replicas(self) -> list[tuple[str, ...]]:
        """Return the replicas of the present membership all of whose members hold their place's state."""
        return [each for each in self.membership.replicas() if self.holders.keys() >= set(each)]

    # --- places ------------------------------------------------------------------------------------------------------

    def fill_slots(self, slots: list[SlotRef], taken: Container[SlotRef]) -> tuple[list[WorkerRun], list[WorkerRun]]:
        """Return workers that are to make room for other places, and new ones that are to be started.

        Args:
            slots: of the target, that are there.
            taken: all slots that any task has a worker in.
        """
        shape, own = self.shape, {worker.slot: worker for worker in self.workers.values()}
        there = [own[slot] for slot in slots if slot in own and own[slot].layout.is_like(shape)]
        spare = self._surplus(there) if len(there) == len(slots) and shape.replica_workers > 1 else []
        there, cleared = [worker for worker in there if worker not in spare], {worker.slot for worker in spare}
        new = list[WorkerRun]()
        for slot in slots:
            if slot not in taken or slot in cleared:
                self.started += 1
                place = self._next_place([*there, *new], slot, len(slots) // shape.replica_workers)
                new.append(WorkerRun(worker=f"{self.spec.name}-{self.started}", slot=slot, place=place, layout=shape))
        return spare, new

    def slots_by_place(self) -> list[SlotRef]:
        """Return where the worker of each place of the only replica is, or is to be, as far as there are slots."""
        there = {worker.place: worker.slot for worker in self.workers.values()}
        free = [slot for slot in self.target if slot not in there.values()]
        meant = (there.get(place) or (free.pop(0) if free else None) for place in range(self.shape.replica_workers))
        return [slot for slot in meant if slot is not None]

    def _surplus(self, workers: list[WorkerRun]) -> list[WorkerRun]:
        """Return those of `workers` that no replica needs while it lacks others.

        Args:
            workers: in all its slots, none of which is free.
        """
        places = self.shape.replica_workers
        wanted = len(workers) // places
        counts = Counter(worker.place for worker in workers)
        lacking = sum(max(0, wanted - counts[place]) for place in range(places))
        if not lacking:
            return []
        settled = {name for each in self._whole_replicas() if self.workers.keys() >= set(each) for name in each}
        found: list[WorkerRun] = []
        for worker in reversed(workers):
            if len(found) < lacking and counts[worker.place] > wanted and worker.worker not in settled:
                counts[worker.place] -= 1
                found.append(worker)
        return found

    def _next_place(self, workers: Iterable[WorkerRun], slot: SlotRef, replicas: int) -> int:
        """Return the place that a worker started beside `workers` is to have, where `replicas` can be made of them all.

        That which the plan means for its slot, as ranks that talk much are meant to be on one node; where there are
        enough of that, the first that fewest of them have.
        """
        places = self.shape.replica_workers
        counts = Counter(worker.place for worker in workers)
        meant = self.target.index(slot) % places
        return meant if counts[meant] < replicas else min(range(places), key=lambda place: counts[place])
