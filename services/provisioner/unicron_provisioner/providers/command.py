"""The user's own program gives machines: one run for each call, JSON in and out.

`PROGRAM... VERB`, with VERB one of list, ask, release and replace. On its standard input is an object with `pool`, and
what the call is about; on its standard output an object: of list `{"machines": [...]}`, of the others anything. It
exits with 0 if it has done it. With 75 it is out of quota, with 77 it refuses; whatever else leaves open what it has
done. The last line that it writes to its standard error says why.
"""

import asyncio
import contextlib
import os
import signal
from pathlib import Path
from typing import Annotated, Any

import msgspec

from unicron.contracts.pools import Pool
from unicron.contracts.ranges import Label
from unicron.errors import InvalidInputError
from unicron.printable import one_line
from unicron_provisioner.providers.protocol import (
    ByRelease,
    MachineReport,
    MachineRequest,
    ProviderError,
    QuotaError,
    RefusedError,
    Surroundings,
)

QUOTA, REFUSED = 75, 77
"""Exit statuses, as sysexits.h has them: try again later, and not permitted."""

MOST = 4 * 1024 * 1024
"""Bytes of an answer at most."""

DYING_S = 2.0
"""Seconds that a run which was killed may take to be gone."""

SHOWN = 300
"""Characters of what it says went wrong, at most."""


class Options(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The options of a program in the file of pools.

    Attributes:
        program: its path, and the arguments before the verb.
        replaces: it knows the verb replace; else it gets a release and an ask.
    """

    program: Annotated[list[Label], msgspec.Meta(min_length=1, max_length=100)]
    replaces: bool = False


class _Listed(msgspec.Struct, kw_only=True):
    machines: list[MachineReport]


class CommandProvider(ByRelease):
    """Machines that a program gives.

    Args:
        pool: its name.
        options: the program.
        environment: what it gets of ours.
    """

    def __init__(self, pool: str, options: Options, environment: dict[str, str]) -> None:
        self._pool, self._options, self._environment = pool, options, environment

    async def list(self) -> list[MachineReport]:
        """Return what it lists."""
        answer = await self._run("list", {})
        try:
            return msgspec.json.decode(answer, type=_Listed).machines
        except msgspec.MsgspecError as error:
            text = (
                f"`list` has not answered with machines: {error}, in {one_line(answer[:80].decode(errors='replace'))!r}"
            )
            raise ProviderError(f"{self._name} {text}; see docs/howto/pools.md for what it is to answer") from error

    async def ask(self, request: MachineRequest) -> None:
        """Have it start a machine."""
        await self._run("ask", msgspec.to_builtins(request))

    async def release(self, machine: str, instance: str = "") -> None:
        """Have it end a machine."""
        await self._run("release", {"machine": machine, "instance": instance})

    async def replace(self, machine: str, request: MachineRequest) -> None:
        """Have it end a machine and start another, in one call where it can."""
        if self._options.replaces:
            await self._run("replace", {"replaces": machine, **msgspec.to_builtins(request)})
        else:
            await super().replace(machine, request)

    @property
    def _name(self) -> str:
        return self._options.program[0]

    async def _run(self, verb: str, what: dict[str, Any]) -> bytes:
        given = msgspec.json.encode({"pool": self._pool, **what})
        try:
            process = await asyncio.create_subprocess_exec(
                *self._options.program,
                verb,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=self._environment,
                start_new_session=True,
            )
        except OSError as error:
            raise RefusedError(f"{self._name} can't be started: {error}; see `program` in the file of pools") from error
        try:
            async with asyncio.TaskGroup() as group:
                out, err = group.create_task(_read(process.stdout)), group.create_task(_read(process.stderr))
                group.create_task(_write(process.stdin, given))
            status = await process.wait()
        except ExceptionGroup as group_error:
            raise ProviderError(f"{self._name} {verb}: {group_error.exceptions[0]}; mend it") from group_error
        finally:
            if process.returncode is None:
                await _end(process)
        if status:
            self._fail(verb, status, err.result())
        return out.result()

    def _fail(self, verb: str, status: int, said: bytes) -> None:
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        reason = one_line(lines[-1])[:SHOWN] if lines else "it does not say why"
        text = f"{self._name} {verb}: {reason}"
        if status in {QUOTA, REFUSED} and verb != "list":
            raise (QuotaError if status == QUOTA else RefusedError)(text)
        raise ProviderError(f"{text} (exit status {status}); it is to exit with 0, {QUOTA} or {REFUSED}")


async def _read(stream: asyncio.StreamReader | None) -> bytes:
    found = b""
    while stream and (piece := await stream.read(65536)):
        found += piece
        if len(found) > MOST:
            raise ValueError(f"it writes more than {MOST} bytes")
    return found


async def _write(stream: asyncio.StreamWriter | None, data: bytes) -> None:
    if stream is None:
        return
    try:
        stream.write(data)
        await stream.drain()
        stream.close()
        await stream.wait_closed()
    except (BrokenPipeError, ConnectionResetError):
        pass  # it does not read what it is given


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill a run that does not end, with what it has started; its end is known once its pipes are empty."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DYING_S):
            for stream in (process.stdout, process.stderr):
                while stream and await stream.read(65536):
                    pass
            await process.wait()


def make(pool: Pool, options: Options, around: Surroundings) -> CommandProvider:
    """Return the provider of a pool.

    Raises:
        InvalidInputError: the program is not there, or can't be run.
    """
    path = (around.folder / Path(options.program[0]).expanduser()).resolve()
    if not path.is_file() or not os.access(path, os.X_OK):
        raise InvalidInputError(f"program {str(path)!r}: no file there that we may execute; give the path of one")
    found = msgspec.structs.replace(options, program=[str(path), *options.program[1:]])
    kept = {key: value for key, value in os.environ.items() if not key.startswith("UNICRON_")}
    return CommandProvider(pool.name, found, {**kept, "UNICRON_NATS_URL": around.nats_url})
