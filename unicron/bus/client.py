"""The NATS client, for keys that are replaced while it is connected, and servers that hang."""

import asyncio
import contextlib
import time

import nats.errors
import nkeys
from nats.aio.client import PING_PROTO, Client, Srv

from unicron.aio import sleep_until_beat


class PlainError(nats.errors.Error):
    """A server speaks no TLS that is to."""


class KeyedClient(Client):
    """Reads its key again for each connection: one that was rotated is used at the next attempt.

    It leaves a server that reads no more at once: a transport that is closed waits for all to be read that was written.

    Attributes:
        dialled: address of the server that it tried last to connect to; empty where nobody named that one.
    """

    dialled = ""
    _cut_until = 0.0

    @property
    def given(self) -> int:
        """How many servers it was given; it learns of others from these."""
        return len({each.uri.netloc for each in self._server_pool if not each.discovered})

    async def _connect_to_server(self, s: Srv) -> None:
        # without what may stand before the host: a password
        self.dialled = "" if s.discovered else f"{s.uri.scheme}://{s.uri.netloc.rpartition('@')[2]}"
        await super()._connect_to_server(s)

    async def _process_connect_init(self) -> None:
        if self._nkeys_seed:
            with contextlib.suppress(OSError, ValueError, nkeys.NkeysError):  # then the old one: the server will say
                self._setup_nkeys_seed_connect()
        await super()._process_connect_init()
        if self.options.get("tls") and not self._server_info.get("tls_required"):  # or somebody on the way took it out
            raise PlainError("the server speaks no TLS, and a CA was given")

    async def _send_ping(self, future: "asyncio.Future[bool] | None" = None) -> None:
        """Send a ping behind what was said before it.

        The one of nats-py overtakes what still waits to be written: a flush was over, and the server had not yet heard
        of a subscription, nor refused it.
        """
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    async def _ping_interval(self) -> None:
        """Ping at the moments at which the other processes of this machine do."""
        while True:
            await sleep_until_beat(self.options["ping_interval"])
            if self.is_connected:
                self._pings_outstanding += 1
                if self._pings_outstanding > self.options["max_outstanding_pings"]:
                    await self._process_op_err(nats.errors.StaleConnectionError())
                    return
                await self._send_ping()

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        if status == Client.DISCONNECTED:  # an attempt failed: if in TLS, asyncio never sees that connection end
            self._abort()
            self._transport = None
        await super()._close(status, do_cbs)

    async def _attempt_reconnect(self) -> None:
        self._abort()
        await super()._attempt_reconnect()

    def _abort(self) -> None:
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()

    def cut(self, seconds: float) -> None:
        """End the connection without a word, and begin no other for so many seconds."""
        self._cut_until = time.monotonic() + seconds
        self._abort()

    async def _select_next_server(self) -> None:
        await asyncio.sleep(max(0.0, self._cut_until - time.monotonic()))
        await super()._select_next_server()
