"""A recovery as a trace of its costs: spans with a root and children. Pure; `otel` gives them to a collector.

A trace is made after the fact, when all tasks are back. Its ids follow from the chain alone, so that every process
that makes it, or makes it again after a restart, makes the same spans.
"""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

from unicron.contracts.base import Message, Record
from unicron.contracts.events import FailureDetected
from unicron.observe.accounts.chains import ChainCost
from unicron.observe.accounts.spans import PhaseSpan
from unicron.observe.incidents import chain_of

SLOTS = 100
"""Slots of one trace that have spans, those that lost the most time; so many messages it has, too, the first ones."""

MOST = 1000
"""Spans of one trace; half of what the SDK's queue holds."""

TEXT = 200
"""Letters of a text."""

Attributes = dict[str, str | int | float]


class Happening(Record, frozen=True):
    """An event at a point in time of a span.

    Attributes:
        at: Unix seconds.
    """

    name: str
    at: float
    attributes: Attributes


class TraceSpan(Record, frozen=True):
    """A span of a trace.

    Attributes:
        number: its id, 64 bits.
        parent: id of the span that it is in; 0 of the root.
        begin, end: Unix seconds.
    """

    number: int
    parent: int
    name: str
    begin: float
    end: float
    attributes: Attributes
    happenings: list[Happening] = []


def trace_id(chain: str) -> int:
    """Return the id of a chain's trace, 128 bits."""
    return _number(chain, 16)


def spans(cost: ChainCost, messages: Iterable[Message]) -> list[TraceSpan]:
    """Return the trace of a recovery; the root is the first, and a parent comes before its children.

    The root is as long as the recovery, from the fault on. Its children are the phases of each task as a whole, and a
    span for each slot that lost time, whose children are the phases of that slot. What is after the recovery is left
    out.

    Args:
        cost: of the chain.
        messages: of the chain; others are passed over.

    Returns:
        Nothing as long as it is not over, and of a plan that no failure led to.
    """
    if cost.recovered_at is None or cost.detected_at is None:
        return []
    root = _number(f"{cost.chain}/root")
    own = [each for each in messages if chain_of(each) == cost.chain]
    found = [
        TraceSpan(
            root,
            0,
            f"recovery {_text(' '.join(cost.tasks) or cost.node)}",
            cost.begun,
            max(cost.begun, cost.recovered_at),
            _of_chain(cost, own),
            [_happening(each) for each in own[:SLOTS]],
        )
    ]
    for course in cost.courses:
        found += _phases(cost, root, course.spans, {"unicron.task": course.task})
    for place in _dearest(cost.spans):
        found += _slot(cost, root, place)
    found[0].attributes["unicron.left_out"] = cost.more + max(0, len(found) - MOST)
    return found[:MOST]


def _slot(cost: ChainCost, root: int, place: list[PhaseSpan]) -> Iterator[TraceSpan]:
    """Yield a span for a slot, and its phases; nothing where all of it is after the recovery."""
    first = place[0]
    at: Attributes = {"unicron.task": first.task, "unicron.node": first.node, "unicron.slot": first.slot}
    number = _number(f"{cost.chain}/{first.task}/{first.node}:{first.slot}")
    phases = list(_phases(cost, number, place, at))
    if phases:
        end = max(each.end for each in phases)
        yield TraceSpan(number, root, f"{first.node}:{first.slot}", phases[0].begin, end, at)
        yield from phases


def _phases(cost: ChainCost, parent: int, phases: Sequence[PhaseSpan], about: Attributes) -> Iterator[TraceSpan]:
    for each in phases:
        end = min(each.end, cost.recovered_at or 0.0)
        if each.begin >= end:
            continue
        place = f"{each.task}/{each.node}:{each.slot}/{each.phase}/{each.begin!r}"
        more: Attributes = {"unicron.phase": str(each.phase), "unicron.share": each.share}
        if each.worker:
            more["unicron.worker"] = each.worker
        number = _number(f"{cost.chain}/{place}")
        yield TraceSpan(number, parent, str(each.phase), each.begin, end, about | more)


def _dearest(found: Sequence[PhaseSpan]) -> list[list[PhaseSpan]]:
    """Return the spans of each slot, in the order of time; of at most `SLOTS` slots, the dearest first."""
    places: dict[tuple[str, int, str], list[PhaseSpan]] = {}
    for each in sorted(found, key=lambda span: span.begin):
        places.setdefault((each.node, each.slot, each.task), []).append(each)
    lost = {place: sum((each.end - each.begin) * each.share for each in held) for place, held in places.items()}
    return [places[place] for place in sorted(places, key=lambda place: (-lost[place], place))[:SLOTS]]


def _of_chain(cost: ChainCost, messages: Sequence[Message]) -> Attributes:
    found: Attributes = {
        "unicron.chain": cost.chain,
        "unicron.what": cost.what,
        "unicron.node": cost.node,
        "unicron.tasks": _text(" ".join(cost.tasks)),
        "unicron.slot_s": cost.whole_s,
    }
    found |= {f"unicron.slot_s.{phase}": seconds for phase, seconds in cost.seconds.items() if seconds}
    for each in messages:
        if isinstance(each, FailureDetected):
            found |= {
                "unicron.severity": int(each.severity),
                "unicron.method": str(each.method),
                "unicron.worker": each.worker,
                "unicron.reason": _text(each.reason),
            }
            break
    return found


def _happening(message: Message) -> Happening:
    """Return a message by its sender and its subject; the rest of its content may be anything."""
    about = {name: getattr(message, name, "") for name in ("node", "task", "worker")}
    attributes = {f"unicron.{name}": value for name, value in about.items() if value}
    return Happening(type(message).__name__, message.at, {"unicron.source": message.source, **attributes})


def _text(text: str) -> str:
    return text if len(text) <= TEXT else f"{text[: TEXT - 1]}…"


def _number(text: str, size: int = 8) -> int:
    """Return a number of so many bytes that follows from a text; never 0, which stands for none."""
    return int.from_bytes(blake2b(text.encode(), digest_size=size, person=b"unicron.trace").digest(), "big") or 1
