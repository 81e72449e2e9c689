"""Reads the stacks of a worker's Python threads with py-spy, which also works while something holds the GIL."""

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

LAUNCHER = "_forward_and_wait (launcher.py:"

PROCESSES, THREADS, CALLS = 8, 16, 24
"""Most processes, threads and calls of each thread that are reported: the first ones."""


async def stacks_of(pid: int) -> tuple[str, ...]:
    """Return a line for each Python thread of a process and its descendants, innermost call first.

    Nothing is stopped for it, so the stack of a running thread may be inconsistent. Empty if py-spy fails.
    """
    lines = list[str]()
    for process in processes_of(pid)[:PROCESSES]:
        lines += [f"{process} {line}" for line in describe_threads(await _dump(process))]
    return tuple(lines[:THREADS])


def describe_threads(dumped: bytes) -> list[str]:
    """Return a line for each thread in py-spy's JSON, the main thread first.

    Empty if it is something else, or of a launcher, which only waits for the program in another process.
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


async def _dump(pid: int) -> bytes:
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
