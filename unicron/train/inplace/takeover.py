"""Whether another process can take over a rank of a script that is healed in place, and how this one takes over one."""

import contextlib
from typing import Any, NoReturn

from unicron.contracts.worker import Drilled, Unusable
from unicron.errors import GroupBrokenError
from unicron.train.carry.files import Files
from unicron.train.carry.kinds import NotCarriedError, NotComparedError
from unicron.train.inplace.alike import Alike, total_of
from unicron.train.inplace.drill import Drill
from unicron.train.inplace.member import Member
from unicron.train.inplace.records import UNKNOWN
from unicron.train.inplace.seed import Seed
from unicron.train.loops.active_loops import LoopSnapshot
from unicron.train.snapshots.gathering import collect_state
from unicron.train.worker.phases import IterationPhase
from unicron.train.worker.shell import run

CARRY = "so that no other one has it: keep what is a rank's own out of DistributedDataParallel"


class Takeover:
    """What this rank publishes for whoever replaces it, and how it replaces another.

    Args:
        member: this rank.
        files: that the script opens.
        seed: from which a process on trial grows; None where this rank is not drilled.

    Attributes:
        drill: in which such a process is tried.
    """

    _alike: Alike

    def __init__(self, member: Member, files: Files, seed: Seed | None) -> None:
        self._member, self._records, self._loops, self._files = member, member.records, member.loops, files
        self.drill = Drill(member.channel, member.rank, seed, member.records.refuse_all)
        self._unpublished: LoopSnapshot | NotCarriedError | None = None

    def begin(self) -> None:
        """Begin to compare this rank with the others, as the first loop trains."""
        trained = self._member.trained
        if trained.sharded:
            self.drill.skip(
                "a model that is spread by fully_shard is not tried: all ranks begin again, whichever is lost"
            )
        ranks = 1 if trained.sharded else self._member.size
        beside = self._loops.taker.beside
        self._alike = Alike(self._member.rank, ranks, trained.modules(), trained.reduced, trained.moments, beside)

    def compare_parameters(self) -> None:
        """Have no rank take another's place where ranks begin with other parameters."""
        mine = self._alike.digest_parameters()
        with contextlib.suppress(GroupBrokenError):  # some rank is lost already: then they are compared later
            totals = run(self._member.ranks.gather(total_of(mine)))
            found = run(self._member.ranks.gather(mine)) if len(set(totals)) > 1 else []
            for theirs in found:
                if different := next((name for name in mine if mine[name] != theirs.get(name)), ""):
                    self.refuse_all(f"{different} is not the same on all ranks, {CARRY}")

    def publish_unpublished(self) -> None:
        """Publish what waits for the ranks to be compared, if they are."""
        if self._unpublished is not None:
            self._end_comparison()

    def _end_comparison(self) -> None:
        """Take in whether ranks are alike; publish what could not be before that was known."""
        if different := self._alike.end(self._records):
            self.refuse_all(f"{different} is not the same on all ranks, {CARRY}")
        if self._alike.is_confirmed and self._unpublished is not None:
            record, self._unpublished = self._unpublished, None
            self._records.publish(self._if_known(record))

    def _if_known(self, record: LoopSnapshot | NotCarriedError) -> LoopSnapshot | NotCarriedError:
        """Return a record, or that ranks have to be compared before another one may give what it leaves to that."""
        if isinstance(record, NotCarriedError) or not self._alike.compares or self._loops.taker.beside.can_be_given:
            return record
        return NotComparedError("ranks are compared before one gives large tensors outside of its model to another")

    def refuse_all(self, why: str) -> None:
        """Have no process take a rank's place, as one that did would train something else; nobody is stopped."""
        if not self._records.shown:
            self._records.refuse_all(why)
            self.drill.refuse(why)
            at = max(0, self._member.core.iteration) if self._member.in_loops else 0
            self._member.channel.send(Drilled(iteration=at, rank=self._member.rank, problem=why))

    def publish(self, record: LoopSnapshot | NotCarriedError) -> None:
        """Publish this rank's own record, or why there is none; between iterations, go on comparing and drilling."""
        if isinstance(record, LoopSnapshot) and (why := self._files.own_folders.written()):
            record = NotCarriedError(why)
        between = self._member.in_loops and self._member.core.phase is IterationPhase.BETWEEN
        if between and self._member.piggyback is not None:
            self._member.piggyback.record_point()
        if between:
            self._end_comparison()
            self._alike.begin(self._member.core.iteration, self._records)
            if not self._alike.is_confirmed:
                self._unpublished = record
                self._records.wait_for_comparison()
                return
        record = self._if_known(record)
        self._records.publish(record)
        if isinstance(record, NotComparedError):  # that is over soon
            return
        if isinstance(record, NotCarriedError) and self._loops.candidate_chains:
            self._report_unusable(record)
        elif between:
            known = NotCarriedError(self._records.refusal) if self._records.refusal else record
            core = self._member.core
            self.drill.at_snapshot(known, core.iteration, core.epoch, self._recorded_state)

    def _recorded_state(self) -> dict[str, Any]:
        """Return what a process on trial begins from, besides this rank's own snapshot."""
        setup = self._member.groups.setup if self._member.groups is not None else None
        if setup is None:
            raise NotCarriedError(UNKNOWN)
        state = collect_state(self._member.core.iteration, self._member.states.protected)
        return {"objects": state["objects"], "setup": setup}

    def _report_unusable(self, error: NotCarriedError) -> None:
        """Report all saved states as unusable, if all ranks have restarted from one: an older one is no better."""
        if self._member.groups is not None and self._member.groups.restored:
            epoch = self._member.core.epoch
            self._member.ranks.send(Unusable(epoch=epoch, iteration=0, copies="copies", reason=str(error)))

    def take_over(self) -> None:
        """Take over the rank that this one replaces.

        Raises:
            NotCarriedError: its record can't be used; the others are told.
        """
        try:
            record = self._records.take_over(self._member.core.membership, self._loops.candidate_chains)
            self._files.check_begin()
            self._loops.take_over(record, self._files.write_in_place)
        except NotCarriedError as error:
            self._records.publish_refusal(str(error))
            self._report_unusable(error)
            raise
        self._alike.confirm(self._member.core.iteration)

    def begin_again(self, why: str) -> NoReturn:
        """Restart all ranks, as this process would not continue as the rank which it replaces."""
        error = NotCarriedError(why)
        self._records.publish_refusal(why)
        self._report_unusable(error)
        raise error
