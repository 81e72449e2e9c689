"""Stores a service's newest commit: in one value, or, where it is large, in one value and parts beside it.

A server takes values of 1 MB, and the state of a large cluster is far larger. So the encoding of a large commit is cut
into segments, each of which is kept as a part: a value of its own, compressed. First the segments that are new are
written, into parts that the commit in force does not use; then one compare-and-set of the service's own value, the
root, which names each part with its revision, makes all of them the commit in force. Parts no longer named are used
again.

Only the instance that wrote the root writes parts. One that was replaced without knowing can't spoil those of its
successor: it writes with compare-and-set too, over revisions that it knew of while the root was still its own.
"""

import asyncio
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from typing import Any

import msgspec
from msgspec.structs import replace

from unicron import codec
from unicron.aio import gather_or_cancel, retry_until_available
from unicron.bus.protocol import Bucket, Revisioned
from unicron.errors import ConflictError, InvalidInputError
from unicron.service.commit import Commit, Part

_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True)
class Sizes:
    """How commits are cut, in bytes.

    Attributes:
        whole: up to this a commit is one value: one write is quicker than two.
        segment: usual size of a segment. A small one is compressed worse, a large one changes more often.
        most: of a segment; far below what a server takes, even if nothing in it can be compressed.
    """

    whole: int = 128 * 1024
    segment: int = 64 * 1024
    most: int = 512 * 1024


class CommitStore:
    """The commits of one service, the newest two of which are kept.

    Attributes:
        damage: what was mended in the commit that was read, in words.

    Args:
        bucket: of the states.
        name: of the service.
        writer: of the commits: this instance.
        sizes: how commits are cut.
    """

    def __init__(self, bucket: Bucket, name: str, writer: str, sizes: Sizes | None = None) -> None:
        self._bucket = bucket
        self._name = name
        self._writer = writer
        self._sizes = sizes or Sizes()

    async def read(self, *, former: bool = False) -> Commit:
        """Return the newest commit; from now on, `write` is about to replace what is stored by one that follows it.

        Args:
            former: return the commit before the newest instead; what is written next follows that one.

        Raises:
            InvalidInputError: it is not whole, or there is none before the newest.
        """
        stored = await self._get(self._name)
        self._revision = stored.revision if stored else 0
        if former:
            stored = await self._before(self._name, self._revision)
            if stored is None:
                raise InvalidInputError("there is none")
        self._root = codec.decode(stored.value, Commit) if stored else Commit()
        self._own = False
        self._kept: dict[bytes, Part] = {}
        self._last: dict[int, int] = {}
        self.damage = ""
        parts, values = self._root.head + self._root.parts, []
        for part, value in zip(parts, await asyncio.gather(*map(self._part, parts)), strict=True):
            sound = value is not None and value.revision == part.revision
            if not sound and await self._is_replaced():
                return await self.read(former=former)
            values.append(value.value if sound and value else await self._overwritten(part))
            try:
                self._kept[zlib.decompress(values[-1]) if sound else b"anew %d" % part.number] = part
            except zlib.error as error:
                raise InvalidInputError(f"its part {part.number} is damaged: {error}") from error
        return join_parts(self._root, values)

    async def _is_replaced(self) -> bool:
        """Return whether another commit than the one we read is in force: then its parts may be another's."""
        stored = await self._get(self._name)
        return stored is not None and stored.revision != self._revision

    async def _overwritten(self, part: Part) -> bytes:
        """Return what stood in a part before somebody wrote over it; it is stored elsewhere with the next commit."""
        key, lacking = self._key(part.number), f"it lacks its part {part.number}"
        newest = await self._get(key)
        former = newest and await self._before(key, newest.revision)
        if former is None or former.revision != part.revision:
            raise InvalidInputError(lacking)
        self.damage = f"{lacking}, which somebody has written over: what stood there before is used"
        return former.value

    async def write(self, commit: Commit, state: Any) -> Commit:
        """Replace the commit read or written last by `commit` with `state`; return it as `read` would.

        Raises:
            ConflictError: somebody else wrote in between.
        """
        body = list(segments(state, self._sizes)) if self._kept else []  # costs more than encoding in one go
        commit = replace(commit, state=b"".join(body) or _encode(state), writer=self._writer)
        small = not self._kept or len(commit.state) < self._sizes.whole // 2  # not to and fro at the limit
        if small and len(_encode(commit)) <= self._sizes.whole:
            await self._put_root(commit)
            self._kept = {}
        else:
            await self._write_split(replace(commit, state=b""), body or list(segments(state, self._sizes)))
        return commit

    async def _write_split(self, root: Commit, body: list[bytes]) -> None:
        head = list(segments(root, self._sizes))
        if sum(map(len, head)) <= self._sizes.whole:
            head = []
        else:
            root = replace(root, timers={}, outbox=[])
        if not self._own:  # as others read it nothing changes, but from now on the parts are ours to write
            await self._put_root(replace(self._root, writer=self._writer))
        kept = await self._keep([*head, *body])
        parts = [[kept[segment] for segment in these] for these in (head, body)]
        await self._put_root(replace(root, head=parts[0], parts=parts[1]))
        self._kept = kept

    async def _keep(self, wanted: list[bytes]) -> dict[bytes, Part]:
        """Write those segments that the commit in force does not have; return the parts of all."""
        kept = {segment: self._kept[segment] for segment in wanted if segment in self._kept}
        new = [segment for segment in dict.fromkeys(wanted) if segment not in kept]
        used = {part.number for part in self._kept.values()}
        free = list(islice((number for number in count() if number not in used), len(new)))
        await self._record_revisions([number for number in free if number not in self._last])

        async def write(number: int, segment: bytes) -> None:
            kept[segment] = Part(number, await self._put_part(number, zlib.compress(segment, 1)))

        if new:
            await gather_or_cancel(*map(write, free, new))
        return kept

    async def _record_revisions(self, numbers: list[int]) -> None:
        """Note the revisions of parts, if the root is still our own: then no successor has written to them yet."""
        if not numbers:
            return
        found = await asyncio.gather(*(self._get(self._key(number)) for number in numbers))
        root = await self._get(self._name)
        if root is None or root.revision != self._revision:
            raise ConflictError(f"the state of {self._name} was written by another instance in between")
        self._last.update((number, part.revision if part else 0) for number, part in zip(numbers, found, strict=True))

    async def _put_part(self, number: int, value: bytes) -> int:
        while True:
            try:
                revision = await self._update(self._key(number), value, self._last[number])
            except ConflictError:  # an earlier try may have arrived without an answer, or one of an earlier instance
                await self._record_revisions([number])
            else:
                self._last[number] = revision
                return revision

    async def _put_root(self, root: Commit) -> None:
        """Replace the root; an earlier try may have arrived without an answer: the next one finds out."""
        value = _encode(root)
        try:
            self._revision = await self._update(self._name, value, self._revision)
        except ConflictError:
            stored = await self._get(self._name)
            if stored is None or stored.value != value:
                raise
            self._revision = stored.revision
        self._root, self._own = root, True

    def _key(self, number: int) -> str:
        return f"{self._name}.{number}"

    async def _part(self, part: Part) -> Revisioned | None:
        return await self._get(self._key(part.number))

    async def _get(self, key: str) -> Revisioned | None:
        return await retry_until_available(lambda: self._bucket.get(key), "reading the state")

    async def _before(self, key: str, revision: int) -> Revisioned | None:
        return await retry_until_available(lambda: self._bucket.before(key, revision), "reading the state")

    async def _update(self, key: str, value: bytes, last: int) -> int:
        return await retry_until_available(lambda: self._bucket.update(key, value, last), "committing")


