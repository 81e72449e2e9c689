"""A rank of a script that is healed in place, as a member of memberships: its groups and its worker's core."""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from unicron.contracts.tasks import ParallelLayout
from unicron.contracts.worker import Joined, Membership, Ready
from unicron.errors import GroupBrokenError
from unicron.train.carry.beside import Nothing
from unicron.train.carry.files import Files
from unicron.train.inplace.abandon import Abandon, end_process
from unicron.train.inplace.groups import ScriptGroups
from unicron.train.inplace.peers import Peers, RankPosition, Wait, Waiting
from unicron.train.inplace.piggyback import Piggyback
from unicron.train.inplace.records import Records
from unicron.train.inplace.script_rendezvous import ScriptRendezvous
from unicron.train.inplace.shell import ScriptStates, SpreadCore, WholeCore, WholeGradients, WholeRanks
from unicron.train.inplace.trained import Trained
from unicron.train.loops.loops import Loops
from unicron.train.session.gradients import TorchGradients
from unicron.train.session.ranks import TorchRanks
from unicron.train.session.states import TorchStates
from unicron.train.worker.channel import AgentChannel
from unicron.train.worker.iteration import WorkerCore
from unicron.train.worker.phases import IterationPhase
from unicron.train.worker.shell import Shell, run
from unicron.train.worker.timing import PlannedCollection


