"""How many nodes each pool is to have. Pure functions on `state`."""

from collections.abc import Mapping
from math import ceil

from unicron.contracts.pools import Pool
from unicron_provisioner.state import State

Pools = Mapping[str, Pool]


def wanted(state: State, pools: Pools) -> dict[str, int]:
    """Return how many nodes each pool is to have: what tasks can use and spares, from its minimum to its maximum.

    What people have started outside of all pools serves first, then the pools in their order.
    """
    most = sum(task.most for task in state.tasks.values() if not task.paused)
    others = sum(node.slots for node in state.nodes.values() if node.up and not node.drained and node.pool not in pools)
    left, found = max(0, most - others), {}
    for name, pool in pools.items():
        needed = ceil(left / pool.slots)
        found[name] = max(pool.min, min(pool.max, needed + pool.spares))
        left = max(0, left - min(needed, found[name]) * pool.slots)
    return found


def emptiest_rack(state: State, pool: Pool) -> str:
    """Return the rack of a pool that has the fewest of its machines; empty where it names none."""
    counts = dict.fromkeys(pool.racks, 0)
    for machine in state.machines.values():
        if machine.pool == pool.name and machine.rack in counts:
            counts[machine.rack] += 1
    return min(counts, key=lambda rack: counts[rack], default="")
