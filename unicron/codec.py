"""Messages to bytes and back: msgpack maps with string keys, checked against their type while decoding."""

from typing import Any, TypeVar

import msgspec

from unicron.contracts import commands, events, queries
from unicron.contracts.base import LOCAL, Message, Record
from unicron.errors import InvalidInputError

R = TypeVar("R", bound=Record)


def _leaves(base: type[Message]) -> list[type[Message]]:
    """All message types that cross the bus below `base`, by name; what others stand on is none itself."""
    children = base.__subclasses__()
    found = [leaf for child in children for leaf in _leaves(child)] or [base]
    return sorted(set(found) - set(LOCAL), key=lambda kind: kind.__name__)


MESSAGES: dict[str, type[Message]] = {
    kind.__name__: kind for kind in _leaves(Message) if kind.__module__ in {events.__name__, commands.__name__}
}
QUERIES: tuple[type[queries.Query], ...] = tuple(queries.Query.__subclasses__())

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


def encode(record: Record) -> bytes:
    """Return `record` as msgpack; the keys of its maps are strings, as every reader of msgpack expects."""
    return _encoder.encode(msgspec.to_builtins(record, builtin_types=(bytes,), str_keys=True))


def decode(data: bytes, kind: type[R]) -> R:
    """Return the `kind` in `data`.

    Raises:
        InvalidInputError: it is not msgpack, or a field is missing or of the wrong type.
    """
    return _decode(data, kind, kind.__name__)  # type: ignore[no-any-return]


def decode_message(data: bytes) -> Message:
    """Return the message in `data`, of whichever type its `type` field names.

    Raises:
        InvalidInputError: it is not msgpack, its type is unknown, or a field is missing or of the wrong type.
    """
    return _decode(data, _MESSAGE_UNION, "message")  # type: ignore[no-any-return]


def decode_query(data: bytes) -> queries.Query:
    """Return the request in `data`.

    Raises:
        InvalidInputError: as for `decode_message`.
    """
    return _decode(data, _QUERY_UNION, "query")  # type: ignore[no-any-return]


def _decode(data: bytes, kind: Any, name: str) -> Any:
    try:
        return msgspec.convert(_decoder.decode(data), kind, builtin_types=(bytes,), str_keys=True)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidInputError(f"not a valid {name} ({len(data)} bytes): {error}") from error


def _union(kinds: Any) -> Any:
    union: Any = None
    for kind in kinds:
        union = kind if union is None else union | kind
    return union


_MESSAGE_UNION = _union(MESSAGES.values())
_QUERY_UNION = _union(QUERIES)
