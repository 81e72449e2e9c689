"""The view of the provisioner. A pure function on `state`."""

from unicron.contracts.pools import MachineView, Pool, PoolsView, PoolView, Stage
from unicron_provisioner.demand import Pools, wanted
from unicron_provisioner.state import State

GOING = (Stage.RETIRING, Stage.LOST, Stage.RELEASING)


def view(state: State, pools: Pools) -> PoolsView:
    """Return all pools, and what their shell is to do."""
    counts = wanted(state, pools)
    errands = [run.errand for run in state.pools.values() if run.errand]
    return PoolsView(pools=[_pool(state, pool, counts[name]) for name, pool in pools.items()], errands=errands)


def _pool(state: State, pool: Pool, count: int) -> PoolView:
    serving, busy, run = state.serving(pool.name), state.busy(), state.pools[pool.name]
    machines = [
        MachineView(
            machine=id_,
            stage=each.stage,
            node=each.node,
            rack=each.rack,
            reason=each.reason,
            since=each.since,
        )
        for id_, each in state.machines.items()
        if each.pool == pool.name
    ]
    return PoolView(
        pool=pool,
        wanted=count,
        have=len(serving),
        asked=state.coming(pool.name),
        spare=sum(name not in busy for name in serving),
        going=len(state.of(pool.name, *GOING)),
        reason=run.reason,
        trouble=run.trouble,
        machines=machines,
    )
