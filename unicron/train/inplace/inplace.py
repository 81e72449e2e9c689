"""A script that was written for torch.distributed and DistributedDataParallel, healed in place with no line changed.

What such a script calls is exchanged before its first line runs. Each of its ranks is then a worker whose only
microbatch in each iteration is its own: the survivors wait in the reduction of the gradient, as if it took long, and
the process that replaces a lost rank builds what the script builds, is brought to the same place of its loops
(`unicron.train.loops.loops`) and computes what is missing. To the core each rank is a replica; to everything else it
is a place of the only replica, so no membership lacks a rank, and a replacement is started as the rank it replaces. The
script's other collectives run in a group of their own; one that breaks raises what torch would raise.
"""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from unicron.contracts.tasks import WorkerPhase
from unicron.contracts.worker import Finished, Membership, Progress, Ready, printable_cause
from unicron.errors import GroupBrokenError, InvalidInputError
from unicron.train.carry.beside import evidence_of
from unicron.train.carry.files import Files
from unicron.train.groups.rendezvous import await_all_done
from unicron.train.inplace.abandon import abandons, give_way, is_raised_by_us, why_not_in_place
from unicron.train.inplace.groups import ScriptGroups
from unicron.train.inplace.iteration import ScriptIteration
from unicron.train.inplace.member import Member
from unicron.train.inplace.parallel import Parallel
from unicron.train.inplace.peers import Wait, Waiting, script_line
from unicron.train.inplace.seed import Seed
from unicron.train.inplace.takeover import Takeover
from unicron.train.inplace.trained import Trained
from unicron.train.loops.loops import Loops
from unicron.train.worker.channel import AgentChannel
from unicron.train.worker.phases import IterationPhase
from unicron.train.worker.shell import run

SPREADING = "torch.distributed.fsdp._fully_shard._fsdp_state"
"""Where torch keeps what `fully_shard` makes of a module."""


