"""Commits of any size: whole or not at all, with other writers and cut off anywhere."""

import asyncio
import itertools
import random

import msgspec
import pytest

from unicron import codec
from unicron.errors import BusUnavailableError, ConflictError, InvalidInputError
from unicron.service.commit import Commit, Outgoing, Part
from unicron.service.commit_store import CommitStore, Sizes, segments
from unicron.service.timers import Timer

SIZES = Sizes(whole=400, segment=200, most=300)


class Entry(msgspec.Struct, frozen=True):
    text: str = ""


class State(msgspec.Struct):
    number: int = 0
    entries: dict[str, Entry] = {}
    others: dict[int, list[str]] = {}
    set_: set[int] = msgspec.field(name="numbers", default_factory=set)


def state(entries, number=0):
    return State(number, {f"key-{each}": Entry(f"text {each}") for each in range(entries)}, {1: ["a"]}, {5})


def known(commit):
    return msgspec.msgpack.decode(commit.state, type=State | None)


def gist(commit):
    return msgspec.structs.replace(commit, writer="")


class Recorder:
    """A bucket that counts writes, and can fail or be cut off at one of them."""

    def __init__(self, bucket):
        self.bucket, self.written, self.largest = bucket, [], 0
        self.deaf, self.left = False, 10**6

    async def get(self, key):
        return await self.bucket.get(key)

    async def before(self, key, revision):
        return await self.bucket.before(key, revision)

    async def update(self, key, value, last):
        self.left -= 1
        if self.left < 0:
            raise EOFError
        revision = await self.bucket.update(key, value, last)
        self.written.append(key)
        self.largest = max(self.largest, len(value))
        if self.deaf:
            self.deaf = False
            raise BusUnavailableError("no answer")
        return revision


@pytest.fixture
async def bucket(world):
    return Recorder((await world.connect()).bucket("state"))


WRITERS = itertools.count()


def ledger_of(bucket):
    return CommitStore(bucket, "s", f"writer-{next(WRITERS)}", SIZES)


@pytest.fixture
def ledger(bucket):
    return ledger_of(bucket)


def big_outbox(count):
    return [Outgoing(subject="s", id=str(number), data=random.Random(number).randbytes(50)) for number in range(count)]


@pytest.mark.parametrize("entries", [0, 1, 15, 16, 17, 1000, 70_000])
def test_the_segments_joined_are_the_encoding(entries):
    cut = list(segments(state(entries), Sizes()))
    assert b"".join(cut) == msgspec.msgpack.encode(state(entries))
    assert all(len(segment) <= Sizes().most for segment in cut)
    assert len(cut) >= entries // 5000


@pytest.mark.parametrize(
    "change", [lambda entries: entries.pop("key-777"), lambda entries: entries.update({"key-888": Entry("changed")})]
)
def test_few_segments_differ_where_one_entry_does(change):
    before, after = state(30_000), state(30_000)
    change(after.entries)
    old, new = set(segments(before, Sizes())), list(segments(after, Sizes()))
    assert len(old) > 10
    assert len([segment for segment in new if segment not in old]) <= 2


