"""The simulator: the times of a step, for many scenarios, steps and data-parallel ranks at once.

Operations are taken once, in an order of the graph; each is a vector over (scenarios, steps, dp). A scenario says which
operations take the time that was traced; all others take the ideal time of their type.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from unicron_straggler.analysis.model import Graph
from unicron_straggler.analysis.trace import Floats

BLOCK = 1 << 16
"""Elements of a vector at most (512 KB): those in use together should stay in the cache of a core."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Scenario:
    """The operations that take the time that was traced.

    Attributes:
        codes: of these types; None for all.
        stages: on these stages; None for all.
        fixed: (dp, pp) workers that are ideal all the same; None for none.
    """

    codes: frozenset[int] | None = None
    stages: frozenset[int] | None = None
    fixed: Mask | None = None

    def traces(self, code: int, stage: int) -> bool:
        """Return whether operations of a type on a stage take the traced time (but on fixed workers)."""
        return (self.codes is None or code in self.codes) and (self.stages is None or stage in self.stages)


def step_times(
    graph: Graph,
    durations: Mapping[int, Floats],
    ideal: Mapping[int, float],
    scenarios: Sequence[Scenario],
) -> Floats:
    """Return (scenarios, steps) seconds that each step takes."""
    times: Floats = _in_blocks(_Together, graph, durations, ideal, scenarios).max(-1)
    return times


def alone_times(
    graph: Graph,
    durations: Mapping[int, Floats],
    ideal: Mapping[int, float],
    scenarios: Sequence[Scenario],
) -> Floats:
    """Return (scenarios, steps, dp) seconds that a step takes if only one data-parallel rank is as in the scenario.

    All the others are ideal and hence equal, so that one of them stands for all.
    """
    return _in_blocks(_Alone, graph, durations, ideal, scenarios)


def ideal_time(graph: Graph, ideal: Mapping[int, float]) -> float:
    """Return the seconds that a step takes with every operation at its ideal."""
    ends: dict[int, float] = {}
    for wave in graph.waves:
        start = max((ends[wait] for wait in wave.waits), default=0.0)
        for place in wave.members:
            ends[place] = start + ideal[graph.keys[place][0]]
    return max(ends[place] for place in graph.last)


def _in_blocks(
    kind: "type[_Together]",
    graph: Graph,
    durations: Mapping[int, Floats],
    ideal: Mapping[int, float],
    scenarios: Sequence[Scenario],
) -> Floats:
    """Run blocks of steps one after the other and put their times together."""
    steps, _, _, dp = next(iter(durations.values())).shape
    size = max(1, BLOCK // (len(scenarios) * dp))
    run = kind(graph, ideal, scenarios)
    blocks = []
    for begin in range(0, steps, size):
        part = {code: each[begin : begin + size] for code, each in durations.items()}
        blocks.append(run(part))
    return np.concatenate(blocks, axis=1)


class _Together:
    """All data-parallel ranks are as in the scenario."""

    def __init__(self, graph: Graph, ideal: Mapping[int, float], scenarios: Sequence[Scenario]) -> None:
        self._graph = graph
        self._ideal = ideal
        self._scenarios = scenarios
        self._traced = {
            (code, stage): self._tracing(code, stage) for code, stage in {(key[0], key[2]) for key in graph.keys}
        }

    def _tracing(self, code: int, stage: int) -> list[tuple[int, Mask | None]]:
        """Return the scenarios that take the traced time, and which data-parallel ranks are ideal in them."""
        found: list[tuple[int, Mask | None]] = []
        for at, scenario in enumerate(self._scenarios):
            if scenario.traces(code, stage):
                fixed = None if scenario.fixed is None else scenario.fixed[:, stage]
                found.append((at, fixed if fixed is not None and fixed.any() else None))
        return found

    def __call__(self, durations: Mapping[int, Floats]) -> Floats:
        """Return the latest end of a step for each (scenario, step, dp)."""
        steps, _, _, dp = next(iter(durations.values())).shape
        self._shape = (len(self._scenarios), steps, dp)
        self._spare: list[Floats] = []
        ends: dict[int, Floats] = {}
        for wave in self._graph.waves:
            start = self._start([ends[wait] for wait in wave.waits])
            if wave.synchronous and wave.waits:  # what waits for nothing starts everywhere with the step
                start[:] = start.max(-1, keepdims=True)
            for place in wave.members:
                ends[place] = self._end(start, self._graph.keys[place], durations)
            self._spare += [ends.pop(wait) for wait in wave.done]
            self._spare.append(start)
        latest = ends.pop(self._graph.last[0])
        for place in self._graph.last[1:]:
            np.maximum(latest, ends[place], out=latest)
        return latest

    def _empty(self) -> Floats:
        return self._spare.pop() if self._spare else np.empty(self._shape)

    def _start(self, waits: list[Floats]) -> Floats:
        """Return when all that is waited for is over, in a vector that may be written to."""
        start = self._empty()
        if not waits:
            start.fill(0.0)
        elif len(waits) == 1:
            np.copyto(start, waits[0])
        else:
            np.maximum(waits[0], waits[1], out=start)
            for wait in waits[2:]:
                np.maximum(start, wait, out=start)
        return start

    def _end(self, start: Floats, key: tuple[int, int, int], durations: Mapping[int, Floats]) -> Floats:
        code, seq, stage = key
        end = self._empty()
        ideal, tracing = self._ideal[code], self._traced[code, stage]
        if len(tracing) < len(self._scenarios):
            np.add(start, ideal, out=end)
        if tracing:
            traced = durations[code][:, seq, stage]
            for at, fixed in tracing:
                np.add(start[at], traced if fixed is None else np.where(fixed, ideal, traced), out=end[at])
        return end


class _Alone(_Together):
    """One data-parallel rank is as in the scenario, the others are ideal.

    The ideal ranks go beside the others: with them, a synchronous start is the later of the two.
    """

    def __call__(self, durations: Mapping[int, Floats]) -> Floats:
        """Return the latest end of a step for each (scenario, step, dp)."""
        steps, _, _, dp = next(iter(durations.values())).shape
        self._shape = (len(self._scenarios), steps, dp)
        self._spare = []
        ends: dict[int, Floats] = {}
        others: dict[int, Floats | float] = {}
        for wave in self._graph.waves:
            start = self._start([ends[wait] for wait in wave.waits])
            beside: Floats | float = 0.0
            for wait in wave.waits:
                beside = _later(beside, others[wait])
            if wave.synchronous and wave.waits:
                np.maximum(start, beside, out=start)
                beside = start.copy()
            for place in wave.members:
                key = self._graph.keys[place]
                ends[place] = self._end(start, key, durations)
                others[place] = beside + self._ideal[key[0]]
            self._spare += [ends.pop(wait) for wait in wave.done]
            self._spare.append(start)
        latest: Floats | float = 0.0
        for place in self._graph.last:
            latest = _later(_later(latest, ends[place]), others[place])
        return np.asarray(latest)


def _later(one: Floats | float, other: Floats | float) -> Floats | float:
    if isinstance(one, float) and isinstance(other, float):
        return max(one, other)
    return np.maximum(one, other)
