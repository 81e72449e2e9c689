"""Messages to bytes and back: msgpack maps with string keys, checked against their type while decoding.

The types of the fields hold their ranges (`unicron.contracts.ranges`), so nobody gets a value that is out of them.

What is large is compressed with zlib, after a byte with which no msgpack begins: a plan for a hundred thousand workers
would else be more than a server takes.
"""

import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import msgspec

from unicron.contracts import commands, events, hardware, notices, queries, ranges, slowdowns, stragglers
from unicron.contracts.base import LOCAL, Message, Record
from unicron.errors import InvalidInputError

R = TypeVar("R", bound=Record)


def _leaves(base: type[Message]) -> list[type[Message]]:
    """All message types that cross the bus below `base`, by name; what others stand on is none itself."""
    children = base.__subclasses__()
    found = [leaf for child in children for leaf in _leaves(child)] or [base]
    return sorted(set(found) - set(LOCAL), key=lambda kind: kind.__name__)


_KINDS = (events, hardware, slowdowns, stragglers, notices, commands)

MESSAGES: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in _leaves(Message)
    if kind.__module__.startswith(tuple(module.__name__ for module in _KINDS))
}
QUERIES: tuple[type[queries.Query], ...] = tuple(
    kind
    for kind in vars(queries).values()
    if isinstance(kind, type) and issubclass(kind, queries.Query) and kind not in {queries.Query, queries.Order}
)

COMPRESSED = b"\xc1"
"""First byte of what is compressed; msgpack never uses it."""

LARGE = 64 * 1024
"""Bytes from which on a value is compressed."""

MOST = 128 * 1024 * 1024
"""Bytes that a compressed value may expand to."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


def encode(record: Record) -> bytes:
    """Return `record` as msgpack; the keys of its maps are strings, as every reader of msgpack expects."""
    data = _encoder.encode(msgspec.to_builtins(record, builtin_types=(bytes,), str_keys=True))
    return data if len(data) < LARGE else COMPRESSED + zlib.compress(data, 1)


def decode(data: bytes, kind: type[R]) -> R:
    """Return the `kind` in `data`.

    Raises:
        InvalidInputError: it is not msgpack, or a field is missing, of the wrong type, or out of its range.
    """
    return _decode(data, _decoder_of(kind), {}, kind.__name__)  # type: ignore[no-any-return]


def decode_message(data: bytes) -> Message:
    """Return the message in `data`, of whichever type its `type` field names.

    Raises:
        InvalidInputError: it is not msgpack, its type is unknown, or a field is missing, of the wrong type, or out of
            its range; says which field, what it holds, and what is allowed.
    """
    return _decode(data, _MESSAGE, MESSAGES, "message")  # type: ignore[no-any-return]


def decode_query(data: bytes) -> queries.Query:
    """Return the request in `data`.

    Raises:
        InvalidInputError: as for `decode_message`.
    """
    return _decode(data, _QUERY, {}, "query")  # type: ignore[no-any-return]


def decode_asked(data: bytes, *, orders: bool) -> queries.Query:
    """Return the request in `data`, which came on a subject for orders or on one where every user may ask.

    Raises:
        InvalidInputError: as for `decode_message`; or it is an order in the wrong place.
    """
    query = decode_query(data)
    if isinstance(query, queries.Order) and not orders:
        raise InvalidInputError(f"{type(query).__name__} is an order: send it on unicron.v1.ord.OWNER")
    return query


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[Any], kinds: Mapping[str, Any], name: str) -> Any:
    """Decode in one go, which takes a hundredth of the time; in two steps only where a map has numbers for keys."""
    plain: Any = None
    try:
        if data.startswith(COMPRESSED):
            data = _expanded(data[1:])
        try:
            return decoder.decode(data)
        except msgspec.ValidationError:
            plain, kind = _decoder.decode(data), decoder.type
        if isinstance(plain, dict):
            kind = kinds.get(str(plain.get("type")), kind)
        return msgspec.convert(plain, kind, builtin_types=(bytes,), str_keys=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, zlib.error) as error:
        raise InvalidInputError(f"not a valid {name} ({len(data)} bytes): {ranges.explained(error, plain)}") from error


@cache
def _decoder_of(kind: type[Record]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def _expanded(data: bytes) -> bytes:
    expander = zlib.decompressobj()
    expanded = expander.decompress(data, MOST)
    if not expander.eof:
        raise zlib.error(f"compressed, and cut off or of more than {MOST} bytes")
    return expanded


def _union(kinds: Any) -> Any:
    union: Any = None
    for kind in kinds:
        union = kind if union is None else union | kind
    return union


_MESSAGE = msgspec.msgpack.Decoder(_union(MESSAGES.values()))
_QUERY = msgspec.msgpack.Decoder(_union(QUERIES))
