"""Modelled storage: what all nodes see, and what lasts whatever becomes of them."""

from unicron_agent.effects import StorePart, UseStorage

from unicron.contracts.base import Message
from unicron.contracts.commands import CommitCheckpoint, FindCheckpoint
from unicron.contracts.events import CheckpointFailed, CheckpointFound, CheckpointStored, PartStored
from unicron.contracts.states import StateRef
from unicron.contracts.storage import StoredFile, StoredPart, StoredState


class SharedStorage:
    """The storage of a cluster.

    Attributes:
        parts: what places have written, by attempt and place.
        whole: complete checkpoints by folder, with the task and when they were completed.
        flaws: of the states in them.
        submitted: when each task was submitted last.
        refuses: why nothing can be written there now; empty where it can.
    """

    def __init__(self) -> None:
        self.parts: dict[tuple[str, int], StateRef] = {}
        self.whole: dict[str, tuple[str, float, StoredState]] = {}
        self.flaws: dict[str, bytes] = {}
        self.submitted: dict[str, float] = {}
        self._done: dict[str, float] = {}
        self.refuses = ""

    def use(self, effect: UseStorage, node: str, now: float, *, sound: bool) -> Message:
        """Do what an agent has done there; return its report.

        Args:
            effect: what it wants.
            node: whose agent it is.
            now: Unix seconds, by no party's clock.
            sound: a state that is to be written is what its checksum says.
        """
        match effect.job:
            case StorePart(ref=ref, saving=saving):
                if self.refuses or not sound:
                    reason = self.refuses or "it is not what its checksum says"
                    return CheckpointFailed(node=node, task=ref.task, reason=reason)
                self.parts[saving.attempt, ref.place] = ref
                file = StoredFile(name="x", size=1, checksum="")
                part = StoredPart(place=ref.place, index=file, data=file)
                return PartStored(node=node, task=ref.task, saving=saving, part=part, seconds=1.0)
            case CommitCheckpoint(task=task, saving=saving):
                places = range(saving.layout.replica_workers)
                iterations = [
                    self.parts[saving.attempt, at].iteration for at in places if (saving.attempt, at) in self.parts
                ]
                if iterations != [saving.iteration] * len(places):
                    return CheckpointFailed(node=node, task=task, reason="its parts do not make it up")
                folder = f"{task}/step-{saving.iteration}-{saving.attempt}"
                stored = StoredState(root=saving.root, folder=folder, iteration=saving.iteration, layout=saving.layout)
                self.whole[folder] = (task, max(effect.job.at, effect.job.since), stored)
                self._done[folder] = now
                self.flaws[folder] = max(self.parts[saving.attempt, at].checksum for at in places)
                return CheckpointStored(
                    node=node, task=task, iteration=saving.iteration, address=folder, removed=[], folder=folder
                )
            case FindCheckpoint() as find:
                if find.iteration >= 0:
                    self._put_aside(find.task, find.iteration)
                return CheckpointFound(
                    node=node,
                    task=find.task,
                    search=find.search,
                    stored=self.newest(find.task, find.since, find.before, find.iteration),
                    skipped=[],
                )
        raise TypeError(effect.job)

    def _put_aside(self, task: str, iteration: int) -> None:
        """Have checkpoints of a task later than that iteration count no more, where there is one of it."""
        known = {folder: stored.iteration for folder, (name, _, stored) in self.whole.items() if name == task}
        if iteration in known.values():
            for folder in [folder for folder, at in known.items() if at > iteration]:
                del self.whole[folder]

    def newest_of_run(self, task: str) -> StoredState | None:
        """Return the newest checkpoint of a task that was completed since it was submitted, whatever clocks say."""
        since = self.submitted.get(task, 0.0)
        known = [
            stored for folder, (name, _, stored) in self.whole.items() if name == task and self._done[folder] >= since
        ]
        return max(known, key=lambda stored: stored.iteration, default=None)

    def newest(self, task: str, since: float, before: int = -1, iteration: int = -1) -> StoredState | None:
        """Return the newest checkpoint of a task that was completed since then, of an iteration before that, or of one.

        Args:
            task: its name.
            since: Unix seconds.
            before: iteration; -1: any.
            iteration: that it is to be of; -1: any.
        """
        known = [stored for name, at, stored in self.whole.values() if name == task and at >= since]
        known = [stored for stored in known if before < 0 or stored.iteration < before]
        known = [stored for stored in known if iteration in {-1, stored.iteration}]
        return max(known, key=lambda stored: stored.iteration, default=None)
