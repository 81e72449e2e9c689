"""On what machine a figure was measured."""

import os
import platform
from pathlib import Path


def machine() -> dict[str, object]:
    """Return processor, cores that may be used, load, and the version of Python."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": names[0].partition(":")[2].strip() if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }
