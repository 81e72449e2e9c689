"""Nodes that a pool has lost, and how many of them may be replaced in an hour. Pure functions on a pool's run."""

from unicron.contracts.pools import Pool
from unicron_provisioner.state import Loss, Owed, PoolRun

HOUR_S = 3600.0
MOMENT_S = 10.0
"""Losses of a rack within this many seconds count as one."""


def owe(run: PoolRun, owed: Owed, rack: str, now: float) -> None:
    """Note that a node is to be replaced.

    Args:
        run: of its pool.
        owed: the node; `loss` is the id of the fact by which it went.
        rack: that it was in, empty where that is not known.
        now: Unix seconds.
    """
    run.losses = {key: loss for key, loss in run.losses.items() if now - loss.at < HOUR_S}
    same = (key for key, loss in run.losses.items() if rack and loss.rack == rack and now - loss.at <= MOMENT_S)
    owed.loss = next(same, owed.loss)
    run.losses.setdefault(owed.loss, Loss(rack=rack, at=now))
    run.owed.append(owed)


def may_replace(pool: Pool, run: PoolRun, owed: Owed, now: float) -> bool:
    """Return whether a node may be replaced now, and count it if so."""
    loss = run.losses.setdefault(owed.loss, Loss(at=now))
    if not loss.spent and len(_spent(run, now)) >= pool.replacements:
        return False
    loss.spent = True
    return True


def next_replacement_s(run: PoolRun, now: float) -> float:
    """Return the seconds until one more may be replaced, where no more may be now."""
    return max(0.0, min(_spent(run, now), default=now) + HOUR_S - now)


def _spent(run: PoolRun, now: float) -> list[float]:
    return [loss.at for loss in run.losses.values() if loss.spent and now - loss.at < HOUR_S]
