"""One active instance of a core: a lease in a bucket whose entries expire unless renewed.

The revision of the lease's first write is the fencing token: it only grows, so an older one is recognised
apart and refused. Each renewal repeats it, so that anybody can read which token is in force (`token_in_force`).
"""

import asyncio

from unicron.aio import sleep_until_beat
from unicron.bus.protocol import Bucket, Revisioned
from unicron.errors import BusUnavailableError, ConflictError

POLL_S = 0.1
"""How often an instance that waits tries to take the lease."""


async def token_in_force(bucket: Bucket, name: str) -> int | None:
    """Return the highest fencing token that was issued for `name`; None where no instance is active.

    Raises:
        BusUnavailableError: the bus did not answer.
    """
    stored = await bucket.get(name)
    if stored is None:
        return None
    token = stored.value.partition(b" ")[2]
    return int(token) if token.isdigit() else stored.revision


class Lease:
    """The right to act as `name`, until `keep` returns.

    Attributes:
        trouble: why it can't be had at all; empty where it can, or another has it.
    """

    trouble = ""

    def __init__(self, bucket: Bucket, name: str, holder: str, ttl_s: float) -> None:
        self._bucket = bucket
        self._name = name
        self._holder = holder.encode()
        self._ttl_s = ttl_s
        self._token = self._revision = 0
        self._renewed, self._failed = 0.0, ""

    async def acquire(self) -> int:
        """Wait until the lease is ours; return the fencing token."""
        while True:
            begun = self._now()
            try:
                self._token = self._revision = await self._bucket.create(self._name, self._holder)
            except BusUnavailableError as error:
                self.trouble = str(error)
            except ConflictError:
                self.trouble = await self._still_in_trouble()
            else:
                self._renewed, self.trouble = begun, ""
                return self._revision
            await asyncio.sleep(min(POLL_S, self._ttl_s / 4))

    async def _still_in_trouble(self) -> str:
        """Return why we could not renew our lease, where it stands there still: then nobody else can have it either."""
        if not self.trouble:
            return ""
        try:
            stored = await self._bucket.get(self._name)
        except BusUnavailableError as error:
            return str(error)
        return self.trouble if stored is not None and self._is_ours(stored) else ""

    async def keep(self) -> None:
        """Renew the lease until it is lost; return then.

        While the bus is away the lease counts as lost once it would have expired, whether or not anybody can take it:
        the clocks of two machines agree on durations only.
        """
        while True:
            await sleep_until_beat(self._ttl_s / 3)
            try:
                async with asyncio.timeout_at(self._renewed + self._ttl_s):
                    await self._renew()
            except ConflictError:
                return
            except TimeoutError:
                self.trouble = self._failed or f"renewing the lease: no answer within {self._ttl_s:g} s"
                return

    async def _renew(self) -> None:
        self._failed = ""
        while True:
            begun = self._now()
            try:
                if await self._update():
                    self._renewed = begun
                    return
            except BusUnavailableError as error:
                self._failed = str(error)
                await asyncio.sleep(min(POLL_S, self._ttl_s / 4))

    async def _update(self) -> bool:
        """Write once; False where an earlier write that got no answer had arrived, so that the revision was another."""
        try:
            value = self._holder + b" %d" % self._token
            self._revision = await self._bucket.update(self._name, value, self._revision)
        except ConflictError:
            stored = await self._bucket.get(self._name)
            if stored is None or not self._is_ours(stored):
                raise
            self._revision = stored.revision
            return False
        return True

    async def release(self) -> None:
        """Give the lease back, if it is still ours, so that the next holder need not wait for it to expire."""
        try:
            try:
                await self._bucket.delete(self._name, self._revision)
            except ConflictError:  # lost, or a renewal arrived whose answer nobody waited for
                stored = await self._bucket.get(self._name)
                if stored is not None and self._is_ours(stored):
                    await self._bucket.delete(self._name, stored.revision)
        except (ConflictError, BusUnavailableError):
            return

    def _is_ours(self, stored: Revisioned) -> bool:
        return stored.value.partition(b" ")[0] == self._holder

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
