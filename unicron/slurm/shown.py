"""What Slurm's commands write, read and checked. All were asked for columns of our choice, with `|` between."""

import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import NamedTuple, TypeVar

from unicron.errors import InvalidInputError

T = TypeVar("T")

JOBS = "%A|%T|%e|%R|%j|%k"
"""Columns of `squeue`, of which the last two may hold anything: id, state, end, reason or nodes, name, comment."""

QUEUE = "%A|%F|%V|%T|%E|%Z|%j"
"""Columns of `squeue`, of which the last two may hold anything: id, that of the array, when it was submitted, state,
which others it waits for, folder, name."""

NODES = "%N|%T|%E"
"""Columns of `sinfo -N`, of which the last one may hold anything: name, state, reason."""

JOB_ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
JOB_COMING = frozenset({"CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"})
"""States of jobs; one in another state, also of a later version, runs."""

DRAINED = frozenset({"drained", "draining"})
_JOB_STATE, _NODE_STATE = re.compile(r"[A-Z_]+"), re.compile(r"[a-z_]+")
_SIGNS = "*~#!%$@^-+"
"""Behind a state: not responding, powered down, and the like."""

_NEVER = frozenset(("N/A", "NONE", "Unknown", "UNLIMITED", "INVALID", ""))
_VERSION = re.compile(r"slurm(?:-wlm)? ([0-9]+)\.([0-9]+)")
_APPENDS = re.compile(r"^JobFileAppend\s*= ([01])$", re.MULTILINE)
_JOB_ID = re.compile(r"([0-9]+)(?:;.*)?")
_PAIR = re.compile(r"(?:^| )([A-Z][A-Za-z0-9/:_]*)=")


class JobShown(NamedTuple):
    """A job in the queue.

    Attributes:
        end: Unix seconds at which it ends at the latest, None where it has no limit or has not begun.
        where: nodes that it has, or in parentheses why it waits.
    """

    job: str
    state: str
    end: float | None
    where: str
    name: str
    comment: str


class JobQueued(NamedTuple):
    """A job in the queue, as one that has to do with others.

    Attributes:
        family: the id of the array that it is of; its own where it is of none.
        submitted: Unix seconds.
        waits_for: other jobs, as squeue writes them.
        label: its folder and its name.
    """

    job: str
    family: str
    submitted: float
    state: str
    waits_for: str
    label: str

    @property
    def alive(self) -> bool:
        """Whether it runs, or is to run."""
        return self.state not in JOB_ENDED | {"COMPLETING"}


class NodeShown(NamedTuple):
    """A node.

    Attributes:
        state: without the signs that Slurm puts behind it.
        reason: why it is drained or down, as somebody has said; empty where nobody has.
    """

    node: str
    state: str
    reason: str

    @property
    def drained(self) -> bool:
        """Whether it gets no more jobs, by order of somebody."""
        return self.state in DRAINED


def jobs(text: str) -> list[JobShown]:
    """Return the jobs that `squeue --noheader -o JOBS` has written.

    Raises:
        InvalidInputError: it is nothing of that form.
    """
    return _read(text, _job)


def _job(line: str) -> JobShown:
    fields = line.split("|", JOBS.count("|"))
    if len(fields) != JOBS.count("|") + 1 or not fields[0].isdecimal():
        raise _strange("squeue", line, "JOB|STATE|END|WHERE|NAME|COMMENT")
    job, state, end, where, name, comment = fields
    if not _JOB_STATE.fullmatch(state):
        raise _strange("squeue", line, "a state of a job such as RUNNING in its second column")
    return JobShown(job, state, moment(end), where, name, "" if comment == "(null)" else comment)


def queue(text: str) -> list[JobQueued]:
    """Return the jobs that `squeue --noheader -o QUEUE` has written.

    Raises:
        InvalidInputError: it is nothing of that form.
    """
    return _read(text, _queued)


