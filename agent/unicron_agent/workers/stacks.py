"""Where the Python threads of a worker are, seen from outside by py-spy, also while something holds their lock."""

import asyncio
import json
import logging
import sysconfig
from pathlib import Path
from typing import Any

from unicron_agent.workers.activity import processes_of

log = logging.getLogger(__name__)

TAKES_S = 5.0
"""Longest that a look at one process may take."""

LAUNCHER = "_attend (launcher.py:"

PROCESSES, THREADS, CALLS = 8, 16, 24
"""How much of it is told: the first of each."""


async def stacks_of(pid: int) -> tuple[str, ...]:
    """Return a line for each Python thread of a process and of those that it has started, innermost call first.

    Nothing is stopped for it, so a thread that runs may be seen in two places at once. Empty where nothing can be seen.
    """
    lines = list[str]()
    for process in processes_of(pid)[:PROCESSES]:
        lines += [f"{process} {line}" for line in told(await _dumped(process))]
    return tuple(lines[:THREADS])


def told(dumped: bytes) -> list[str]:
    """Return a line for each thread of what py-spy tells as JSON, that of the script first.

    None where it is something else, or the process only runs a program without a session, which is another process.
    """
    try:
        found: list[dict[str, Any]] = json.loads(dumped)
        threads = sorted(found, key=lambda each: each["os_thread_id"] != each["pid"])
        lines = [f"{each['thread_name'] or 'thread'}: {_calls(each['frames'])}" for each in threads if each["frames"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    return [] if lines and LAUNCHER in lines[0] else lines


def _calls(frames: list[dict[str, Any]]) -> str:
    return " < ".join(f"{each['name']} ({_short(each['filename'])}:{each['line']})" for each in frames[:CALLS])


def _short(filename: str) -> str:
    """Return a file's name as its import would have it."""
    return filename.partition("site-packages/")[2] or Path(filename).name


async def _dumped(pid: int) -> bytes:
    command = Path(sysconfig.get_path("scripts")) / "py-spy"
    try:
        looking = await asyncio.create_subprocess_exec(
            *(str(command), "dump", "--json", "--nonblocking", "--pid", str(pid)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except OSError as error:
        log.warning("%s can't be started, so nobody sees where workers hang: %s", command, error)
        return b""
    try:
        found, complaint = await asyncio.wait_for(looking.communicate(), TAKES_S)
    except TimeoutError:
        looking.kill()
        await looking.wait()
        return b""
    if looking.returncode:
        log.info("no stacks of process %d: %s", pid, complaint.decode(errors="replace").strip())
    return found
