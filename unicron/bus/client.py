"""The NATS client, for keys that are replaced while it is connected."""

import contextlib

import nkeys
from nats.aio.client import Client


class KeyedClient(Client):
    """Reads its key again for each connection: one that was rotated is used at the next attempt."""

    async def _process_connect_init(self) -> None:
        if self._nkeys_seed:
            with contextlib.suppress(OSError, ValueError, nkeys.NkeysError):  # then the old one: the server will say
                self._setup_nkeys_seed_connect()
        await super()._process_connect_init()
