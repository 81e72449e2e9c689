"""What Slurm says of the job that this process runs in."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from unicron.errors import InvalidInputError
from unicron.slurm.nodelist import expand
from unicron_deploy import rights

JOB = "SLURM_JOB_ID"
_COUNTS = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_UNFIT = re.compile(r"[^A-Za-z0-9_-]")


class Allocation(NamedTuple):
    """A job, as its first node sees it.

    Attributes:
        cluster: Slurm's name of the cluster.
        job: its id.
        family: the id that it shares with all jobs of its array; its own where it is of none.
        nodes: names of its nodes, as Slurm has them; the first is this one.
        slots: workers of each node.
        cpus: processors that the job has on each node, at least.
        submitted_in: folder in which it was submitted.
        restarts: how often it was requeued.
    """

    cluster: str
    job: str
    family: str
    nodes: list[str]
    slots: int
    cpus: int
    submitted_in: Path
    restarts: int

    @classmethod
    def read(cls, environ: Mapping[str, str], slots: int = 0) -> "Allocation":
        """Return the job whose environment this is.

        Args:
            environ: of a batch script or of a shell that salloc started.
            slots: workers of each node; 0: its GPUs, else its tasks, else one.

        Raises:
            InvalidInputError: this is no job, or a variable does not hold what it should; names it.
        """
        nodes = expand(_given(environ, "SLURM_JOB_NODELIST"))
        return cls(
            cluster=environ.get("SLURM_CLUSTER_NAME", ""),
            job=_number(environ, JOB),
            family=_number(environ, "SLURM_ARRAY_JOB_ID" if environ.get("SLURM_ARRAY_JOB_ID") else JOB),
            nodes=nodes,
            slots=slots or _slots(environ),
            cpus=min(counts("SLURM_JOB_CPUS_PER_NODE", environ.get("SLURM_JOB_CPUS_PER_NODE", "1"))),
            submitted_in=Path(environ.get("SLURM_SUBMIT_DIR") or Path.cwd()),
            restarts=int(environ.get("SLURM_RESTART_COUNT") or 0),
        )


def _slots(environ: Mapping[str, str]) -> int:
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_NTASKS_PER_NODE"):
        if environ.get(name):
            return min(counts(name, environ[name]))
    return 1


def counts(name: str, text: str) -> list[int]:
    """Return the numbers of a variable such as `2(x3),1`, one for each run of nodes.

    Raises:
        InvalidInputError: it holds something else; names it.
    """
    matches = [_COUNTS.fullmatch(each) for each in text.split(",")]
    found = [int(match[1]) for match in matches if match]
    if len(found) < len(matches) or min(found) < 1:
        raise InvalidInputError(f"{name} {text!r}: expected a number of each node, such as 2(x3),1")
    return found


def _given(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise InvalidInputError(f"no {name} in the environment: run this within a job of Slurm, by sbatch or salloc")
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> str:
    text = _given(environ, name)
    if not text.isdecimal():
        raise InvalidInputError(f"{name} {text!r}: expected the number of a job")
    return text


def node_name(name: str) -> str:
    """Return what a node of Slurm is called here, where names have letters, digits, '-' and '_' only.

    Raises:
        InvalidInputError: a service or a person is called so.
    """
    return rights.node(_UNFIT.sub("-", name))


def node_names(nodes: list[str]) -> dict[str, str]:
    """Return what each node is called here.

    Raises:
        InvalidInputError: two would be called the same.
    """
    found = {name: node_name(name) for name in nodes}
    if len(set(found.values())) < len(found):
        twice = sorted(name for name, own in found.items() if list(found.values()).count(own) > 1)
        raise InvalidInputError(f"nodes {', '.join(twice)}: here they would have the same name; give the job only one")
    return found
