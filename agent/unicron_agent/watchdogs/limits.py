"""The limits at which a node's watchdogs give an alert."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WatchdogLimits:
    """The limits at which watchdogs give an alert.

    Attributes:
        ahead_s: seconds ahead of which an alert says that a file system or a GPU's memory will be full.
        gpu_free: share of a GPU's memory below which it is nearly full; 0: never.
        memory_ahead_s: seconds ahead of which an alert says that workers that grow will fill their machine's memory.
        replace_s: seconds ahead of which one of them is replaced; 0: never.
    """

    ahead_s: float = 86400.0
    gpu_free: float = 0.01
    memory_ahead_s: float = 6 * 3600.0
    replace_s: float = 1800.0
