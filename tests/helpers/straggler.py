"""Records of a job made up, as its workers would send them."""

import random

from unicron.contracts.events import StepTimed
from unicron.contracts.timings import OPERATIONS, Op

FORWARD, BACKWARD, REDUCE, OPTIMIZER, GC = (
    OPERATIONS.index(name)
    for name in ("forward-compute", "backward-compute", "grads-reduce-scatter", "optimizer", "gc")
)


def records(iteration, world_size=4, *, slow=None, factor=1.5, microbatches=3, skew_s=0.0, seed=0, **fields):
    """Return what each rank records of an iteration.

    Args:
        iteration: its number.
        world_size: number of ranks.
        slow: rank that computes `factor` times as long.
        factor: likewise.
        microbatches: of each rank; or a list of one number for each.
        skew_s: by how much the clock of each rank is ahead of the one before.
        seed: of the noise.
        fields: of the messages.
    """
    noise = random.Random(f"{seed}-{iteration}")
    counts = microbatches if isinstance(microbatches, list) else [microbatches] * world_size
    all_ops = []
    for rank in range(world_size):
        now, ops = 0, []
        for number in range(counts[rank]):
            for kind, usual in ((FORWARD, 20_000), (BACKWARD, 40_000)):
                took = round(usual * noise.uniform(0.98, 1.02) * (factor if rank == slow else 1.0))
                ops.append(Op(kind=kind, microbatch=rank + number * world_size, start_us=now, duration_us=took))
                now += took
        all_ops.append((now, ops))
    end = max(now for now, _ in all_ops) + 1_000
    found = []
    for rank, (now, ops) in enumerate(all_ops):
        ops.append(Op(kind=REDUCE, microbatch=-1, start_us=now, duration_us=end - now))
        ops.append(Op(kind=OPTIMIZER, microbatch=-1, start_us=end, duration_us=500))
        usual = {"task": "gpt", "epoch": 1, "node": f"node-{rank}", "slot": 0, "worker": f"gpt-{rank}"}
        began = 1e9 + iteration + rank * skew_s
        message = {**usual, "iteration": iteration, "rank": rank, "world_size": world_size, "began": began, "ops": ops}
        found.append(StepTimed(**{**message, "at": began, **fields}))
    return found
