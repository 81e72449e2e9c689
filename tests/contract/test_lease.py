"""One active instance: the lease on both buses."""

import asyncio

from helpers.worlds import LEASE_TTL_S

from unicron.bus.lease import Lease
from unicron.errors import BusUnavailableError


def lease(bus, holder):
    return Lease(bus.bucket("lease"), "planner", holder, LEASE_TTL_S)


async def soon(awaitable):
    async with asyncio.timeout(20):
        return await awaitable


async def test_a_holder_that_dies_is_followed_by_another_with_a_higher_token(world):
    first, second = lease(await world.connect(), "a"), lease(await world.connect(), "b")
    token = await soon(first.acquire())
    assert await soon(second.acquire()) > token


async def test_a_lease_that_is_kept_is_not_taken(world):
    first, second = lease(await world.connect(), "a"), lease(await world.connect(), "b")
    token = await soon(first.acquire())
    keeping = asyncio.create_task(first.keep())
    taking = asyncio.create_task(second.acquire())
    await asyncio.sleep(3 * LEASE_TTL_S)
    assert not keeping.done()
    assert not taking.done()
    keeping.cancel()
    assert await soon(taking) > token


async def test_a_released_lease_is_free_at_once(world):
    bus = await world.connect()
    first = lease(bus, "a")
    token = await soon(first.acquire())
    await first.release()
    assert await bus.bucket("lease").get("planner") is None
    assert await soon(lease(bus, "b").acquire()) > token


async def test_a_lease_is_released_although_a_renewal_was_cut_short(world):
    bus = await world.connect()
    first = lease(bus, "a")
    token = await soon(first.acquire())
    await bus.bucket("lease").update("planner", b"a", token)  # it arrived, and nobody waited for its answer
    await first.release()
    assert await bus.bucket("lease").get("planner") is None


async def test_a_lost_lease_is_noticed_and_not_released_over_its_new_holder(world):
    bus = await world.connect()
    bucket = bus.bucket("lease")
    first = lease(bus, "a")
    await soon(first.acquire())
    keeping = asyncio.create_task(first.keep())
    await bucket.delete("planner")
    await bucket.create("planner", b"b")
    await soon(keeping)
    await first.release()
    assert (await bucket.get("planner")).value == b"b"


async def test_a_renewal_that_arrived_without_an_answer_is_no_loss(bus):
    bucket = bus.bucket("lease")
    first = lease(bus, "a")
    token = await soon(first.acquire())
    await bucket.update("planner", b"a", token)
    keeping = asyncio.create_task(first.keep())
    await asyncio.sleep(2 * LEASE_TTL_S)
    assert not keeping.done()
    keeping.cancel()


async def test_a_holder_cut_off_for_longer_than_the_lease_counts_it_as_lost(private_world, private_server):
    first = lease(await private_world.connect(), "a")
    token = await soon(first.acquire())
    keeping = asyncio.create_task(first.keep())
    private_server.kill()
    await soon(keeping)
    private_server.start()
    assert await soon(lease(await private_world.connect(), "b").acquire()) > token


async def test_a_lease_outlives_a_quick_restart_of_the_server(private_world, private_server):
    bus = await private_world.connect()
    first = Lease(bus.bucket("lease"), "planner", "a", 20.0)
    await soon(first.acquire())
    keeping = asyncio.create_task(first.keep())
    private_server.kill()
    private_server.start()
    await asyncio.sleep(0.3)
    assert not keeping.done()
    keeping.cancel()


class DeafBucket:
    """A bucket at the end of a bad line: one write arrives without an answer, and the read after it doesn't at all."""

    def __init__(self, bucket):
        self._bucket = bucket
        self.lost = []

    def __getattr__(self, name):
        return getattr(self._bucket, name)

    async def update(self, key, value, last):
        revision = await self._bucket.update(key, value, last)
        if "update" not in self.lost:
            self.lost.append("update")
            raise BusUnavailableError("no answer")
        return revision

    async def get(self, key):
        if "get" not in self.lost:
            self.lost.append("get")
            raise BusUnavailableError("no answer")
        return await self._bucket.get(key)


async def test_a_lease_is_kept_over_a_lost_answer_and_an_unanswered_look_behind_it(world):
    bus = await world.connect()
    bucket = DeafBucket(bus.bucket("lease"))
    first = Lease(bucket, "planner", "a", LEASE_TTL_S)
    await soon(first.acquire())
    keeping = asyncio.create_task(first.keep())
    await asyncio.sleep(2 * LEASE_TTL_S)
    assert bucket.lost == ["update", "get"]
    assert not keeping.done()
    keeping.cancel()
