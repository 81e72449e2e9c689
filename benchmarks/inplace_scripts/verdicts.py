"""Compares the result of a training script that was run in place with torchrun's. Pure; `benchmarks.inplace` runs them.

A script that fails under torchrun is right if it fails in place, too, with whatever status and words.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch


class Verdict(StrEnum):
    """How a run ended; each is worse than those before."""

    RIGHT = "right"
    """With status 0, and the results of each rank are torchrun's, bit by bit."""

    REFUSED = "refused"
    """With another status before a rank was struck, without results, and with the reason why it can't be healed."""

    NOT_MEASURED = "not_measured"
    """Torchrun itself hung, or nobody was struck who should have been."""

    ENDED = "ended"
    """With another status otherwise: it was not healed, but it says so."""

    HUNG = "hung"
    """Not in time."""

    WRONG_SILENTLY = "wrong_silently"
    """With status 0, and other results, or not all of them."""


REFUSAL = re.compile(r"InvalidInputError: .+|\b(?:can't be|is not) healed in place\b.*")
ERROR = re.compile(r"\b\w+(?:Error|Exception): .+|\bunicron: (?!logs and journal|\d+ ranks).+")


@dataclass(frozen=True)
class Run:
    """One run of a script."""

    status: int | None  # None where it hung, and was ended
    results: Mapping[int, Any] = field(default_factory=dict)  # what ranks have kept at the end, by rank
    log: str = ""
    struck: bool = False  # a rank was killed
    seconds: float = 0.0  # from start to end


def verdict(run: Run, baseline: Run, *, strike: bool = False) -> Verdict:
    """Return how a run in place ended, beside the same script under torchrun; whether a rank was to be killed in it."""
    if baseline.status is None:
        return Verdict.NOT_MEASURED
    if run.status is None:
        return Verdict.HUNG
    if baseline.status:
        return Verdict.RIGHT if run.status else Verdict.WRONG_SILENTLY
    if run.status:
        refused = not run.struck and not run.results and REFUSAL.search(run.log)
        return Verdict.REFUSED if refused else Verdict.ENDED
    if strike and not run.struck:
        return Verdict.NOT_MEASURED
    return Verdict.WRONG_SILENTLY if difference(run.results, baseline.results) else Verdict.RIGHT


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict on a script from those on its runs."""
    return max(verdicts, key=list(Verdict).index)


def reason(run: Run, baseline: Run, verdict: Verdict) -> str:
    """Return what explains a verdict: the last line of the log that does, or what differs; empty of what is right."""
    if verdict is Verdict.WRONG_SILENTLY:
        if run.status != baseline.status:
            return f"status {run.status} instead of {baseline.status}"
        return difference(run.results, baseline.results)
    if verdict is Verdict.RIGHT:
        return ""
    pattern = REFUSAL if verdict is Verdict.REFUSED else ERROR
    lines = [match[0] for match in pattern.finditer(run.log)]
    return lines[-1][:300] if lines else ""


def difference(one: Any, other: Any) -> str:
    """Return where two results differ first, and by how much; empty where they are equal, tensors bit by bit."""
    ours, theirs = dict(_leaves(one)), dict(_leaves(other))
    for path in ours | theirs:
        if path not in ours or path not in theirs:
            return f"{path} is {'missing' if path in theirs else 'too much'}"
        if text := _unequal(ours[path], theirs[path]):
            return f"{path} {text}"
    return ""


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield what is in dictionaries and lists, with the names and places on the way."""
    if not isinstance(value, Mapping | list | tuple):
        yield path, value
        return
    for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _leaves(part, f"{path}.{key}" if path else str(key))


def _unequal(one: Any, other: Any) -> str:
    if type(one) is not type(other):
        return f"is of type {type(one).__name__} instead of {type(other).__name__}"
    if not isinstance(one, torch.Tensor):
        equal = one == other or (one != one and other != other)  # noqa: PLR0124 NaN is not equal to itself
        return "" if equal else f"is {one!r:.100} instead of {other!r:.100}"
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"is {one.dtype} of {list(one.shape)} instead of {other.dtype} of {list(other.shape)}"
    if torch.equal(_bits(one), _bits(other)):
        return ""
    return f"differs by {float((one.detach().double() - other.detach().double()).abs().max()):.2g}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
