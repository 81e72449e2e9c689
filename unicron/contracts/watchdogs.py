"""The kinds of watchdogs' alerts, and the patterns that users expect in a task's output."""

from unicron.contracts.base import Record, Word
from unicron.contracts.ranges import Label, Seconds


class AlertKind(Word):
    """The watchdog that an alert comes from; `OTHER` for all that has none."""

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
    """A task's output lacks a pattern that its user expects, or has a number that is not finite."""
    UNKNOWN = "unknown"


class LogPattern(Record, kw_only=True, frozen=True):
    """A pattern that is expected in the lines that the workers of a task write.

    Attributes:
        pattern: regular expression in the syntax of RE2, found anywhere in a line; what its only group captures, if it
            has one, is to be a finite number.
        within_s: seconds from the first start of a worker on a node by which a line must have matched; 0: no limit.
        absent_for_s: seconds that may pass without a line that matches; 0: no limit.
    """

    pattern: Label
    within_s: Seconds = 0.0
    absent_for_s: Seconds = 0.0
