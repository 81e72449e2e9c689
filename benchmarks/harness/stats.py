"""Statistics of repeated measurements, rounded for people."""

import statistics
from collections.abc import Callable, Iterable, Sequence


def median(values: Iterable[float | None], digits: int = 3) -> float | None:
    """Return the median; None of nothing, and where one of the values is missing."""
    return _of_all(values, statistics.median, digits)


def worst(values: Iterable[float | None], digits: int = 3) -> float | None:
    """Return the greatest; None of nothing, and where one of the values is missing."""
    return _of_all(values, max, digits)


def _of_all(values: Iterable[float | None], summary: Callable[[list[float]], float], digits: int) -> float | None:
    found = list(values)
    there = [value for value in found if value is not None]
    return round(summary(there), digits) if there and len(there) == len(found) else None


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which that share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def percentiles(name: str, seconds: Sequence[float], unit: str = "ms") -> dict[str, float | None]:
    """Return median and 99th percentile of seconds as figures, `NAME_p50_UNIT` and `NAME_p99_UNIT`; None of nothing."""
    scale = {"s": 1.0, "ms": 1e3}[unit]
    found = [None, None] if not seconds else [scale * statistics.median(seconds), scale * quantile(seconds, 0.99)]
    return {
        f"{name}_{which}_{unit}": value if value is None else round(value, 3)
        for which, value in zip(("p50", "p99"), found, strict=True)
    }


def ratios(pairs: Iterable[tuple[float, float]]) -> list[float]:
    """Return by how many percent the first of each pair, measured side by side, is above the second."""
    return [100 * (measured / baseline - 1) for measured, baseline in pairs]