def _queued(line: str) -> JobQueued:
    fields = line.split("|", 5)
    numbers = all(each.isdecimal() for each in fields[:2])
    submitted = moment(fields[2]) if len(fields) == QUEUE.count("|") and numbers else None
    if submitted is None or not _JOB_STATE.fullmatch(fields[3]):
        raise _strange("squeue", line, "JOB|ARRAY|SUBMITTED|STATE|DEPENDENCY|FOLDER|NAME")
    job, family, _, state, waits_for, label = fields
    return JobQueued(job, family, submitted, state, waits_for, label)


def nodes(text: str) -> dict[str, NodeShown]:
    """Return the nodes that `sinfo --noheader -N -o NODES` has written, which names one once for each partition.

    Raises:
        InvalidInputError: it is nothing of that form.
    """
    return {node.node: node for node in _read(text, _node)}


def _node(line: str) -> NodeShown:
    fields = line.split("|", NODES.count("|"))
    state = fields[1].rstrip(_SIGNS).lower() if len(fields) == NODES.count("|") + 1 else ""
    if not fields[0] or not _NODE_STATE.fullmatch(state):
        raise _strange("sinfo", line, "NODE|STATE|REASON with a state such as idle")
    return NodeShown(fields[0], state, "" if fields[2] == "none" else fields[2])


def addresses(text: str) -> dict[str, str]:
    """Return the address of each node that `scontrol --oneliner show node` has written.

    Raises:
        InvalidInputError: it is nothing of that form.
    """
    found = {}
    for line in _lines(text):
        shown = pairs(line)
        if not shown.get("NodeName") or not shown.get("NodeAddr"):
            raise _strange("scontrol", line, "NodeName=… NodeAddr=…")
        found[shown["NodeName"]] = shown["NodeAddr"]
    return found


def pairs(line: str) -> dict[str, str]:
    """Return what a line of `scontrol --oneliner` says; of a name that comes twice, as in a comment, the first."""
    found: dict[str, str] = {}
    _, *words = _PAIR.split(line)
    for name, value in zip(words[::2], words[1::2], strict=True):
        found.setdefault(name, value.strip())
    return found


def moment(text: str) -> float | None:
    """Return a time as Slurm writes it, in Unix seconds or in UTC, None where it says that there is none.

    Raises:
        InvalidInputError: it is no time.
    """
    if text in _NEVER:
        return None
    try:
        return float(text) if text.isdecimal() else datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise _strange("squeue", text, "a time such as 2026-01-31T12:00:00") from None


def version(text: str) -> tuple[int, int]:
    """Return the version that `scontrol --version` has written.

    Raises:
        InvalidInputError: it says none.
    """
    match = _VERSION.search(text)
    if match is None:
        raise _strange("scontrol", text, "slurm 24.11.5")
    return int(match[1]), int(match[2])


def appends(text: str) -> bool:
    """Return whether output of jobs is appended to unless they say otherwise, by `scontrol show config`.

    Raises:
        InvalidInputError: it does not say.
    """
    match = _APPENDS.search(text)
    if match is None:
        raise _strange("scontrol", text, "JobFileAppend = 0")
    return match[1] == "1"


def submitted(text: str) -> str:
    """Return the id of the job that `sbatch --parsable` has submitted.

    Raises:
        InvalidInputError: it says none.
    """
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    match = _JOB_ID.fullmatch(last)
    if match is None:
        raise _strange("sbatch", last, "the number of a job")
    return match[1]


def _read(text: str, read: Callable[[str], T]) -> list[T]:
    """Return what lines say; raise where none says anything. A comment of one job may have lines of its own."""
    found, strange = [], []
    for line in _lines(text):
        try:
            found.append(read(line))
        except InvalidInputError as error:
            strange.append(error)
    if strange and not found:
        raise strange[0]
    return found


def _lines(text: str) -> Iterator[str]:
    return (line.strip() for line in text.splitlines() if line.strip())


def _strange(tool: str, what: str, expected: str) -> InvalidInputError:
    return InvalidInputError(
        f"{tool} answers {what[:120]!r}, not {expected}: see whether `{tool}` is Slurm's own and no script of that name"
    )