def join_parts(root: Commit, values: Sequence[bytes]) -> Commit:
    """Return the whole commit of which `root` names the parts whose `values` these are."""
    if not values:
        return root
    texts = [zlib.decompress(value) for value in values]
    head = codec.decode(b"".join(texts[: len(root.head)]), Commit) if root.head else root
    return replace(head, state=b"".join(texts[len(root.head) :]), head=[], parts=[])


def segments(record: msgspec.Struct, sizes: Sizes) -> Iterator[bytes]:
    """Cut the encoding of `record`, so that most segments stay the same when a few entries of its maps change."""
    current = bytearray(_map_header(len(_fields(type(record)))))
    for name, encoded in _fields(type(record)):
        value = getattr(record, name)
        current += encoded
        if not isinstance(value, dict):
            current += _encode(value)
            continue
        current += _map_header(len(value))
        for group in _groups(value, sizes.segment):
            current += _encode(group)[len(_map_header(len(group))) :]
            if len(current) >= sizes.segment // 4:
                yield from _limited(current, sizes.most)
                current = bytearray()
    yield from _limited(current, sizes.most)


def _limited(segment: bytearray, most: int) -> Iterator[bytes]:
    for at in range(0, len(segment), most):
        yield bytes(segment[at : at + most])


def _groups(entries: dict[Any, Any], size: int) -> Iterator[dict[Any, Any]]:
    """Cut `entries` into runs whose encodings have about `size` bytes, in their order.

    A run ends where the checksum of a key says so, not after a number of entries: else one that is new or gone would
    shift all ends after it.
    """
    items = list(entries.items())
    some = dict(items[:: max(1, len(items) // 16)])
    usual = max(1, size * len(some) // max(1, len(_encode(some))))
    every = 1 << usual.bit_length() - 1
    begin = 0
    for end, (key, _) in enumerate(items, 1):
        if zlib.crc32(str(key).encode()) % every == 0 or end == len(items):
            yield dict(items[begin:end])
            begin = end


@cache
def _fields(kind: type[msgspec.Struct]) -> list[tuple[str, bytes]]:
    return [(field.name, _encode(field.encode_name)) for field in msgspec.structs.fields(kind)]


def _map_header(entries: int) -> bytes:
    """Return how msgpack begins a map."""
    if entries < 16:
        return bytes([0x80 | entries])
    if entries < 1 << 16:
        return b"\xde" + entries.to_bytes(2, "big")
    return b"\xdf" + entries.to_bytes(4, "big")
