"""`unicron run` on a machine that joins another one's cluster: its agent, what its ranks write, and how it all ends."""

import asyncio
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

import nats.errors
from msgspec import json
from msgspec.structs import replace
from unicron_agent.enrolment import enrol
from unicron_agent.settings import AgentSettings

from unicron import codec
from unicron.addresses import Address
from unicron.bus import topology
from unicron.bus.joining import token_in
from unicron.bus.nats import NatsBus, connect
from unicron.contracts.events import TaskStateChanged
from unicron.errors import BusUnavailableError, InvalidInputError, UnicronError
from unicron_cli.meeting import Meeting
from unicron_cli.ranks import Ranks

JOIN_S = 600.0
"""How long machines wait for one another, as torchrun's do."""

GONE_S = 60.0
"""Seconds without an answer after which the first machine counts as gone."""

LOOK_S, ASK_S = 0.2, 1.0
DYING_S = 30.0
CONNECT_S = 3.0


class Joined:
    """This machine's part.

    Args:
        meeting: with the others.
        slots: ranks here.
        task: name of the task that is run.
        log: shows a line to a person.
    """

    def __init__(self, meeting: Meeting, slots: int, task: str, log: Callable[[str], None]) -> None:
        self._meeting, self._slots, self._task, self._log = meeting, slots, task, log
        self._run_dir = meeting.run_dir()
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Take part until the task has ended; return the exit status."""
        try:
            return asyncio.run(self._run())
        finally:
            self._stop()

    async def _run(self) -> int:
        settings, bus = await self._enrolled()
        self._log(f"unicron: {settings.node} joined {settings.nats_url}, {self._slots} ranks here")
        self._start(settings)
        self._ranks = Ranks(self._run_dir, f"logs/{self._task}-*.log")
        try:
            asked = asyncio.create_task(self._until_over(bus))
            while not asked.done():
                self._ranks.write()
                self._mend(settings)
                await asyncio.wait({asked}, timeout=LOOK_S)
            self._ranks.write()
            code = await asked
            self._stop()
            if code == 0:
                shutil.rmtree(self._run_dir, ignore_errors=True)
            return code
        finally:
            await bus.close()

    async def _enrolled(self) -> tuple[AgentSettings, NatsBus]:
        """Return the agent's settings and a connection, once the first machine is there and has let this one in.

        Raises:
            BusUnavailableError: it is not there in time.
            InvalidInputError: it does not let us in; says why.
        """
        ends, trouble = time.monotonic() + JOIN_S, ""
        own = self._settings()
        while time.monotonic() < ends:
            try:
                self._forget_another_run()
                settings = await enrol(own)
                return settings, await connect(settings, f"run.{settings.node}")
            except BusUnavailableError as error:  # not there yet, or the token is that of a run before
                trouble = str(error)
            except InvalidInputError as error:
                if self._meeting.token_file.exists():
                    raise
                trouble = f"{self._meeting.token_file} is not there: {error}"
            await asyncio.sleep(LOOK_S)
        raise BusUnavailableError(f"after {JOIN_S:g} s: {trouble}")

    def _forget_another_run(self) -> None:
        """Remove what an earlier run of that id has left here: its cluster had another authority."""
        known = self._run_dir / "keys" / "ca.pem"
        authority = token_in(self._meeting.token_file).authority
        if known.exists() and ssl.PEM_cert_to_DER_cert(known.read_text()) != authority:
            shutil.rmtree(self._run_dir)

    def _settings(self) -> AgentSettings:
        meeting = self._meeting
        given = AgentSettings.load([])
        return replace(
            given,
            nats_url=Address(meeting.host, meeting.port).nats_url,
            nats_nkey="",
            nats_ca="",
            connect_timeout_s=CONNECT_S,
            join_token_file=str(meeting.token_file),
            node=given.node or ("" if meeting.rank is None else f"node-{meeting.rank + 1}"),
            run_dir=str(self._run_dir),
            slots=self._slots,
        )

    def _start(self, settings: AgentSettings) -> None:
        flags = {"--node": settings.node, "--slots": str(self._slots), "--run-dir": str(self._run_dir)}
        words = [word for pair in flags.items() for word in pair]
        own = {"UNICRON_NATS_URL": settings.nats_url, "UNICRON_CONNECT_TIMEOUT_S": f"{GONE_S:g}"}
        with (self._run_dir / "agent.log").open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "unicron_agent", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **own},
            )

    def _mend(self, settings: AgentSettings) -> None:
        """Start an agent again that was killed: it finds its workers.

        Raises:
            UnicronError: it has ended itself; says why.
        """
        code = self._child.poll() if self._child else None
        if code is None:
            return
        if code < 0:
            self._log(f"unicron: the agent of {settings.node} was ended by {signal.Signals(-code).name}: started again")
            self._start(settings)
            return
        lines = (self._run_dir / "agent.log").read_text(errors="replace").strip().splitlines()
        raise UnicronError(f"the agent of {settings.node} has ended: {lines[-1] if lines else 'it wrote nothing'}")

    async def _until_over(self, bus: NatsBus) -> int:
        """Return the exit status that the task's end stands for."""
        heard = time.monotonic()
        while time.monotonic() - heard < GONE_S:
            with suppress(nats.errors.Error, OSError, TimeoutError, InvalidInputError):
                state = await last_state(bus, self._task)
                heard = time.monotonic()
                if state is not None:
                    self._ranks.names.observe(state)
                if state is not None and state.state.ended:
                    self._log(f"unicron: {self._ranks.names.explain(str(state))}")
                    return 0 if state.state == "finished" else 1
            await asyncio.sleep(ASK_S)
        self._log(f"unicron: the first machine, {self._meeting.host}, has not answered for {GONE_S:g} s")
        return 1

    def _stop(self) -> None:
        if self._child is None or self._child.poll() is not None:
            return
        self._child.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(DYING_S)
        with suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)


async def last_state(bus: NatsBus, task: str) -> TaskStateChanged | None:
    """Return the last that the journal says of a task's state, None where it says nothing; raises what NATS does."""
    asked = json.encode({"last_by_subj": f"unicron.v1.evt.transition.TaskStateChanged.{task}"})
    found = await bus.client.request(f"$JS.API.DIRECT.GET.{topology.STREAM}", asked, timeout=ASK_S)
    if (found.headers or {}).get("Status"):
        return None
    message = codec.decode_message(found.data)
    return message if isinstance(message, TaskStateChanged) else None


def join(meeting: Meeting, slots: int, task: str, log: Callable[[str], None]) -> int:
    """Join the cluster of a meeting until its task has ended; return the exit status."""
    return Joined(meeting, slots, task, log).run()
