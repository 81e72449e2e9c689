"""Compare-and-set key-value on NATS."""

from collections.abc import Callable, Coroutine
from typing import Any

import nats.js.errors
from nats.js.kv import KV_OP, KeyValue

from unicron.bus import topology
from unicron.bus.protocol import Revisioned
from unicron.errors import ConflictError, InvalidInputError

_WRONG_LAST = {10071, 10164}


class NatsBucket:
    """A key-value bucket; see `Bucket`."""

    def __init__(self, name: str, raw: KeyValue, call: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self._name = name
        self._raw = raw
        self._call = call
        self._get = f"{topology.API}.STREAM.MSG.GET.{raw._stream}"  # noqa: SLF001

    async def get(self, key: str) -> Revisioned | None:
        """Return the value, or None."""
        try:
            entry = await self._call(self._raw.get(key), f"reading {self._name}/{key}", self._get)
        except nats.js.errors.KeyNotFoundError:
            return None
        return Revisioned(entry.value or b"", entry.revision)

    async def before(self, key: str, revision: int) -> Revisioned | None:
        """Return what stood there before that revision, or None."""
        found, after = None, 0
        while True:
            get = self._raw._js.get_msg(self._raw._stream, after + 1, f"{self._raw._pre}{key}", next=True)  # noqa: SLF001
            try:
                entry = await self._call(get, f"reading {self._name}/{key}", self._get)
            except nats.js.errors.NotFoundError:
                return found
            if (after := int(entry.seq)) >= revision:
                return found
            deleted = KV_OP in (entry.headers or {})
            found = None if deleted else Revisioned(entry.data or b"", after)

    async def create(self, key: str, value: bytes) -> int:
        """Write a key that must not exist."""
        return await self._write(self._raw.create(key, value), key)

    async def update(self, key: str, value: bytes, last: int) -> int:
        """Write over revision `last`."""
        write = self._raw.update(key, value, last=last) if last else self._raw.create(key, value)
        return await self._write(write, key)

    async def delete(self, key: str, last: int = 0) -> None:
        """Remove the key."""
        await self._write(self._raw.delete(key, last=last), key)

    async def _write(self, write: Coroutine[Any, Any, Any], key: str) -> int:
        try:
            return int(await self._call(write, f"writing {self._name}/{key}", f"{self._raw._pre}{key}"))  # noqa: SLF001
        except nats.js.errors.APIError as error:
            # Not found: `create` looks again when it lost, and what it lost to may have expired just then.
            lost = isinstance(error, nats.js.errors.KeyWrongLastSequenceError | nats.js.errors.KeyNotFoundError)
            if lost or getattr(error, "err_code", 0) in _WRONG_LAST:
                raise ConflictError(f"{self._name}/{key} was written by somebody else in between") from error
            raise InvalidInputError(f"writing {self._name}/{key}: {error}") from error
