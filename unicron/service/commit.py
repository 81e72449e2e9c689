"""The commit of a service, written in one compare-and-set, and the migration of older versions."""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from unicron.contracts.base import Record
from unicron.contracts.ranges import Count, Moment, Size, explained
from unicron.errors import InvalidInputError
from unicron.service.timers import Timer

log = logging.getLogger(__name__)

Migration = Callable[[dict[str, Any]], dict[str, Any]]
"""Turns a state of one version, as plain maps and lists, into one of the next."""


class Outgoing(Record, kw_only=True, frozen=True):
    """A message of the outbox."""

    subject: str
    id: str
    data: bytes


class Part(NamedTuple):
    """Location of a piece of a large commit: a numbered value, and the `revision` that it was written as."""

    number: int
    revision: int


class Commit(Record, kw_only=True, frozen=True):
    """The one value that a service writes.

    Attributes:
        sequence: position in the journal up to which it has been applied.
        timers: pending, by name.
        outbox: messages to send.
        state: the core's, encoded.
        version: of the form of `state`.
        head: where this commit is too large for one value: the parts that make up a commit with its timers and outbox.
        parts: likewise, those that make up `state`.
        writer: instance that wrote it; no two commits of different instances are equal.
        token: of the lease under which it was written.
        at: Unix seconds at which it was written; 0 where a version before this wrote it.
    """

    sequence: Size = 0
    timers: dict[str, Timer] = {}
    outbox: list[Outgoing] = []
    state: bytes = b"\xc0"
    version: Count = 1
    head: list[Part] = []
    parts: list[Part] = []
    writer: str = ""
    token: Size = 0
    at: Moment = 0.0

    def decode_state(
        self, name: str, kind: Any, migrations: Sequence[Migration] = (), learnt: Collection[str] = ()
    ) -> Any:
        """Return the state as today's `kind`; None where none was ever written.

        Args:
            name: of the service.
            kind: type of the state.
            migrations: the first turns version 1 into 2, the second 2 into 3, and so on.
            learnt: fields that can be learnt anew: where one is out of its range, it begins with its default.

        Raises:
            InvalidInputError: a newer version wrote it, or it does not fit the type; says which field.
        """
        if self.version > len(migrations) + 1:
            raise InvalidInputError(f"it has version {self.version}, this one reads up to {len(migrations) + 1}")
        plain: Any = None
        try:
            state = self.state
            if missing := migrations[self.version - 1 :]:
                plain = msgspec.msgpack.decode(state)
                for migrate in missing if plain is not None else ():
                    plain = migrate(plain)
                state = msgspec.msgpack.encode(plain)
            try:
                return msgspec.msgpack.decode(state, type=kind | None)
            except msgspec.ValidationError:
                plain = msgspec.msgpack.decode(state)
                if not learnt or not isinstance(plain, dict):
                    raise
                return msgspec.msgpack.decode(_drop_bad_fields(name, kind, plain, learnt), type=kind)
        except (msgspec.MsgspecError, LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise InvalidInputError(f"it is not of this version: {explained(error, plain)}") from error


def _drop_bad_fields(name: str, kind: Any, plain: dict[str, Any], learnt: Collection[str]) -> bytes:
    """Return a state without those of its `learnt` fields that are out of their ranges."""
    sound = dict(plain)
    for field in learnt:
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode({field: plain[field]} if field in plain else {}), type=kind)
        except msgspec.ValidationError as error:
            log.error("%s begins to learn %s anew: stored was %s", name, field, explained(error, plain))  # noqa: TRY400
            del sound[field]
    return msgspec.msgpack.encode(sound)
