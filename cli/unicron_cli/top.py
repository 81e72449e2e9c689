"""`unicron top`: the cluster at a glance, live. What is shown of it is pure (`glance`, `topview`); here it is read."""

import asyncio
import contextlib
import os
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.live import Live

from unicron.aio import gather_or_cancel
from unicron.client import Client
from unicron.errors import BusUnavailableError
from unicron.observe.cluster import ClusterPicture
from unicron_cli.glance import Glance, glance
from unicron_cli.output import Json, Nats, console, print_json, with_client
from unicron_cli.topview import top_view

LOOK_S = 1.0
"""How often the cluster is asked, and shown."""

WHOLE = 20_000
"""Entries up to which the journal is read from its beginning, so that the goodput of tasks is known."""

RECENT = 5_000
"""Entries of a longer one that are read: then only `unicron goodput` shows the goodput."""

PAPER = 50
"""Lines that are printed where there is no terminal."""


def top(
    once: Annotated[bool, typer.Option("--once", help="Show it once; so does a command without a terminal.")] = False,
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Show the cluster at a glance, live: FLOP/s, nodes, tasks, failures, events. It ends with q or Ctrl-C.

    With --json it prints one object a second.
    """
    once = once or not (as_json or sys.stdout.isatty())
    with contextlib.suppress(KeyboardInterrupt):
        with_client(nats, lambda client: _once(client, as_json) if once else _live(client, as_json))


async def _once(client: Client, as_json: bool) -> None:
    reader = _Reader(client)
    await reader.ask()
    await reader.read(await client.tail())
    await reader.ask()
    screen = console()
    if as_json:
        print_json(reader.glance())
    else:
        screen.print(top_view(reader.glance(), screen.width, PAPER))


async def _live(client: Client, as_json: bool) -> None:
    reader = _Reader(client)
    reading = asyncio.create_task(gather_or_cancel(reader.ask_on(), reader.read_on()))
    try:
        await (_print_on(reader, reading) if as_json else _draw_on(reader, reading))
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _print_on(reader: "_Reader", reading: asyncio.Task[None]) -> None:
    while not reading.done():
        print_json(reader.glance())
        await asyncio.wait([reading], timeout=LOOK_S)
    reading.result()


async def _draw_on(reader: "_Reader", reading: asyncio.Task[None]) -> None:
    """Draw until q is pressed; anew as soon as the terminal has another size."""
    loop, screen, woken, quitting = asyncio.get_running_loop(), console(), asyncio.Event(), asyncio.Event()
    reading.add_done_callback(lambda _: woken.set())
    loop.add_signal_handler(signal.SIGWINCH, woken.set)
    try:
        with _keys(loop, quitting, woken), Live(console=screen, screen=True, auto_refresh=False) as live:
            while not (quitting.is_set() or reading.done()):
                live.update(top_view(reader.glance(), screen.width, screen.height), refresh=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), LOOK_S)
                woken.clear()
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
    if reading.done():
        reading.result()


@contextlib.contextmanager
def _keys(loop: asyncio.AbstractEventLoop, quitting: asyncio.Event, woken: asyncio.Event) -> Iterator[None]:
    """Hear of q, without a return key, as long as this is open; the terminal is then as it was."""
    if not sys.stdin.isatty():
        yield
        return

    def pressed() -> None:
        keys = os.read(descriptor, 64)
        if b"q" in keys or not keys:
            quitting.set()
            woken.set()

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        loop.add_reader(descriptor, pressed)
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class _Reader:
    """Keeps what is known of a cluster up to date."""

    def __init__(self, client: Client) -> None:
        self._client, self._cluster = client, ClusterPicture()
        self._error, self._filled = "", False
        self._position: int | None = None
        self._whole = True  # the journal was read from its beginning
        self._goodput: dict[str, float] = {}
        self._due = 0.0

    def glance(self) -> Glance:
        """Return what is to be shown now."""
        now = time.time()
        if self._whole and now >= self._due:
            rows = self._cluster.goodput.report(now).tasks
            self._goodput = {row.name: row.goodput for row in rows if row.total_s}
            self._due = time.time() + 20 * (time.time() - now)  # of many slots more rarely
        return glance(self._cluster, self._goodput, now, self._error)

    async def ask(self) -> None:
        """Ask how the cluster is."""
        status = await self._client.status()
        if not self._filled:
            self._cluster.fill(status)
            self._filled = True
        self._cluster.refresh(status)

    async def ask_on(self) -> None:
        """Ask how the cluster is, again and again."""
        while True:
            try:
                await self.ask()
                self._error = ""
            except BusUnavailableError as error:
                self._error = str(error)
            await asyncio.sleep(LOOK_S)

    async def read_on(self) -> None:
        """Read the journal, and what comes."""
        while True:
            with contextlib.suppress(BusUnavailableError):  # `ask_on` says so
                await self.read()
            await asyncio.sleep(LOOK_S)

    async def read(self, until: int | None = None) -> None:
        """Read the journal up to a position, or for ever."""
        if self._position is None:
            tail = await self._client.tail()
            self._whole = tail <= WHOLE
            self._position = 0 if self._whole else tail - RECENT
        async for position, message in self._client.follow(self._position, until):
            self._position = position
            self._cluster.handle(position, message)
            self._cluster.changed.clear()  # all is drawn anew
