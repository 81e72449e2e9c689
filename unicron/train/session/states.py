"""The state of a real worker: saved in memory, written to storage, handed to other workers and taken from them."""

import copy
import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from unicron.contracts.states import StateRef
from unicron.contracts.storage import StoredState
from unicron.contracts.worker import Saved, Unprotected
from unicron.errors import InvalidInputError, StateTransferError
from unicron.snapshots.memory import SnapshotMemory
from unicron.train.session.ranks import TorchRanks
from unicron.train.snapshots import saving, state, whole
from unicron.train.snapshots.digest import digest, named_tensors
from unicron.train.snapshots.gathering import Gathering, assemble, collect_state, load_state
from unicron.train.snapshots.plain import from_plain
from unicron.train.worker.channel import AgentChannel


class TorchStates:
    """See `unicron.train.worker.shell.States`. Its calls block, and none suspends.

    Args:
        channel: to the agent; None outside a cluster.
        ranks: that this one is among.

    Attributes:
        protected: objects that make up the state; "model" and "optimizer" are among them.
        model_file: that the model is to be in at the end, if it is.
    """

    def __init__(self, channel: AgentChannel | None, ranks: TorchRanks) -> None:
        self.protected: Mapping[str, Any] = {}
        self.model_file: Path | None = None
        self._channel, self._ranks = channel, ranks
        self._own_protected: Mapping[str, Any] = {}
        self._fetched: dict[str, Any] | None = None
        self._fetcher = state.Fetcher(channel)
        self._kept_others: dict[str, Any] = {}
        self._rates: list[dict[str, Any]] = []
        self._saver: saving.StateSaver | None = None
        self._unsecured: tuple[str, int] | None = None
        self._saved: Saved | None = None
        self._unprotected = ""

    def protect(self, protected: Mapping[str, Any], own: Mapping[str, Any] | None = None) -> None:
        """Take the objects that make up the state, and those of them that this worker is to save: as a rule, all.

        Raises:
            InvalidInputError: one of them holds what no other process can be given; the text names it.
        """
        try:
            collect_state(0, protected)
        except StateTransferError as error:
            raise InvalidInputError(f"protect: {error}") from error
        self.protected, self._own_protected = protected, protected if own is None else own

    # --- saved in memory, and written to storage ---------------------------------------------------------------------

    @property
    def saves(self) -> bool:
        """Whether the agent wants the state saved, in every iteration that is long enough."""
        return self._channel is not None and self._channel.saves

    @property
    def save_cost_s(self) -> float:
        """Seconds of a processor that it takes to save a state, in this thread and the saver's."""
        return 0.0 if self._saver is None else self._saver.cost_s

    @property
    def secured(self) -> bool:
        """Whether all copies of the state that was saved last are whole; one that could not be saved has none."""
        if self._channel is None or self._saver is None or self._saver.failed:
            return True
        return self._channel.secured in {None, self._unsecured}

    @property
    def store_s(self) -> float:
        """How many seconds after one state that goes to storage the next is to."""
        return self._channel.store_s if self._channel is not None else 0.0

    @property
    def store_asked(self) -> int:
        """Number of the last order to write the next state to storage."""
        return self._channel.store_asked if self._channel is not None else 0

    def describe(self, iteration: int) -> StateRef:
        """Return what a state is that this worker saves."""
        return state.describe(self._ranks.membership, self._ranks.place, iteration)

    def save(self, iteration: int) -> None:
        """Have a thread save the state."""
        began = time.thread_time()
        if self._saver is None:
            self._saver = saving.StateSaver(SnapshotMemory.of_worker(), self._report_unprotected)
        try:
            found = saving.copy_mutable(collect_state(iteration, self._own_protected), self._own_protected)
        except StateTransferError as error:
            self._saver.wait()
            self._saver.failed = True
            self._report_unprotected(str(error))
            return
        ref = self.describe(iteration)
        if self._channel is not None:
            self._channel.secured = ("", -1)
        saved = partial(self._report_saved, self._ranks.membership.epoch)
        self._unsecured = (self._saver.begin(found, ref, saved, self._is_whole, time.thread_time() - began), iteration)

    def _is_whole(self) -> bool:
        """Return whether what was just copied has not changed meanwhile."""
        return True

    def _report_saved(self, epoch: int, ref: StateRef) -> None:
        self._unprotected, self._saved = "", Saved(state=ref, epoch=epoch)
        self._ranks.send(self._saved)

    def _report_unprotected(self, reason: str) -> None:
        """Say so once, and try again in the next iteration."""
        if reason != self._unprotected:
            self._unprotected = reason
            self._ranks.send(Unprotected(reason=reason))

    async def await_saved(self) -> None:
        """Wait for the thread."""
        if self._saver is not None:
            self._saver.wait()

    def store(self) -> None:
        """Have the agent write the last saved state to storage, unless saving failed."""
        if self._saver is not None and self._saved is not None and not self._saver.failed:
            self._ranks.send(msgspec.structs.replace(self._saved, store=True))

    @property
    def saves_model(self) -> bool:
        """Whether the model is to be in a file before anybody is through."""
        return self.model_file is not None

    async def save_model(self) -> None:
        """Put the model together at the first place of the replica, and write it there."""
        part = collect_state(0, {"model": self.protected["model"]})["objects"]
        in_parts = self._ranks.membership.shape.replica_workers > 1
        found = assemble(whole.gather_parts(part, self._ranks.replica) if in_parts else [part])
        if self.model_file is not None and self._ranks.place == 0:
            whole.save_file(from_plain(found["model"]), self.model_file)
        if in_parts:
            await self._ranks.gather_in_replica()

    # --- to other workers, and from them -----------------------------------------------------------------------------

    def digest(self) -> int | None:
        """Return a digest of parameters and the optimizer's state."""
        return digest(named_tensors(self.protected))

    async def export(self, place: int, iteration: int, *, taken: bool = False, kept: bool = False) -> StateRef:
        """Write the state to the node's memory."""
        found = self._fetched if taken else None
        return state.export(self._ranks.membership, place, found or collect_state(iteration, self.protected), kept=kept)

    def remove_export(self, ref: StateRef) -> None:
        """Remove the file of a state."""
        SnapshotMemory.of_worker().remove(ref.location.name)

    async def fetch(self, sources: Sequence[Sequence[StateRef]]) -> None:
        """Fetch a state by the agent, one part after the other."""
        self._fetcher.remove_files()
        gathering = Gathering(self.protected)
        for copies in sources:
            if gathering.missing:
                gathering.add(self._fetcher.fetch(copies, self._ranks.membership.epoch))
        self._fetched = gathering.result(sources[0][0].iteration)
        self._ranks.mute()

    def read_stored(self, stored: StoredState) -> None:
        """Read a state from storage."""
        from unicron.train.snapshots.stored.reading import restore  # noqa: PLC0415 hardly any worker needs it

        task, ranks = os.environ["UNICRON_TASK"], self._ranks
        self._fetched = restore(stored, task, ranks.membership.shape, ranks.place, self.protected)
        ranks.mute()

    def load(self) -> None:
        """Load the state that was taken."""
        if self._fetched is not None:
            load_state(self._fetched, self.protected)
            self._fetched = None
            self._fetcher.remove_files()
        self._ranks.mute(muted=False)

    def keep_others(self) -> None:
        """Keep what else is protected."""
        others = {name: each for name, each in self.protected.items() if name not in {"model", "optimizer"}}
        self._kept_others = {name: copy.deepcopy(each.state_dict()) for name, each in others.items()}
        groups = self.protected["optimizer"].param_groups  # what schedulers change there
        self._rates = [{key: copy.deepcopy(group[key]) for key in group.keys() - {"params"}} for group in groups]
        self._ranks.mute()

    def restore_others(self) -> None:
        """Have what was remembered again."""
        for name, found in self._kept_others.items():
            self.protected[name].load_state_dict(found)
        for group, rates in zip(self.protected["optimizer"].param_groups, self._rates, strict=True):
            group.update(rates)
        self._ranks.mute(muted=False)
