"""What every benchmark prints: one JSON object with its figures, and on what machine and commit they were measured."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def as_json(
    benchmark: str,
    figures: dict[str, Any],
    baselines: dict[str, dict[str, Any]] | None = None,
    details: dict[str, Any] | None = None,
) -> str:
    """Return the line that a benchmark ends with.

    Args:
        benchmark: its name.
        figures: flat; each name ends in its unit.
        baselines: figures of other systems, measured in the same run, by system.
        details: whatever else explains the figures.
    """
    head = {"benchmark": benchmark, "machine": machine(), "commit": commit()}
    return json.dumps(head | {"figures": figures, "baselines": baselines or {}, "details": details or {}})


def machine() -> dict[str, object]:
    """Return processor, cores that may be used, load, and the version of Python."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def commit() -> str:
    """Return the commit that is checked out, with a plus where files differ from it; empty outside a clone."""
    here = Path(__file__).parent
    try:
        told = ["git", "-C", str(here), "describe", "--always", "--dirty=+"]
        return subprocess.run(told, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
