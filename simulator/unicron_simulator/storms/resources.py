"""What nodes lack for a while, of all that healing takes; nobody is to be blamed for that, or to hear nothing of it."""

import errno
import os
from random import Random

from unicron.contracts.base import Message
from unicron.contracts.events import FailureDetected, TaskBroken
from unicron.contracts.failures import FailureStatus, Severity
from unicron.errors import explain_lack, tells_lack
from unicron_simulator.storms.faults import Lack

ROOM, DESCRIPTORS, PORTS = "room", "descriptors", "ports"
ERRORS = {ROOM: errno.ENOSPC, DESCRIPTORS: errno.EMFILE, PORTS: errno.EADDRNOTAVAIL}
"""How the system says that a node has none left: for states in its memory, to start a process, to meet others."""

LONG_S = 150.0
"""A node that lacks something for so long lacks it when all else is over."""


def explain(what: str) -> str:
    """Return what the product says of it."""
    return explain_lack(OSError(ERRORS[what], os.strerror(ERRORS[what])))


def faults_of(random: Random, nodes: list[str], begin_s: float) -> list[Lack]:
    """Return what nodes lack, and for how long."""
    return [
        Lack(
            at=random.uniform(begin_s - 6, begin_s + 22),
            node=random.choice(nodes),
            what=random.choice([ROOM, ROOM, DESCRIPTORS, PORTS]),
            for_s=random.choice([2.0, 9.0, 9.0, 30.0, 30.0, LONG_S]),
        )
        for _ in range(random.randint(1, 3))
    ]


def blames(message: Message) -> str:
    """Return whom a message blames for what a machine lacks, in words; empty where it blames nobody."""
    match message:
        case TaskBroken(task=task, reason=reason) if tells_lack(reason):
            return f"{task} was ended for what a machine lacks: {reason}"
        case FailureDetected(severity=Severity.SEV1, node=node, reason=reason) if tells_lack(reason):
            return f"{node} was given up for what a machine lacks: {reason}"
        case FailureDetected(severity=Severity.SEV2, status=status, worker=worker, reason=reason) if (
            tells_lack(reason.partition("; echo of ")[0]) and status is not FailureStatus.OUT_OF_RESOURCES
        ):
            return f"{worker} was blamed ({status}) for what a machine lacks: {reason}"
    return ""
