"""The graphical summary above a failure's timeline: actors and actions in a few words, equal ones merged."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from unicron.contracts import commands, events
from unicron.contracts.base import Message


class Sign(NamedTuple):
    """An actor and its action.

    Attributes:
        actor: by name, for where no ranks say it.
        ranks: of the task's membership; after a regroup of the new one.
        task: that they are of.
        what: was done.
        group: the same for all that are one mark; empty for one that stands alone.
    """

    actor: str
    what: str
    ranks: tuple[int, ...] = ()
    task: str = ""
    group: str = ""


def _worker(message: Any, rank: int | None, what: str) -> Sign:
    return Sign(message.worker, what) if rank is None else Sign("", what, (rank,), message.task)


def _failed(message: events.FailureDetected, rank: int | None) -> Sign:
    victim = message.worker or message.node or message.task
    return Sign("detector:", f"{victim if rank is None else f'rank {rank}'} failed")


_SIGNS: dict[type[Message], Callable[[Any, int | None], Sign | None]] = {
    events.WorkerExited: lambda m, rank: None if m.expected else _worker(m, rank, "lost" if m.signal else "exited"),
    events.WorkerRaised: lambda m, rank: _worker(m, rank, "raised"),
    events.WorkerStalled: lambda m, rank: _worker(m, rank, "stalled"),
    events.NodeSuspected: lambda m, _: Sign(m.node, "suspected"),
    events.FailureDetected: _failed,
    events.PlanDecided: lambda m, _: Sign("planner:", f"plan {m.plan.number}"),
    commands.StartWorker: lambda m, _: Sign(m.worker, "to be started"),
    events.WorkerReady: lambda m, _: Sign(m.worker, "ready"),
    commands.Regroup: lambda m, _: Sign(m.task, "ordered to regroup", tuple(m.ranks), m.task, f"to {m.task} {m.epoch}"),
    events.Regrouped: lambda m, _: Sign(
        "", f"regrouped, iteration {m.iteration} resumed", (m.rank,), m.task, f"in {m.task} {m.epoch}"
    ),
    events.TaskRecovered: lambda m, _: Sign(m.task, f"back at {m.workers} worker{'s' * (m.workers != 1)}"),
}


def sign(message: Message, rank: int | None = None) -> Sign | None:
    """Return what is to be marked of a message, None for nothing; `rank` is what its worker had."""
    found = _SIGNS.get(type(message))
    return None if found is None else found(message, rank)


def words(signs: Iterable[Sign], *, named: bool = False) -> str:
    """Return what signs of one group say; `named`: of which task ranks are, since there are several."""
    found = list(signs)
    ranks = sorted({rank for each in found for rank in each.ranks})
    of = f"{found[0].task} " if named and ranks else ""
    return f"{of}{_ranks(ranks) if ranks else found[0].actor} {found[-1].what}"


def _ranks(ranks: list[int]) -> str:
    """Return ranks as people say them: rank 3, ranks 0-2, ranks 0, 2-4."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return f"rank{'s' * (len(ranks) > 1)} {', '.join('-'.join(map(str, run)) for run in runs)}"
