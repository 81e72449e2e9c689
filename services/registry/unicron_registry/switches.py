"""Switches: orders to tasks by files in a watched folder, for people who may write there and nowhere else.

Each file is one order of `unicron task`, and only another way to give it. It is obeyed once at most: the process that
obeys it first renames it, which of several instances of the registry one alone can. The folder may be a
network's, so it is looked at every few seconds.
"""

import asyncio
import itertools
import logging
import os
import re
import stat
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path

from unicron.client import Client
from unicron.errors import BusUnavailableError, InvalidInputError

log = logging.getLogger(__name__)

LOOK_S = 2.0
MOST = 1000
"""Entries of the folder that one look takes in."""

LEFT_S = 30.0
"""Longest time that obeying an order takes: a file that was renamed before is of a process that has ended."""

TAKEN, REFUSED = ".taken", ".refused"

ORDERS: dict[str, Callable[[Client, str, int], Awaitable[str]]] = {
    "pause": lambda client, task, _: client.pause(task),
    "resume": lambda client, task, _: client.pause(task, pause=False),
    "save": lambda client, task, _: client.save(task),
    "stop": lambda client, task, _: client.remove(task),
    "stop-save": lambda client, task, _: client.save(task, stop=True),
    "rewind-N": lambda client, task, iteration: client.rewind(task, iteration),
}
"""The action of the file `TASK.ORDER`."""

_NAME = re.compile(r"([A-Za-z0-9_-]{1,64})\.(pause|resume|save|stop|stop-save|rewind-([0-9]{1,12}))")


class Switches:
    """One folder of them.

    Args:
        folder: where files are looked for.
        client: gives the orders.
        now: the monotonic seconds.
    """

    def __init__(self, folder: Path, client: Client, now: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._client, self._now = folder, client, now
        self._logged: set[str] = set()
        self._left: dict[str, float] = {}

    async def watch(self) -> None:
        """Look again and again."""
        while True:
            await self.obey_files()
            await asyncio.sleep(LOOK_S)

    async def obey_files(self) -> None:
        """Obey what is there; where no registry answers, it waits."""
        try:
            names = await asyncio.to_thread(self._names)
        except OSError as error:
            self._log_once("", f"{error}; nothing that users order there is obeyed")
            return
        self._logged &= {*names, ""} if len(names) == MOST else {*names}
        if len(names) == MOST:
            self._log_once("", f"it has {MOST} entries or more, and no others are looked at: remove what is no order")
        taken = [name for name in names if _NAME.fullmatch(name.removesuffix(TAKEN)) and name.endswith(TAKEN)]
        self._left = {name: self._left.get(name, self._now()) for name in taken}
        try:
            if any(map(_NAME.fullmatch, names)):
                await self._client.status()
            for name in names:
                await self._handle_file(name)
        except BusUnavailableError as error:
            log.info("%s: what is ordered there waits: %s", self._folder, error)

    def _names(self) -> list[str]:
        with os.scandir(self._folder) as entries:
            return sorted(entry.name for entry in itertools.islice(entries, MOST))

    async def _handle_file(self, name: str) -> None:
        try:
            if (found := _NAME.fullmatch(name)) is not None:
                owner = await asyncio.to_thread(self._claim_file, name)
                await self._give_order(name, owner, found[1], found[2], int(found[3] or 0))
            elif self._now() - self._left.get(name, self._now()) > LEFT_S:
                why = "the registry ended meanwhile; whether it was obeyed is not known"
                await asyncio.to_thread(self._refuse, name.removesuffix(TAKEN), why)
            elif not (name in self._left or name.startswith(".") or name.endswith(REFUSED)):
                self._log_once(name, f"this is no order: it is TASK.ORDER with one of {', '.join(ORDERS)}")
        except FileNotFoundError:
            pass  # another instance was first, or its user took it back
        except OSError as error:
            self._log_once(name, f"not obeyed: {error}")

    def _claim_file(self, name: str) -> int:
        """Take a file for oneself; return whose it is."""
        path = self._folder / name
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode):
            raise OSError("it is no file")
        path.rename(f"{path}{TAKEN}")
        self._left.pop(f"{name}{TAKEN}", None)
        return found.st_uid

    async def _give_order(self, name: str, owner: int, task: str, order: str, iteration: int) -> None:
        give = ORDERS["rewind-N" if order.startswith("rewind-") else order]
        self._client.by = f"user {owner}, by the file {name}"
        try:
            text = await give(self._client, task, iteration)
        except (InvalidInputError, BusUnavailableError) as error:
            log.warning("%s of user %d is refused: %s", self._folder / name, owner, error)
            await asyncio.to_thread(self._refuse, name, str(error))
            return
        log.info("%s of user %d is obeyed: %s", self._folder / name, owner, text)
        await asyncio.to_thread((self._folder / f"{name}{TAKEN}").unlink, missing_ok=True)

    def _refuse(self, name: str, why: str) -> None:
        """Leave a file that says why; nothing that others have put in its place is written to."""
        beside = self._folder / f".{uuid.uuid4().hex}"
        with beside.open("x") as file:
            file.write(f"{name}: {why}\nSee how the task is, mend that, and make the file {name} again.\n")
        beside.replace(self._folder / f"{name}{REFUSED}")
        (self._folder / f"{name}{TAKEN}").unlink(missing_ok=True)

    def _log_once(self, name: str, what: str) -> None:
        """Say so once, as long as it is there."""
        if name not in self._logged:
            self._logged.add(name)
            log.warning("%s: %s", self._folder / name, what)
