"""Traces made up, with causes of slowness planted in them: for tests and benchmarks, and to try the pictures.

Durations are drawn, then one forward-and-one-backward pipeline (1F1B) is played through with them: a communication
starts when its own side is ready and ends after the last of its group has started, plus its transfer time. The player
here knows nothing of the analysis, so that each can be held against the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from unicron_straggler.analysis.trace import CODES, Floats, Meta, Trace

from unicron_simulator.planting import Plant, Shape, Times, draw

Node = tuple[str, int, int]
"""Op type, place among those of its type, stage."""


def make(shape: Shape, seed: int = 0, plants: Sequence[Plant] = (), name: str = "synthetic") -> Trace:
    """Return the trace of a job with the causes of `plants`; the same arguments give the same trace.

    What is drawn for one cause does not depend on which others are planted.
    """
    return as_trace(play(shape, draw(shape, seed, plants)), shape, name)


def step_times(shape: Shape, seed: int = 0, plants: Sequence[Plant] = ()) -> Floats:
    """Return the seconds (steps,) that each step of `make` takes, without making the trace."""
    ends = play(shape, draw(shape, seed, plants)).ends
    last = np.array([ends["optimizer", 0, stage] for stage in range(shape.pp)])
    return np.asarray(last.max(axis=(0, 2)))


def order(shape: Shape, stage: int) -> list[tuple[str, int]]:
    """Return what a stage computes, in order: 1F1B."""
    ahead = min(shape.pp - stage - 1, shape.microbatches)
    found = [("forward-compute", number) for number in range(ahead)]
    for number in range(shape.microbatches - ahead):
        found += [("forward-compute", ahead + number), ("backward-compute", number)]
    return found + [("backward-compute", number) for number in range(shape.microbatches - ahead, shape.microbatches)]


@dataclass(frozen=True)
class Played:
    """Start and end of each operation, in seconds (steps, dp)."""

    starts: dict[Node, Floats]
    ends: dict[Node, Floats]


def play(shape: Shape, times: Times) -> Played:
    """Play the pipeline through."""
    player = _Player(shape, times)
    player.gather()
    todo = [order(shape, stage) for stage in range(shape.pp)]
    done = [0] * shape.pp
    while any(done[stage] < len(todo[stage]) for stage in range(shape.pp)):
        for stage in range(shape.pp):
            while done[stage] < len(todo[stage]) and player.compute(todo[stage], done[stage], stage):
                done[stage] += 1
    player.finish([todo[stage][-1] for stage in range(shape.pp)])
    return Played(player.starts, player.ends)


class _Player:
    """Holds what has been played so far."""

    def __init__(self, shape: Shape, times: Times) -> None:
        self.shape, self.times = shape, times
        self.zero = np.zeros((shape.steps, shape.dp))
        self.starts: dict[Node, Floats] = {}
        self.ends: dict[Node, Floats] = {}

    def gather(self) -> None:
        for stage in range(self.shape.pp):
            self._group([("params-all-gather", 0, stage)], [self.zero], across=True)

    def compute(self, todo: list[tuple[str, int]], place: int, stage: int) -> bool:
        """Play the operation at `place`; return whether what it waits for had been played."""
        optype, number = todo[place]
        forward = optype == "forward-compute"
        kind, source = ("forward", stage - 1) if forward else ("backward", stage + 1)
        ready = [self.ends["params-all-gather", 0, stage]] if place == 0 else [self._end(todo[place - 1], stage)]
        if 0 <= source < self.shape.pp:
            sent = self.ends.get((optype, number, source))
            if sent is None:
                return False
            received = self._before(todo, place, stage)
            sender, receiver = (f"{kind}-send", number, source), (f"{kind}-recv", number, stage)
            for node, waits in ((sender, sent), (receiver, received)):
                before = self.ends.get((node[0], number - 1, node[2]), self.zero)
                self.starts[node] = np.maximum(waits, before)
            self._group([sender, receiver], [self.starts[sender], self.starts[receiver]])
            ready.append(self.ends[receiver])
        self._alone((optype, number, stage), np.max(ready, axis=0))
        return True

    def finish(self, last: list[tuple[str, int]]) -> None:
        """Play what follows the last compute of each stage."""
        stages = range(self.shape.pp)
        for stage in stages:
            self._alone(("gc", 0, stage), self._end(last[stage], stage))
            self._alone(("layernorm-grads-all-reduce", 0, stage), self.ends["gc", 0, stage])
        before = {stage: self.ends["layernorm-grads-all-reduce", 0, stage] for stage in stages}
        if self.shape.pp > 1:
            nodes: list[Node] = [("embedding-grads-all-reduce", 0, stage) for stage in (0, self.shape.pp - 1)]
            self._group(nodes, [before[node[2]] for node in nodes])
            before |= {node[2]: self.ends[node] for node in nodes}
        for stage in stages:
            self._group([("grads-reduce-scatter", 0, stage)], [before[stage]], across=True)
        clips: list[Node] = [("optimizer-clip-main-grad", 0, stage) for stage in stages]
        self._group(clips, [self.ends["grads-reduce-scatter", 0, stage] for stage in stages], across=True)
        for stage in stages:
            self._alone(("optimizer", 0, stage), self.ends["optimizer-clip-main-grad", 0, stage])

    def _before(self, todo: list[tuple[str, int]], place: int, stage: int) -> Floats:
        """Return what a receive waits for besides the one before it."""
        optype, number = todo[place]
        if number > 0:
            return self.ends[optype, number - 1, stage]
        if optype == "backward-compute" and place >= 2:
            return self._end(todo[place - 2], stage)
        return self.zero

    def _end(self, operation: tuple[str, int], stage: int) -> Floats:
        return self.ends[operation[0], operation[1], stage]

    def _alone(self, node: Node, start: Floats) -> None:
        self.starts[node] = start
        self.ends[node] = start + self.times[node[0]][node[1], node[2]]

    def _group(self, nodes: Sequence[Node], starts: Sequence[Floats], *, across: bool = False) -> None:
        """Play operations that transfer once all of them have started, `across` data-parallel ranks too."""
        latest = np.max(starts, axis=0)
        if across:
            latest = latest.max(axis=1, keepdims=True)
        for node, start in zip(nodes, starts, strict=True):
            self.starts[node] = start
            self.ends[node] = latest + self.times[node[0]][node[1], node[2]]


def as_trace(played: Played, shape: Shape, name: str) -> Trace:
    """Return what was played as a trace, sorted by step, data-parallel rank and stage."""
    nodes = sorted(played.starts, key=lambda node: node[2])
    small = np.int16
    times = (shape.steps, shape.dp, len(nodes))
    start, duration = np.empty(times), np.empty(times)
    for place, node in enumerate(nodes):
        start[:, :, place] = played.starts[node]
        np.subtract(played.ends[node], played.starts[node], out=duration[:, :, place])
    optypes, numbers, stages = (np.array(column) for column in zip(*nodes, strict=True))
    computes = np.isin(optypes, ("forward-compute", "backward-compute"))

    def each(values: object) -> np.ndarray[tuple[int], np.dtype[np.int16]]:
        return np.broadcast_to(np.asarray(values, small), times).reshape(-1)

    ranks = np.arange(shape.dp)[:, None]
    return Trace(
        meta=Meta(name, shape.dp, shape.pp, world_size=shape.dp * shape.pp),
        dp_rank=each(ranks),
        stage=each(stages),
        rank=each(stages * shape.dp + ranks),
        step=each(np.arange(shape.steps)[:, None, None]),
        optype=each([CODES[optype] for optype in optypes]),
        start=start.reshape(-1),
        duration=duration.reshape(-1),
        seq_id=each(numbers),
        mc=each(np.where(computes, 0, -1)),
        mb_id=each(np.where(computes, numbers, -1)),
        gmc=each(np.where(computes, stages, -1)),
    )
