"""Gradients that are not finite: found before the update, named, and left to a rule."""

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from unicron.contracts.tasks import ParallelLayout
from unicron.contracts.worker import Membership, NotFinite
from unicron.errors import NonFiniteGradientError
from unicron.train.worker.shell import Gradients, Ranks

Rule = Literal["skip", "stop", "retry"]


class Account(msgspec.Struct, frozen=True):
    """A rank's report when the sum of all gradients is not finite.

    Attributes:
        bad: its microbatches whose own gradient was not.
        done: all that are in its sum.
    """

    worker: str
    bad: list[int]
    done: list[int] = []


class Finite:
    """One rank's part in it.

    Args:
        ranks: that sum their gradients.
        gradients: of this one.
        rule: what becomes of an update whose gradient is not finite; None: nothing is looked at.
    """

    def __init__(self, ranks: Ranks, gradients: Gradients, rule: Rule | None) -> None:
        self._ranks, self._gradients, self._rule = ranks, gradients, rule
        self._pending: list[tuple[int, object]] = []
        self._tried = (-1, -1)
        self._suspected: list[int] = []

    def clear(self) -> None:
        """Forget what was accumulated."""
        self._pending = []

    def record(self, microbatch: int) -> None:
        """Have the sum looked at with the gradient of this microbatch in it. What came of it is asked for in need."""
        if self._rule is not None:
            self._pending.append((microbatch, self._gradients.is_sum_finite))

    def _first_bad(self) -> list[int]:
        """Return the first microbatch with which the sum was not finite, if any; later sums say no more."""
        return next(([microbatch] for microbatch, finite in self._pending if not finite), [])

    @property
    def is_finite(self) -> bool:
        """Whether the gradient of all may be used, as far as this rank knows."""
        return self._rule is None or self._gradients.finite

    async def decide(
        self, membership: Membership, iteration: int, done: Iterable[int], microbatches: int
    ) -> list[list[int]]:
        """Name whose gradient is not finite; return what each replica is to compute once more, if the rule says so.

        That is once in a membership. Nothing is returned where the rule is to go on without this update.

        Raises:
            GroupBrokenError: a rank was lost meanwhile.
            NonFiniteGradientError: the rule is to stop, or it is not finite for the second time; the same on all ranks.
        """
        bad = self._first_bad()
        mine = Account(membership.member.worker, bad, sorted(done))
        accounts = await self._ranks.gather(mine) if membership.world_size > 1 else [mine]
        if bad or (membership.rank == 0 and not any(each.bad for each in accounts)):
            self._report(membership, iteration, bad)
        if self._rule == "skip":
            return []
        again, self._tried = self._tried == (membership.epoch, iteration), (membership.epoch, iteration)
        if self._rule == "stop" or again:
            if membership.world_size > 1:
                await self._ranks.gather(mine)  # a rank that ends stops the others: they all get here first
            twice = ", nor is it when computed again" if again else ""
            raise NonFiniteGradientError(
                f"iteration {iteration}: the gradient is not finite{twice}: {_name_accounts(accounts)}"
            )
        self._suspected = bad
        return swap_replicas(accounts, membership.shape, microbatches)

    def settle(self, membership: Membership, iteration: int) -> None:
        """Take it that the gradient is finite; whose was not, though others' of the same microbatches is, says so."""
        if self._suspected and self._tried[1] == iteration:
            self._report(membership, iteration, self._suspected, suspect=True)
        self._suspected = []

    def _report(self, membership: Membership, iteration: int, bad: list[int], *, suspect: bool = False) -> None:
        message = NotFinite(iteration=iteration, epoch=membership.epoch, rank=membership.rank, microbatches=bad)
        self._ranks.send(msgspec.structs.replace(message, rule=str(self._rule), suspect=suspect))


def swap_replicas(accounts: Sequence[Account], layout: ParallelLayout, microbatches: int) -> list[list[int]]:
    """Return what each replica is to compute once more: all that is not in a sum which is finite, by other replicas.

    A sum can't be taken apart, so one that is spoilt counts for nothing. Where every replica's is, each takes what the
    one before it did, and an only one what it did itself.
    """
    size, replicas = layout.replica_workers, layout.replicas
    of = [accounts[replica * size :][:size] for replica in range(replicas)]
    sound = [replica for replica in range(replicas) if not any(each.bad for each in of[replica])]
    owner = {microbatch: replica for replica in range(replicas) for microbatch in of[replica][0].done}
    lost = [microbatch for microbatch in range(microbatches) if owner.get(microbatch) not in sound]
    todo: list[list[int]] = [[] for _ in range(replicas)]
    for number, microbatch in enumerate(lost):
        other = (owner.get(microbatch, number) + 1) % replicas
        todo[sound[number % len(sound)] if sound else other].append(microbatch)
    return todo


def _name_accounts(accounts: Sequence[Account]) -> str:
    named = [
        f"that of microbatch {each.bad[0]} on rank {rank} ({each.worker})"
        for rank, each in enumerate(accounts)
        if each.bad
    ]
    return "; ".join(named) or "each microbatch's is, and their sum is not"
