"""One active instance of a core: a lease in a bucket whose entries expire unless renewed.

The revision of the lease's first write is the fencing token: it only grows, so whoever holds an older one can be told
apart and refused.
"""

import asyncio

from unicron.bus.protocol import Bucket
from unicron.errors import BusUnavailableError, ConflictError


class Lease:
    """The right to act as `name`, until `keep` returns."""

    def __init__(self, bucket: Bucket, name: str, holder: str, ttl_s: float) -> None:
        self._bucket = bucket
        self._name = name
        self._holder = holder.encode()
        self._ttl_s = ttl_s
        self._revision = 0

    async def acquire(self) -> int:
        """Wait until the lease is ours; return the fencing token."""
        while True:
            try:
                self._revision = await self._bucket.create(self._name, self._holder)
            except (ConflictError, BusUnavailableError):
                await asyncio.sleep(min(0.1, self._ttl_s / 4))
            else:
                return self._revision

    async def keep(self) -> None:
        """Renew the lease until it is lost; return then."""
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            try:
                self._revision = await self._bucket.update(self._name, self._holder, self._revision)
            except BusUnavailableError:
                continue  # nobody can take it while the bus is away; the next write tells whether it is still ours
            except ConflictError:
                return

    async def release(self) -> None:
        """Give the lease back, so that the next holder need not wait for it to expire."""
        try:
            await self._bucket.delete(self._name)
        except BusUnavailableError:
            return