async def test_commits_of_any_size_are_read_as_they_were_written(bucket, ledger):
    """Growing and shrinking, and going on after each by the same instance or by another."""
    assert await ledger.read() == Commit()
    for number, entries in enumerate([1, 50, 51, 500, 20, 0, 60, 60, 1]):
        timers = {f"t{each}": Timer(due=1.0, cause="c", correlation="c") for each in range(entries // 10)}
        wanted = Commit(sequence=number, timers=timers, outbox=big_outbox(entries % 7), version=3)
        written = await ledger.write(wanted, state(entries, number))
        whole = msgspec.msgpack.encode(state(entries, number))
        assert gist(written) == msgspec.structs.replace(wanted, state=whole)
        again = ledger_of(bucket)
        assert await again.read() == written
        ledger = again if number % 2 else ledger
    assert bucket.largest <= 600


async def test_a_small_commit_is_one_write_and_a_small_change_of_a_large_one_few(bucket, ledger):
    await ledger.read()
    await ledger.write(Commit(sequence=1), state(3))
    assert bucket.written == ["s"]
    await ledger.write(Commit(sequence=2), state(1000))
    assert len(bucket.written) > 50
    bucket.written.clear()
    changed = state(1000)
    changed.entries["key-500"] = Entry("another")
    await ledger.write(Commit(sequence=3), changed)
    assert len(bucket.written) <= 3
    assert bucket.written[-1] == "s"


async def test_values_are_used_again(bucket, ledger):
    """However often a large state changes, it takes up no more room than the old and the new together."""
    await ledger.read()
    for number in range(20):
        await ledger.write(Commit(sequence=number), state(100, number))
        everything = state(100, number)
        everything.entries = {key: Entry(f"{number} {key}") for key in everything.entries}
        await ledger.write(Commit(sequence=number), everything)
    assert len(set(bucket.written)) <= 3 * len(list(segments(everything, SIZES)))


async def test_an_outbox_larger_than_a_value_is_kept_too(bucket, ledger):
    await ledger.read()
    wanted = await ledger.write(Commit(sequence=1, outbox=big_outbox(200)), state(2))
    assert await ledger_of(bucket).read() == wanted
    assert bucket.largest <= 3000, "the root names parts"


async def test_wherever_it_is_cut_off_the_old_commit_or_the_new_one_is_there_whole(bucket):
    for cut in itertools.count():
        ledger = ledger_of(bucket)
        before = await ledger.read()
        bucket.left = cut
        number = cut + 1
        try:
            await ledger.write(Commit(sequence=number), state(40 + number % 3, number))
        except EOFError:
            bucket.left = 10**6
            assert gist(await ledger_of(bucket).read()) == gist(before)
        else:
            bucket.left = 10**6
            assert (await ledger_of(bucket).read()).sequence == number
            break
    assert cut > 5


async def test_a_write_whose_answer_is_lost_counts(bucket, ledger):
    await ledger.read()
    for number in range(1, 8):
        bucket.deaf = True
        written = await ledger.write(Commit(sequence=number), state(20 * number, number))
        assert await ledger_of(bucket).read() == written


async def test_who_has_not_read_the_newest_commit_can_not_replace_it(bucket):
    for entries in (1, 100):
        first, second = ledger_of(bucket), ledger_of(bucket)
        assert await first.read() == await second.read()
        written = await first.write(Commit(sequence=1), state(entries, 1))
        with pytest.raises(ConflictError):
            await second.write(Commit(sequence=2), state(entries, 2))
        assert await ledger_of(bucket).read() == written
        assert await second.read() == written
        await second.write(Commit(sequence=3), state(entries, 3))


async def test_many_who_write_at_once_never_spoil_a_commit(bucket):
    """Each adds one; whoever loses reads again. Nothing is lost or counted twice, and every read is whole."""

    async def add(times, chance):
        ledger = ledger_of(bucket)
        while times:
            commit = await ledger.read()
            number = known(commit).number if known(commit) else 0
            for _ in range(chance.randrange(3)):  # others go on meanwhile
                await asyncio.sleep(0.001)
            try:
                await ledger.write(Commit(sequence=number + 1), state(50 + number % 5, number + 1))
            except ConflictError:
                continue
            times -= 1

    await asyncio.gather(*(add(8, random.Random(writer)) for writer in range(4)))
    last = await ledger_of(bucket).read()
    assert (last.sequence, known(last).number) == (32, 32)


async def test_the_commit_before_the_newest_can_be_read_and_gone_on_from(bucket, ledger):
    await ledger.read()
    for entries in (3, 500, 501):  # whole, and in parts
        first = await ledger.write(Commit(sequence=1), state(entries))
        newest = await bucket.get("s")
        await bucket.bucket.update("s", b"garbage", newest.revision)
        ledger = ledger_of(bucket)
        with pytest.raises(InvalidInputError, match="not a valid Commit"):
            await ledger.read()
        assert await ledger.read(former=True) == first
        written = await ledger.write(Commit(sequence=2), state(entries + 1))
        ledger = ledger_of(bucket)
        assert await ledger.read() == written


async def test_there_may_be_no_commit_before_the_newest(bucket, ledger):
    await bucket.update("s", b"garbage", 0)
    with pytest.raises(InvalidInputError, match="there is none"):
        await ledger.read(former=True)


@pytest.mark.parametrize("again", [1, 2])
async def test_a_part_that_another_hand_wrote_over_is_mended_unless_it_was_written_over_twice(bucket, ledger, again):
    await ledger.read()
    written = await ledger.write(Commit(sequence=1), state(500))
    root = codec.decode((await bucket.get("s")).value, Commit)
    struck = root.parts[3]
    last = struck.revision
    for _ in range(again):
        last = await bucket.bucket.update(f"s.{struck.number}", b"garbage", last)
    ledger = ledger_of(bucket)
    if again == 2:
        with pytest.raises(InvalidInputError, match=f"it lacks its part {struck.number}$"):
            await ledger.read()
        return
    assert await ledger.read() == written
    assert ledger.damage.startswith(f"it lacks its part {struck.number}, which somebody has written over")
    written = await ledger.write(Commit(sequence=2), state(500))
    ledger = ledger_of(bucket)
    assert await ledger.read() == written
    assert not ledger.damage, "it is stored anew"


async def test_a_part_that_is_no_part_is_refused(bucket, ledger):
    await ledger.read()
    await ledger.write(Commit(sequence=1), state(500))
    revision = await bucket.bucket.update("s.9999", b"garbage", 0)
    stored = await bucket.get("s")
    root = codec.decode(stored.value, Commit)
    spoilt = msgspec.structs.replace(root, parts=[*root.parts, Part(9999, revision)])
    await bucket.bucket.update("s", msgspec.msgpack.encode(spoilt), stored.revision)
    with pytest.raises(InvalidInputError, match="its part 9999 is damaged"):
        await ledger_of(bucket).read()
