"""One active instance: the lease, in virtual time."""

import asyncio
from functools import partial

from helpers.waiting import elapse, in_virtual_time
from helpers.worlds import LEASE_TTL_S

from unicron.bus.lease import Lease
from unicron.bus.protocol import Revisioned
from unicron.errors import BusUnavailableError, ConflictError


class BadLine:
    """A bucket at the end of a line that may be cut, and on which the answers to some calls get lost."""

    def __init__(self, bucket):
        self._bucket = bucket
        self.cut, self.loses, self.lost = False, [], []

    async def _pass(self, name, *arguments):
        if self.cut:
            raise BusUnavailableError("no answer")
        found = await getattr(self._bucket, name)(*arguments)
        if name in self.loses:
            self.loses.remove(name)
            self.lost.append(name)
            raise BusUnavailableError("no answer")
        return found

    def __getattr__(self, name):
        return partial(self._pass, name)


async def two(world):
    """Return the bucket, a lease that is held, its token, and a lease of another who would like it."""
    bucket = BadLine((await world.connect()).bucket("lease"))
    first = Lease(bucket, "planner", "a", LEASE_TTL_S)
    token = await first.acquire()
    return bucket, first, token, Lease((await world.connect()).bucket("lease"), "planner", "b", LEASE_TTL_S)


@in_virtual_time
async def test_a_holder_that_dies_is_followed_by_another_with_a_higher_token(world):
    _, _, token, second = await two(world)
    assert await second.acquire() > token


@in_virtual_time
async def test_a_lease_that_is_kept_is_not_taken(world):
    _, first, token, second = await two(world)
    keeping, taking = asyncio.create_task(first.keep()), asyncio.create_task(second.acquire())
    await elapse(3 * LEASE_TTL_S)
    assert not keeping.done()
    assert not taking.done()
    keeping.cancel()
    assert await taking > token


@in_virtual_time
async def test_a_released_lease_is_free_at_once(world):
    bucket, first, token, second = await two(world)
    await first.release()
    assert await bucket.get("planner") is None
    assert await second.acquire() > token


@in_virtual_time
async def test_a_lease_is_released_although_a_renewal_was_cut_short(world):
    bucket, first, token, _ = await two(world)
    await bucket.update("planner", b"a", token)  # it arrived, and nobody waited for its answer
    await first.release()
    assert await bucket.get("planner") is None


@in_virtual_time
async def test_a_lost_lease_is_noticed_and_not_released_over_its_new_holder(world):
    bucket, first, *_ = await two(world)
    keeping = asyncio.create_task(first.keep())
    await bucket.delete("planner")
    await bucket.create("planner", b"b")
    await keeping
    await first.release()
    assert (await bucket.get("planner")).value == b"b"


@in_virtual_time
async def test_a_holder_cut_off_for_longer_than_the_lease_counts_it_as_lost_before_another_has_it(world):
    bucket, first, token, second = await two(world)
    bucket.cut = True
    taking = asyncio.create_task(second.acquire())
    await first.keep()
    assert not taking.done()
    assert await taking > token


@in_virtual_time
async def test_a_lease_outlives_a_shorter_outage(world):
    bucket, first, *_ = await two(world)
    keeping = asyncio.create_task(first.keep())
    bucket.cut = True
    await elapse(0.9 * LEASE_TTL_S)
    bucket.cut = False
    await elapse(2 * LEASE_TTL_S)
    assert not keeping.done()
    keeping.cancel()


@in_virtual_time
async def test_a_lease_is_kept_over_a_lost_answer_and_an_unanswered_look_behind_it(world):
    bucket, first, *_ = await two(world)
    bucket.loses = ["update", "get"]
    keeping = asyncio.create_task(first.keep())
    await elapse(2 * LEASE_TTL_S)
    assert bucket.lost == ["update", "get"]
    assert not keeping.done()
    keeping.cancel()


@in_virtual_time
async def test_all_leases_are_renewed_at_the_same_moments(world):
    bucket, renewed = (await world.connect()).bucket("lease"), []

    class Watched(BadLine):
        async def _pass(self, name, *arguments):
            renewed.append(asyncio.get_running_loop().time())
            return await super()._pass(name, *arguments)

    leases = [Lease(Watched(bucket), name, "a", LEASE_TTL_S) for name in ("planner", "detector", "registry")]
    keeping = []
    for lease in leases:
        await lease.acquire()
        keeping.append(asyncio.create_task(lease.keep()))
        await elapse(0.1 * LEASE_TTL_S)
    renewed.clear()
    await elapse(2 * LEASE_TTL_S)
    assert len(renewed) == 18
    assert len({round(moment, 3) for moment in renewed}) == 6, "the server wakes up once for all of them"
    for each in keeping:
        each.cancel()


class Frozen(BadLine):
    """A bucket that, once frozen, gives what it held then, and neither stores anything nor lets it run out."""

    held = None

    async def _pass(self, name, *arguments):
        if self.held is None:
            return await super()._pass(name, *arguments)
        if name == "get":
            return self.held
        if name == "create":
            raise ConflictError("it is there")
        raise BusUnavailableError("read-only file system")


@in_virtual_time
async def test_who_could_not_renew_says_why_for_as_long_as_nobody_else_can_have_it_either(world):
    bucket = Frozen((await world.connect()).bucket("lease"))
    lease = Lease(bucket, "planner", "a", LEASE_TTL_S)
    await lease.acquire()
    bucket.held = await bucket.get("planner")
    await lease.keep()
    assert lease.trouble == "read-only file system"
    taking = asyncio.create_task(lease.acquire())
    await elapse(LEASE_TTL_S)
    assert lease.trouble == "read-only file system", "that it stands there still is no sign that another has it"
    bucket.held = Revisioned(b"b", bucket.held.revision + 1)
    await elapse(LEASE_TTL_S)
    assert lease.trouble == ""
    taking.cancel()
