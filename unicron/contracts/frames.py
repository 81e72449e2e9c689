"""Framing of messages on a socket: a msgpack map behind its length as four bytes, big endian."""

import struct
from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import TypeVar

import msgspec

from unicron.contracts.base import Record
from unicron.errors import InvalidInputError

T = TypeVar("T")

LENGTH = struct.Struct(">I")
LIMIT = 16 * 1024 * 1024
"""Largest message, in bytes; a longer one means that the other side does not speak this protocol."""


def frame(message: Record) -> bytes:
    """Return `message` as it travels."""
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data


def length_of(header: bytes, limit: int = LIMIT) -> int:
    """Return the length that follows `header`.

    Raises:
        InvalidInputError: it is longer than `limit`, in bytes.
    """
    length = int(LENGTH.unpack(header)[0])
    if length > limit:
        raise InvalidInputError(f"a message of {length} bytes on a worker's socket; at most {limit} are allowed")
    return length


def decoder(*kinds: type[T]) -> Callable[[bytes], T]:
    """Return a function that decodes a message of one of these kinds, and raises `InvalidInputError` for any other."""
    made: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(reduce(or_, kinds))

    def decode(data: bytes) -> T:
        try:
            return made.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"not a message of a worker's socket: {error}") from error

    return decode
