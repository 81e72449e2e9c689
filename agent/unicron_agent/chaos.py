"""Faults that an agent injects into its own node when asked to."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable

from unicron.contracts.queries import InjectFault
from unicron.contracts.worker import RaiseFault, ToWorker
from unicron.errors import InvalidInputError
from unicron_agent.core import AgentCore
from unicron_agent.supervisor import Supervisor

Send = Callable[[str, ToWorker], None]


def break_something(query: InjectFault, core: AgentCore, supervisor: Supervisor, send: Send) -> str:
    """Carry the fault out; return what was done, for a person.

    Raises:
        InvalidInputError: there is no such worker or fault.
    """
    if query.fault == "kill-node":
        asyncio.get_running_loop().call_later(0.02, _die)
        return f"{core.node} kills itself with all its workers"
    if query.worker not in core.workers:
        raise InvalidInputError(f"worker {query.worker!r} does not run on {core.node}")
    match query.fault:
        case "kill-worker":
            supervisor.signal(query.worker, signal.SIGKILL)
        case "stop-worker":
            supervisor.signal(query.worker, signal.SIGSTOP)
        case "raise":
            send(query.worker, RaiseFault())
        case _:
            raise InvalidInputError(f"fault {query.fault!r}: use kill-worker, stop-worker, raise or kill-node")
    return f"{query.fault} {query.worker} on {core.node}"


def _die() -> None:
    """End like a machine that lost its power: the whole process group at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(0, signal.SIGKILL)
    os._exit(137)  # the first process of a container is spared its own signals
