"""Figures as a person reads them: units, shares, durations, and whether they mean anything."""

from unicron.contracts.plans import Plan

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")

KNOWN_FLOPS = 1e3
"""Least FLOP/s that mean something: where nothing is known of any task, each worker counts as 1 FLOP/s."""


def si(number: float, unit: str) -> str:
    """Return `number` with the prefix that leaves one to three digits before the point."""
    step = 0
    while abs(number) >= 999.5 and step < len(_PREFIXES) - 1:
        number, step = number / 1000, step + 1
    return f"{number:.3g} {_PREFIXES[step]}{unit}"


def percent(part: float) -> str:
    """Return a share of 1 in percent, with at least two digits where it is small."""
    return f"{100 * part:.0f} %" if abs(part) >= 0.095 else f"{100 * part:.2g} %"


def ago(seconds: float) -> str:
    """Return a duration in its largest unit."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def has_known_flops(plan: Plan) -> bool:
    """Return whether the FLOP/s that the plan expects mean anything: nothing may be known of any task."""
    runs = any(share.slots or share.before for share in plan.shares)
    return not runs or max([plan.waf, *(share.waf_before for share in plan.shares)]) >= KNOWN_FLOPS


def expected(plan: Plan) -> str:
    """Return what the plan is expected to achieve, in a few words."""
    if not any(share.slots for share in plan.shares):
        return "no task runs"
    return f"{si(plan.waf, 'FLOP/s')} expected" if has_known_flops(plan) else "nothing is known of the tasks' FLOP/s"


def span(seconds: float) -> str:
    """Return a duration in a unit that leaves a readable number."""
    for size, unit in ((86400 * 2, "days"), (3600 * 2, "hours"), (120, "minutes")):
        if seconds >= size:
            return f"{seconds / {'days': 86400, 'hours': 3600, 'minutes': 60}[unit]:.3g} {unit}"
    if seconds >= 1 or seconds <= 0:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
