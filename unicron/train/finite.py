"""Gradients that are not finite: found before the update, named, and left to a rule."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from unicron.contracts.worker import Membership, NotFinite
from unicron.errors import NonFiniteGradientError
from unicron.train.shell import Shell

Rule = Literal["skip", "stop"]


class Account(msgspec.Struct, frozen=True):
    """What a rank says when the sum of all gradients is not finite: its microbatches whose own was not."""

    worker: str
    bad: list[int]


class Finite:
    """One rank's part in it.

    Args:
        shell: of the rank.
        rule: what becomes of an update whose gradient is not finite; None: nothing is looked at.
    """

    def __init__(self, shell: Shell, rule: Rule | None) -> None:
        self._shell, self._rule = shell, rule
        self._bad: list[int] = []

    def clear(self) -> None:
        """Forget what was accumulated."""
        self._bad = []

    def note(self, microbatch: int) -> None:
        """Look at the sum with the gradient of this microbatch in it; behind the first bad one it tells no more."""
        if self._rule is not None and not self._bad and not self._shell.summed:
            self._bad = [microbatch]

    @property
    def holds(self) -> bool:
        """Whether the gradient of all may be used, as far as this rank's part of it tells."""
        return self._rule is None or self._shell.finite

    async def decide(self, membership: Membership, iteration: int) -> None:
        """Name whose gradient is not finite; return where the rule is to go on without this update.

        Raises:
            GroupBrokenError: a rank was lost meanwhile.
            NonFiniteGradientError: the rule is to stop, the same on all ranks.
        """
        mine = Account(membership.member.worker, self._bad)
        accounts = await self._shell.gather(mine) if membership.world_size > 1 else [mine]
        rank = membership.rank
        if self._bad or (rank == 0 and not any(each.bad for each in accounts)):
            told = NotFinite(iteration=iteration, epoch=membership.epoch, rank=rank, microbatches=self._bad)
            self._shell.say(msgspec.structs.replace(told, rule=str(self._rule)))
        if self._rule == "stop":
            if membership.world_size > 1:
                await self._shell.gather(mine)  # who ends has the others stopped: not before it is told
            raise NonFiniteGradientError(f"iteration {iteration}: the gradient is not finite: {_named(accounts)}")


def _named(accounts: Sequence[Account]) -> str:
    named = [
        f"that of microbatch {each.bad[0]} on rank {rank} ({each.worker})"
        for rank, each in enumerate(accounts)
        if each.bad
    ]
    return "; ".join(named) or "each microbatch's is, and their sum is not"
