"""What watchdogs look for: the kinds of alerts, and what a user wants to see in what a task writes."""

from unicron.contracts.base import Record, Word
from unicron.contracts.ranges import Label, Seconds


class AlertKind(Word):
    """Which watchdog an alert comes from; `OTHER` for all that has none."""

    OTHER = "other"
    TASK_IDLE = "task_idle"
    """A task should run, and nothing of it does."""
    DISK = "disk"
    """A folder's file system runs out of bytes, or of inodes."""
    MEMORY = "memory"
    """A worker's memory grows without end, and its machine or container has little left."""
    GPU_MEMORY = "gpu_memory"
    """The memory of a GPU is nearly full, or soon will be."""
    CLOCK = "clock"
    """The clock of a node is wrong."""
    LOG = "log"
    """What a task writes lacks what its user wants to see there, or a number in it is none."""
    UNKNOWN = "unknown"


class LogPattern(Record, kw_only=True, frozen=True):
    """What is to be seen in the lines that the workers of a task write.

    Attributes:
        pattern: regular expression in the syntax of RE2, found anywhere in a line; what its only group captures, if it
            has one, is to be a finite number.
        within_s: seconds from the first start of a worker on a node by which a line must have matched; 0: no limit.
        absent_for_s: seconds that may pass without a line that matches; 0: no limit.
    """

    pattern: Label
    within_s: Seconds = 0.0
    absent_for_s: Seconds = 0.0
