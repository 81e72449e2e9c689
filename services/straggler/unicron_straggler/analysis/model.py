"""The dependency model: which operation of a step waits for which, and which start together.

It is taken from the first step of the first data-parallel rank: in the rules of the study every step of every rank has
the same graph. Computation is ordered as traced, so that any pipeline schedule works, interleaved ones too.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from unicron.errors import InvalidInputError
from unicron_straggler.analysis.trace import CODES, OPTYPES, Meta

FORWARD, BACKWARD = CODES["forward-compute"], CODES["backward-compute"]
GATHER, SCATTER = CODES["params-all-gather"], CODES["grads-reduce-scatter"]
EMBEDDING, CLIP = CODES["embedding-grads-all-reduce"], CODES["optimizer-clip-main-grad"]
TAIL = tuple(
    CODES[name]
    for name in (
        "gc",
        "layernorm-grads-all-reduce",
        "embedding-grads-all-reduce",
        "grads-reduce-scatter",
        "optimizer-clip-main-grad",
        "optimizer",
    )
)
"""Operations after the last compute of a step, in order."""

Key = tuple[int, int, int]
"""Code of the op type, seq_id, stage."""


@dataclass(frozen=True, slots=True)
class Compute:
    """A forward or backward of the first step: code of its type, place among those of its type, chunk, microbatch."""

    code: int
    seq: int
    chunk: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class StageOps:
    """The operations of one stage in the first step.

    Attributes:
        computes: in order of start.
        counts: operations by code.
        gathers: model chunk of each params-all-gather.
    """

    computes: tuple[Compute, ...]
    counts: Sequence[int]
    gathers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wave:
    """Operations that start together: when all that any of them waits for is over.

    Attributes:
        members: places of the operations in `Graph.keys`.
        waits: places of what they wait for.
        synchronous: whether all data-parallel ranks start together too.
        done: places whose end nobody needs once this wave has ended.
    """

    members: tuple[int, ...]
    waits: tuple[int, ...]
    synchronous: bool
    done: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """The operations of a step, in waves that can be computed in their order.

    Attributes:
        keys: the operations.
        waves: in an order in which everything waited for comes first.
        pairs: places of a send and the recv it starts together with.
        last: places of operations for which none waits; the step ends with the latest.
    """

    keys: tuple[Key, ...]
    waves: tuple[Wave, ...]
    pairs: tuple[tuple[int, int], ...]
    last: tuple[int, ...]


def build(meta: Meta, stages: Sequence[StageOps]) -> Graph:
    """Return the graph of a step.

    Raises:
        InvalidInputError: sends and receives don't match one another or the computes, or there is a circle.
    """
    return _Builder(meta, stages).graph()


class _Builder:
    """Collects operations, what each waits for, and the waves."""

    def __init__(self, meta: Meta, stages: Sequence[StageOps]) -> None:
        self._meta = meta
        self._stages = stages
        self._places: dict[Key, int] = {}
        self._waits: list[list[int]] = []
        self._ends: dict[tuple[int, int], list[int]] = {}  # sends and receives that have a partner, by code and stage

    def graph(self) -> Graph:
        for stage in range(len(self._stages)):
            self._stage(stage)
        pairs = self._pairs()
        return _ordered(tuple(self._places), self._waits, self._groups(pairs), pairs)

    def _place(self, code: int, seq: int, stage: int) -> int:
        key = (code, seq, stage)
        if key not in self._places:
            self._places[key] = len(self._waits)
            self._waits.append([])
        return self._places[key]

    def _chain(self, places: Sequence[int], after: int | None = None) -> int | None:
        """Let each wait for the one before; return the last."""
        for place in places:
            if after is not None:
                self._waits[place].append(after)
            after = place
        return after

    def _all(self, code: int, stage: int) -> list[int]:
        return [self._place(code, seq, stage) for seq in range(self._stages[stage].counts[code])]

    def _stage(self, stage: int) -> None:
        ops = self._stages[stage]
        order = [self._place(one.code, one.seq, stage) for one in ops.computes]
        last = self._chain(order)
        for direction in ("forward", "backward"):
            self._transfers(stage, direction)
        first = next((at for at, one in enumerate(ops.computes) if one.code == BACKWARD), 0)
        if first >= 2:
            for name in ("backward-recv", "backward-send"):
                if ops.counts[CODES[name]]:
                    self._waits[self._place(CODES[name], 0, stage)].append(order[first - 2])
        gathered = self._chain(self._all(GATHER, stage))
        for chunk, gather in dict(zip(ops.gathers, self._all(GATHER, stage), strict=True)).items():
            user = next((one for one in ops.computes if one.code == FORWARD and one.chunk == chunk), None)
            if user is not None:
                self._waits[self._place(FORWARD, user.seq, stage)].append(gather)
        self._chain([place for code in TAIL for place in self._all(code, stage)], last)
        if gathered is not None and ops.counts[SCATTER]:
            self._waits[self._place(SCATTER, 0, stage)].append(gathered)

    def _transfers(self, stage: int, direction: str) -> None:
        """Tie the sends and receives of a direction to their computes."""
        ops = self._stages[stage]
        code = CODES[f"{direction}-compute"]
        computes = sorted((one for one in ops.computes if one.code == code), key=lambda one: one.seq)
        lowest = (0, 0)
        highest = (self._meta.pp_size - 1, self._meta.vpp_size - 1)
        source, sink = (lowest, highest) if direction == "forward" else (highest, lowest)
        for name, edge in ((f"{direction}-recv", source), (f"{direction}-send", sink)):
            transfers = self._all(CODES[name], stage)
            self._chain(transfers)
            partnered = [one for one in computes if (stage, one.chunk) != edge]
            if len(transfers) == len(partnered):
                users = partnered
            elif len(transfers) == len(computes):  # recorded where nothing was transferred, too
                users = computes
            else:
                raise InvalidInputError(
                    f"operations without partner: stage {stage} has {len(transfers)} {name} in its first step for "
                    f"{len(partnered)} {direction}-compute that need one; record all, or check pp_size and vpp_size"
                )
            ends = self._ends.setdefault((CODES[name], stage), [])
            for transfer, user in zip(transfers, users, strict=True):
                if user in partnered:
                    ends.append(transfer)
                compute = self._place(code, user.seq, stage)
                if name.endswith("send"):
                    self._waits[transfer].append(compute)
                    continue
                self._waits[compute].append(transfer)
                if user.seq:
                    self._waits[transfer].append(self._place(code, user.seq - 1, stage))

    def _pairs(self) -> tuple[tuple[int, int], ...]:
        found: list[tuple[int, int]] = []
        for direction, step in (("forward", 1), ("backward", -1)):
            for stage in range(len(self._stages)):
                peer = (stage + step) % len(self._stages)
                sends = self._ends[CODES[f"{direction}-send"], stage]
                receives = self._ends[CODES[f"{direction}-recv"], peer]
                if len(sends) != len(receives):
                    raise InvalidInputError(
                        f"operations without partner: in the first step, stage {stage} has {len(sends)} "
                        f"{direction}-send, and stage {peer} {len(receives)} {direction}-recv; record both ends"
                    )
                found.extend(zip(sends, receives, strict=True))
        return tuple(found)

    def _groups(self, pairs: Sequence[tuple[int, int]]) -> list[tuple[tuple[int, ...], bool]]:
        together: list[tuple[tuple[int, ...], bool]] = [(pair, False) for pair in pairs]
        for code in (EMBEDDING, CLIP):
            members = tuple(place for key, place in self._places.items() if key[0] == code)
            if members:
                together.append((members, code == CLIP))
        grouped = {place for members, _ in together for place in members}
        alone = [(key, place) for key, place in self._places.items() if place not in grouped]
        return together + [((place,), key[0] in {GATHER, SCATTER}) for key, place in alone]


def _ordered(
    keys: tuple[Key, ...],
    waits: Sequence[Sequence[int]],
    waves: Sequence[tuple[tuple[int, ...], bool]],
    pairs: tuple[tuple[int, int], ...],
) -> Graph:
    """Sort waves so that each comes after all it waits for."""
    wave_of = {place: at for at, (members, _) in enumerate(waves) for place in members}
    needs = [sorted({wait for place in members for wait in waits[place]}) for members, _ in waves]
    missing = [len({wave_of[wait] for wait in need}) for need in needs]
    unlocks: list[set[int]] = [set() for _ in waves]
    for at, need in enumerate(needs):
        for wait in need:
            unlocks[wave_of[wait]].add(at)
    free = deque(at for at, count in enumerate(missing) if not count)
    order: list[int] = []
    while free:
        order.append(free.popleft())
        for at in unlocks[order[-1]]:
            missing[at] -= 1
            if not missing[at]:
                free.append(at)
    if len(order) < len(waves):
        stuck = [OPTYPES[keys[place][0]] for at, count in enumerate(missing) if count for place in waves[at][0]]
        raise InvalidInputError(
            f"the operations of the first step wait for one another in a circle ({len(stuck)} of them, such as "
            f"{', '.join(sorted(set(stuck))[:3])}): no pipeline has the order of the trace; check the clocks"
        )
    last_use = {wait: at for at in order for wait in needs[at]}
    done: dict[int, list[int]] = {}
    for wait, at in last_use.items():
        done.setdefault(at, []).append(wait)
    return Graph(
        keys=keys,
        waves=tuple(Wave(waves[at][0], tuple(needs[at]), waves[at][1], tuple(done.get(at, ()))) for at in order),
        pairs=pairs,
        last=tuple(place for place in range(len(keys)) if place not in last_use),
    )
