"""What came of a training script that was run in place, judged by what torchrun made of it. Pure; `inplace` runs them.

A run is

- `right` if it ends with status 0 and each rank's results are those of torchrun, bit by bit. Where the script fails
  under torchrun, it is to fail here, too: any status but 0 is right;
- `refused` if it ends with another status before a rank was struck, has no results, and says why it can't be healed;
- `ended` if it ends with another status otherwise: nothing came of it, but it says so;
- `hung` if it has not ended in time;
- `wrong_silently` if it ends with status 0 and other results, or without some of them;
- `not_measured` if torchrun itself hung, or nobody was struck who should have been.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

RIGHT, REFUSED, ENDED, HUNG, WRONG, NOT_MEASURED = (
    "right",
    "refused",
    "ended",
    "hung",
    "wrong_silently",
    "not_measured",
)
WORST_LAST = (RIGHT, REFUSED, NOT_MEASURED, ENDED, HUNG, WRONG)

REFUSAL = re.compile(r"InvalidInputError: .+|\b(?:can't be|is not) healed in place\b.*")
ERROR = re.compile(r"\b\w*(?:Error|Exception)\b: .+|\bTraceback\b|\bunicron: .+")


@dataclass(frozen=True)
class Run:
    """How one run of a script ended.

    Attributes:
        status: that it exited with; None where it had to be ended, because it hung.
        results: what ranks have kept at the end, by rank.
        log: all that was written.
        struck: a rank was killed.
        seconds: from start to end.
    """

    status: int | None
    results: Mapping[int, Any] = field(default_factory=dict)
    log: str = ""
    struck: bool = False
    seconds: float = 0.0


def verdict(run: Run, baseline: Run, *, strike: bool = False) -> str:
    """Return what is to be said of a run.

    Args:
        run: in place.
        baseline: of the same script under torchrun, with nothing struck.
        strike: a rank was to be killed in this run.
    """
    if baseline.status is None:
        return NOT_MEASURED
    if run.status is None:
        return HUNG
    if baseline.status:
        return RIGHT if run.status else WRONG
    if run.status:
        refused = not run.struck and not run.results and REFUSAL.search(run.log)
        return REFUSED if refused else ENDED
    if strike and not run.struck:
        return NOT_MEASURED
    return WRONG if difference(run.results, baseline.results) else RIGHT


def worst(verdicts: Iterable[str]) -> str:
    """Return the verdict on a script from those on its runs."""
    return max(verdicts, key=WORST_LAST.index)


def reason(run: Run, baseline: Run, verdict: str) -> str:
    """Return what explains a verdict: the last line of the log that does, or what differs; empty of what is right."""
    if verdict == WRONG:
        return difference(run.results, baseline.results) or f"status {run.status} instead of {baseline.status}"
    if verdict == RIGHT:
        return ""
    lines = [match[0] for match in (REFUSAL if verdict == REFUSED else ERROR).finditer(run.log)]
    return lines[-1][:300] if lines else ""


def difference(one: Any, other: Any, path: str = "results") -> str:
    """Return where two results differ, and by how much; empty where they are equal.

    Tensors are compared bit by bit. What is no number is equal to itself.
    """
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return _of_tensors(one.detach(), other.detach(), path)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return f"{path} has {', '.join(map(str, sorted(one.keys() ^ other.keys())))} on one side only"
        return next((found for key in one if (found := difference(one[key], other[key], f"{path}.{key}"))), "")
    if isinstance(one, list | tuple) and type(one) is type(other):
        if len(one) != len(other):
            return f"{path} has {len(one)} entries instead of {len(other)}"
        pairs = enumerate(zip(one, other, strict=True))
        return next((found for place, pair in pairs if (found := difference(*pair, f"{path}.{place}"))), "")
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor) or type(one) is not type(other):
        return f"{path} is of type {type(one).__name__} instead of {type(other).__name__}"
    equal = one == other or (one != one and other != other)  # noqa: PLR0124 NaN is not equal to itself
    return "" if equal else f"{path} is {one!r} instead of {other!r}"[:300]


def _of_tensors(one: torch.Tensor, other: torch.Tensor, path: str) -> str:
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{path} is {one.dtype} of {list(one.shape)} instead of {other.dtype} of {list(other.shape)}"
    if torch.equal(*(each.reshape(-1).contiguous().view(torch.uint8) for each in (one, other))):
        return ""
    return f"{path} differs by {float((one.double() - other.double()).abs().max()):.2g}"