class InPlace:
    """One rank of such a script.

    Args:
        channel: to the agent.
        files: that the script opens.
        seed: from which a process on trial grows; None where this rank is not drilled.

    Attributes:
        rank, size: of this process, and how many there are.
        trained: what the script has made.
        loops: that it is in.
        iteration: likewise.
        abandon: ends this process, for an error that the script is not to see.
    """

    def __init__(self, channel: AgentChannel, files: Files, seed: Seed | None) -> None:
        self._channel, self._files, self.trained = channel, files, Trained()
        self.loops = Loops(
            int(os.environ["UNICRON_PLACE"]),
            self.trained.record,
            self._begin_loops,
            lambda record: self._takeover.publish(record),  # noqa: PLW0108 there is none yet
            lambda: self.trained.is_complete and self._member.groups is not None,
        )
        self._member = Member(channel, files, self.loops, self.trained)
        self.rank, self.size = self._member.rank, self._member.size
        self._takeover = self._make_takeover(seed)
        self.iteration = ScriptIteration(self._member, self._takeover)
        self.abandon = self.loops.abandon = self._member.abandon
        self._pid, self._is_apart = os.getpid(), False

    def _make_takeover(self, seed: Seed | None) -> Takeover:
        return Takeover(self._member, self._files, seed)

    def stay_apart(self, given: Mapping[str, Any]) -> bool:
        """Return whether the script begins another group than that of all ranks, as where each trains by itself.

        Then torch makes it, nobody is healed in place, and all begin again where a rank is lost.

        Args:
            given: to `init_process_group`, by name.
        """
        own = {"world_size": self.size, "rank": self.rank}
        other = next((name for name, each in own.items() if given.get(name, -1) not in {-1, None, each}), "")
        if other and not self._is_apart:
            self._is_apart = True
            self._takeover.refuse_all(
                f"init_process_group() is given {other}={given[other]}, and so the ranks are in no group together"
            )
            self._channel.on_membership = self._meet_nobody
            self._channel.send(Ready())
        return self._is_apart

    def _meet_nobody(self, membership: Membership) -> bool:
        self._member.join_unhealed(trains=False)
        return self._member.rendezvous.interrupt(membership)

    @abandons(Exception)
    def join_group(self) -> None:
        """Form the script's group, if all ranks are new; else a ghost stands in for it until the loops begin."""
        groups = self._member.make_groups(self.iteration.rejoin)
        if spreading := sys.modules.get(SPREADING):  # takes a group, so that all of it comes later
            kind = spreading.FSDPState
            kind.init = call_after(kind, lambda state: self.add_sharded(state._modules), "init")  # noqa: SLF001 it tells nobody
        self._join_membership(groups)

    def _join_membership(self, groups: ScriptGroups) -> None:
        groups.trial = self._takeover.drill
        self._member.rendezvous.join(groups)
        self._member.peers.watch()

    @property
    def replays_next(self) -> bool:
        """Whether this rank came later, and the next two collectives are replayed."""
        return self._member.groups is not None and self._member.groups.can_replay(2)

    @abandons(InvalidInputError)
    def add_model(self, model: Parallel, shared: Iterable[torch.Tensor]) -> None:
        """Add a model whose gradients are to be reduced, and broadcast these tensors of the first rank.

        Raises:
            InvalidInputError: the ranks are in no group together.
        """
        if self._is_apart:
            raise InvalidInputError(
                "DistributedDataParallel in a group that is not that of all ranks can't be healed in place; for that "
                "call init_process_group() without world_size and rank"
            )
        self.iteration.extend("a model is made DistributedDataParallel")
        if (groups := self._member.groups) is not None:  # who comes later gets them with the state
            groups.records_setup = False
            model.differed = _give(shared)
            groups.records_setup = True
        self.trained.models.append(model)
        reduced = {id(each) for each in model.reduced}
        for parameter in model.module.parameters():
            if id(parameter) in reduced:
                parameter.register_post_accumulate_grad_hook(lambda made: self.iteration.on_gradient(model, made))

    @abandons(InvalidInputError)
    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Add an optimizer that the script makes."""
        self.trained.add_optimizer(optimizer)

    @abandons(Exception)
    def synchronize_buffers(self, model: Parallel) -> None:
        """Give a model the buffers of the first rank, as a forward pass begins that needs them equal on all ranks."""
        if self._member.piggyback is not None:
            self._member.piggyback.synchronize_buffers(model)

    def add_sharded(self, modules: Iterable[torch.nn.Module]) -> None:
        """Add modules that were sharded over the ranks; those inside of others come first."""
        for module in modules:
            self.trained.add_sharded(module)
            module.register_forward_pre_hook(lambda made, _: self.begin_forward(made), prepend=True)
            module.register_forward_hook(lambda made, *_: self.trained.reshard(made))

    def begin_forward(self, model: torch.nn.Module) -> None:
        """Begin an iteration with the forward pass of a model, unless one has begun or the model is evaluated."""
        self.iteration.begin_forward(model)

    @abandons(Exception)
    def _begin_loops(self) -> None:
        """Protect what the script has made, as its first loop trains, and join the other ranks.

        Raises:
            InvalidInputError: it has made some of that in the loop.
        """
        groups = self._member.groups
        if groups is None or not self.trained.is_as_recorded:
            raise InvalidInputError(
                f"a model or an optimizer is made in the loop at {self.loops.first.partition('#')[0]}, which trains "
                "it, and a rank that is replaced would not have it: make it before that loop"
            )
        self._takeover.begin()
        self._member.begin_loops(groups)
        groups.began_at = groups.began_at or self._files.begin_loops()
        self._join_ranks()
        self._files.end()
        groups.ended.in_loops = True

    def _join_ranks(self) -> None:
        """Join the other ranks and load their state; take over the replaced rank if there is one."""
        self._channel.on_membership = self._member.rendezvous.interrupt
        core = self._member.core
        with self._member.peers.waiting(Waiting(Wait.LOOP)):
            run(core.join_first())
        if core.phase is IterationPhase.TAKEN:
            core.enter()
        if self.loops.candidate_chains:
            self._takeover.take_over()
        else:
            self._files.set_joins_late(late=False)
            self._member.records.move_to(core.membership, ())
            self._takeover.compare_parameters()

    @contextlib.contextmanager
    def run_to_end(self) -> Iterator[None]:
        """Run a script inside, and report the task as finished where it ends well, be it by `sys.exit()`."""
        try:
            yield
        except SystemExit as ending:
            if ending.code is None or ending.code == 0:
                self._finish(f"by sys.exit() at {script_line(traceback.extract_tb(ending.__traceback__))}")
            self._tell_failed(ending)
            raise
        except NameError as error:
            lacking = self.loops.taker.lacking
            if why := next((each for name, each in lacking.items() if f"'{name}'" in str(error)), ""):
                where = script_line(traceback.extract_tb(error.__traceback__))
                self._takeover.begin_again(f"{error} at {where}, as it can't go along to a new rank: {why}")
            self._tell_failed(error)
            raise
        except Exception as error:
            self._tell_failed(error)
            if is_raised_by_us(error) and why_not_in_place(error):
                self.abandon(error)
            raise
        self._finish(f"at the end of {Path(sys.argv[0]).name}")

    def _tell_failed(self, error: BaseException) -> None:
        """Have all ranks begin again where this one, which replaces another, fails before the loop that they are in.

        It fails where no rank did before, so maybe for what it found because it came later; another would fail, too.

        Args:
            error: that has left the script.

        Raises:
            ConnectionAbortedError: they do.
        """
        if os.getpid() != self._pid:
            return
        what, where = f"{type(error).__name__}: {error}".partition("\n")[0], traceback.extract_tb(error.__traceback__)
        failed = f"failed before {{}} loop with {what} at {script_line(where)}"
        if self._files.begins_anew:  # maybe for what it does not find
            give_way(printable_cause(f"it was to begin as it did at first, and {failed.format('its')}"))
        if self._member.comes_before_loops_of_others:
            self._member.refuse_to_join(f"a new rank {failed.format('their')}")

    def _finish(self, where: str) -> None:
        """Report that the script is done, once it is on all ranks: one that ends closes connections that others use.

        Args:
            where: place at which it has ended, for people.

        Raises:
            InvalidInputError: the others are in a loop that this rank has not come to.
            ConnectionAbortedError: a rank has failed, and what it was to do behind its loop is not done.
        """
        if os.getpid() != self._pid:  # a process that the script has forked ends
            return
        # from here on it waits: a script that has evaluated its model last would still count as one that computes
        self._channel.send(Progress(iteration=max(0, self._channel.iteration), phase=WorkerPhase.WAITING, done=0))
        self._takeover.drill.finish()
        if self._member.groups is None and not self._is_apart:
            self.join_group()
        self._files.set_joins_late(late=False)
        in_loops = self._member.in_loops
        if self._member.comes_before_loops_of_others:
            raise InvalidInputError(
                "this script has ended before the loop that the other ranks are in: something is not as it was "
                "when they began, such as a file of theirs that it found; let it go on from that"
            )
        if self._is_apart:
            self._member.rendezvous.membership = self._channel.await_membership(-1)
        membership = self._member.membership()
        with contextlib.suppress(GroupBrokenError):
            self._member.peers.publish(self._member.position(None, where))
        if not await_all_done(
            lambda: self._member.rendezvous.exchange("-done", membership, b""),
            lambda: self._channel.newest.epoch > membership.epoch,
        ):
            raise ConnectionAbortedError(
                "a rank has failed that had not come to the end of this script, as this one had: all begin again"
            )
        if in_loops:
            self._member.ranks.leave()
        self._channel.send(Finished(iterations=int(os.environ["UNICRON_ITERATIONS"])))


@torch.no_grad()
def _give(shared: Iterable[torch.Tensor]) -> frozenset[str]:
    """Give all ranks these tensors of the first; return the evidence of those of which any rank had another one."""
    tensors = list(shared)
    if not tensors:
        return frozenset()
    before = [*map(_evidence, tensors)]
    for each in tensors:
        dist.broadcast(each, 0)
    given = [*map(_evidence, tensors)]
    apart = [int(one != other) for one, other in zip(before, given, strict=True)]
    differ = torch.tensor(apart, device=tensors[0].device)
    dist.all_reduce(differ)
    return frozenset(each for each, found in zip(given, differ.tolist(), strict=True) if found)


def _evidence(tensor: torch.Tensor) -> str:
    try:
        return evidence_of(tensor)
    except (RuntimeError, TypeError):  # of a class of its own
        return ""


def call_after(kind: type, note: Callable[[Any], Any], how: str = "__init__") -> Callable[..., None]:
    """Return a method that calls the one of this name, and then `note` with the object."""
    make = vars(kind)[how]

    def made(self: Any, *arguments: Any, **named: Any) -> None:
        make(self, *arguments, **named)
        note(self)

    return made
