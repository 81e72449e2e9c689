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

from unicron.aio import together
from unicron.client import Client
from unicron.errors import BusUnavailableError
from unicron_cli.glance import Glance, Watched
from unicron_cli.output import Json, Nats, console, print_json, with_client
from unicron_cli.topview import top_view

LOOK_S = 1.0
"""How often the cluster is asked, and shown."""

WHOLE = 20_000
"""Entries up to which the journal is read from its beginning, so that it tells the goodput of tasks."""

RECENT = 5_000
"""Entries of a longer one that are read: no goodput is known then, `unicron goodput` tells it."""

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
    reader.watched.status = await client.status()
    await reader.read(await client.tail())
    glance, screen = reader.glance(), console()
    if as_json:
        print_json(glance)
    else:
        screen.print(top_view(glance, screen.width, PAPER))


async def _live(client: Client, as_json: bool) -> None:

    reader = _Reader(client)
    reading = asyncio.create_task(together(reader.ask_on(), reader.read_on()))
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
    loop, screen, woken, told = asyncio.get_running_loop(), console(), asyncio.Event(), asyncio.Event()
    reading.add_done_callback(lambda _: woken.set())
    loop.add_signal_handler(signal.SIGWINCH, woken.set)
    try:
        with _keys(loop, told, woken), Live(console=screen, screen=True, auto_refresh=False) as live:
            while not (told.is_set() or reading.done()):
                live.update(top_view(reader.glance(), screen.width, screen.height), refresh=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), LOOK_S)
                woken.clear()
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
    if reading.done():
        reading.result()


@contextlib.contextmanager
def _keys(loop: asyncio.AbstractEventLoop, told: asyncio.Event, woken: asyncio.Event) -> Iterator[None]:
    """Hear of q, without a return key, as long as this is open; the terminal is then as it was."""
    if not sys.stdin.isatty():
        yield
        return

    def pressed() -> None:
        keys = os.read(descriptor, 64)
        if b"q" in keys or not keys:
            told.set()
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
    """Keeps what is known of a cluster up to date.

    Attributes:
        watched: what is known.
    """

    def __init__(self, client: Client) -> None:

        self.watched = Watched()
        self._client = client
        self._position: int | None = None
        self._due = 0.0

    def glance(self) -> Glance:
        """Return what is to be shown now."""
        now = time.time()
        if self.watched.whole and now >= self._due:
            self.watched.account(now)
            self._due = time.time() + 20 * (time.time() - now)  # of many slots more rarely
        return self.watched.glance(now)

    async def ask_on(self) -> None:
        """Ask how the cluster is, again and again."""
        while True:
            try:
                self.watched.status, self.watched.error = await self._client.status(), ""
            except BusUnavailableError as error:
                self.watched.error = str(error)
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
            self._position = 0 if tail <= WHOLE else tail - RECENT
            self.watched.whole = tail <= WHOLE
        async for position, message in self._client.follow(self._position, until):
            self._position = position
            self.watched.handle(message)