class Member:
    """This rank among the others.

    Args:
        channel: to the agent.
        files: that the script opens.
        loops: of the script.
        trained: what the script has made.

    Attributes:
        channel, loops, trained, files: see above.
        rank, size: of this process, and how many there are.
        line: to the agent, where there is one.
        abandon: ends this process, for an error that the script is not to see.
        groups: of the script; None before it has made them.
        piggyback: what goes along with gradients; None before the loops, and where models are spread over the ranks.
        rendezvous, records, peers: by which ranks find one another, may replace one another, and tell where they are.
        ranks, states, gradients, core: of the worker; there are none before the loops.
    """

    ranks: TorchRanks
    states: TorchStates
    gradients: TorchGradients
    core: WorkerCore

    def __init__(self, channel: AgentChannel, files: Files, loops: Loops, trained: Trained) -> None:
        self._layout = msgspec.json.decode(os.environ["UNICRON_LAYOUT"], type=ParallelLayout)
        self.rank, self.size = int(os.environ["UNICRON_PLACE"]), self._layout.replica_workers
        self.channel, self.trained, self.loops, self.files = channel, trained, loops, files
        self.line: AgentChannel | None = channel
        self.abandon: Abandon = end_process
        self.groups: ScriptGroups | None = None
        self.piggyback: Piggyback | None = None
        self.rendezvous, self.records = ScriptRendezvous(channel, files), Records()
        self.peers = Peers(channel, self.membership, self.position)
        self._joined_unhealed = False

    def make_groups(self, rejoin: Callable[[GroupBrokenError], bool]) -> ScriptGroups:
        """Make the script's groups, in which nobody is yet.

        Args:
            rejoin: joins the next membership, and returns whether a broken collective may be begun again there.
        """
        if self.groups is not None:
            raise ValueError("trying to initialize the default process group twice!")
        device = (
            torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
        )
        self.channel.send(Ready())
        self.groups = ScriptGroups(self._layout, self.rank, device, self.loops, rejoin, self.peers)
        self.groups.abandon = self.abandon
        self.ranks = WholeRanks(self.line, self.groups, self.loops, self.records, self.files)
        return self.groups

    def begin_loops(self, groups: ScriptGroups) -> None:
        """Make the core of this rank, with what the script has made."""
        models = self.trained.modules()
        groups.begin_loops([*models.parameters(), *models.buffers()])
        groups.sharded = bool(self.trained.sharded)
        if self.trained.sharded:  # the script's own collectives sum gradients: here goes only what is announced
            self.ranks = TorchRanks(self.line, self.rank, groups)
        self.states = ScriptStates(self.line, self.ranks, groups, self.loops, self.records)
        if self.trained.sharded:
            self.gradients = TorchGradients(self.ranks, None, 1, PlannedCollection(0))
        else:
            self.gradients = WholeGradients(self.ranks, self.states, self.size, self.trained.buckets)
        self.protect(groups)
        self.ranks.prepare(next(models.parameters()).device)
        core, microbatches = (SpreadCore, 1) if self.trained.sharded else (WholeCore, self.size)
        shell = Shell(self.ranks, self.states, self.gradients)
        self.core = core(shell, int(os.environ["UNICRON_ITERATIONS"]), microbatches)
        self.rendezvous.group = self.ranks.group

    def join_unhealed(self, *, trains: bool) -> None:
        """Say that this rank computes, though its script reduces gradients by itself: all end where one is lost then.

        It is not said where others are in their loops, or a saved state is to be loaded yet: those wait for a loop.

        Args:
            trains: it does, and finds all files from now on; else it may look for a checkpoint yet.
        """
        membership = self.membership() if self.membership().epoch >= 0 else self.channel.newest
        early = membership.epoch < 0 or membership.shelf is not None or self.comes_before_loops_of_others
        if early:
            return
        if trains:
            self.files.end()
        if self._joined_unhealed:
            return
        self._joined_unhealed = True
        where = {"epoch": membership.epoch, "rank": membership.rank, "world_size": membership.world_size}
        self.channel.send(Joined(**where, iteration=0, kept=0, recomputed=0, state_from="", seconds=0.0))

    def protect(self, groups: ScriptGroups) -> None:
        """Make the state of what there is, and sum the gradients of all that is trained."""
        models, trained = self.trained.modules(), self.trained.reduced
        names = ["optimizer", *(f"other{number}" for number in range(len(self.trained.optimizers) - 1))]
        optimizers = dict(zip(names, self.trained.optimizers, strict=True))
        beside = self.loops.taker.beside
        protected: dict[str, Any] = {"model": models, **optimizers, "loops": self.loops, "groups": groups}
        protected |= {"beside": beside, "before": beside.before}
        if self.trained.sharded:
            own = protected = {**protected, "record": self.records}
            summed = [torch.nn.Parameter(torch.zeros(1, device=next(models.parameters()).device))]
        else:
            self.piggyback = Piggyback(self.trained.models, self.trained.optimizers, first=self.rank == 0)
            protected["piggyback"] = self.piggyback
            groups.on_shared = self.piggyback.invalidate_shared
            first = {**protected, "before": Nothing()} if self.rank == 0 else {}  # of all that others have the same
            own = {**first, "record": self.records}
            # in reverse: what goes along comes behind the model
            summed = [self.piggyback.carrier, *(each for each in models.parameters() if id(each) in trained)]
        self.gradients.prepare(summed, divided_first=() if self.trained.sharded else summed[1:])
        made = (f"{type(each).__name__} {name}" for name, each in protected.items())
        self.gradients.shapes = ", ".join([self.gradients.shapes, *made])
        self.states.protect(protected, own)

    @property
    def comes_before_loops_of_others(self) -> bool:
        """Whether this rank replaces one whose others are in their loops, and has not come to its own."""
        groups = self.groups
        joined = self.rendezvous.group is not None
        return groups is not None and not joined and groups.replays_next and not groups.restored

    def refuse_to_join(self, why: str) -> None:
        """Meet the others, who wait in their loops, only to have all ranks begin again.

        Raises:
            ConnectionAbortedError: they do.
        """
        if self.groups is None:
            return
        ranks, above = WholeRanks(self.line, self.groups, self.loops, self.records, self.files), -1
        ranks.prepare(torch.device("cpu"))
        self.channel.on_membership = lambda newer: (
            self.rendezvous.interrupt(newer) | ranks.group.abort_below(newer.epoch)
        )
        ranks.refuse(why)
        while True:
            membership = run(ranks.await_membership(above))
            above = membership.epoch
            with contextlib.suppress(GroupBrokenError):  # somebody else was lost, too, and there is a newer one soon
                run(ranks.form(membership))

    def next_microbatch(self) -> int | None:
        """Return the microbatch to compute; None once the gradient of all ranks is reduced."""
        self.peers.iteration = self.core.iteration
        with self.peers.waiting(Waiting(Wait.GRADIENT, self.core.iteration)):
            return run(self.core.next_microbatch())

    @property
    def in_loops(self) -> bool:
        """Whether the script has come to its first loop."""
        return self.rendezvous.group is not None and self.core.epoch >= 0

    def membership(self) -> Membership:
        """Return the membership that this rank is in."""
        return self.core.membership if self.in_loops else self.rendezvous.membership

    def position(self, waits: Waiting | None, where: str) -> RankPosition:
        """Return what this rank has begun by now, where it is and what it waits for."""
        setup, collectives = self.groups.begun_counts if self.groups is not None else (0, 0)
        iterations = self.core.iteration + (self.core.phase is IterationPhase.REDUCED) if self.in_loops else 0
        if waits is not None and waits.wait is Wait.GRADIENT:
            iterations = waits.number + 1
        return RankPosition(
            rank=self.rank,
            where=where,
            waits=waits,
            setup=setup,
            begun=self.in_loops,
            collectives=collectives,
            iterations=iterations,
        )
