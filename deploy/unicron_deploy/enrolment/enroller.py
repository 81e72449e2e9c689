"""The enroller's shell: questions from the bus, the file of tokens, and the keys."""

import asyncio
import logging
import secrets
import time
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from unicron import codec, subjects
from unicron.aio import gather_or_cancel, retry_until_available
from unicron.bus.access import MOST_ASKED
from unicron.bus.nats import NatsBus
from unicron.contracts.answers import Reply
from unicron.contracts.base import Message, Record
from unicron.contracts.enrolment import JoinReply, JoinRequest, Papers, PapersRequest
from unicron.contracts.events import Alert, EnrolmentRefused
from unicron.contracts.queries import CreateToken, Query, RevokeToken
from unicron.errors import BusUnavailableError, InvalidInputError
from unicron.files import read_secret, write_secret
from unicron.printable import one_line
from unicron.rate_limits import LETTERS, RateLimiter, more_text
from unicron.service.core import order_taken
from unicron.services import ENROLLER
from unicron_deploy.enrolment.core import Book
from unicron_deploy.enrolment.servers import reload
from unicron_deploy.keys import Keyring

log = logging.getLogger(__name__)
R = TypeVar("R", bound=Record)

MOST_PAPERS = 4 * MOST_ASKED
"""Bytes of a question for papers."""


class Enroller:
    """Lets nodes in.

    Args:
        bus: its connection.
        keyring: of the cluster.
    """

    def __init__(self, bus: NatsBus, keyring: Keyring) -> None:
        self._bus, self._keyring = bus, keyring
        self._file = keyring.folder / ENROLLER / "tokens.json"
        self._book = read_book(self._file)
        self._facts: asyncio.Queue[Message] = asyncio.Queue()
        self._floods = RateLimiter(LETTERS)
        self._written, self._read = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Serve until cancelled."""
        await self._bus.client.subscribe(subjects.JOIN, cb=self._on_join)
        await self._bus.client.subscribe(subjects.papers("*"), cb=self._on_papers)
        for subject in (subjects.rpc(ENROLLER), subjects.orders(ENROLLER)):
            orders = subject == subjects.orders(ENROLLER)
            await self._bus.serve(subject, ENROLLER, self._on_order if orders else self._on_query)
        log.info("lets nodes in by join tokens")
        await gather_or_cancel(self._publish(), self._reload(), self._reconnect())

    # --- who wants to be a node --------------------------------------------------------------------------------------

    async def _on_join(self, message: Msg) -> None:
        asyncio.create_task(self._join(message))  # noqa: RUF006 a slow server must not hold up the next one

    async def _join(self, message: Msg) -> None:
        try:
            request = _decoded(message.data, JoinRequest, MOST_ASKED)
        except InvalidInputError as error:
            self._refuse("", "", "", error)
            await _answer(message, JoinReply(error=str(error)))
            return
        try:
            pool = self._let_in(request)
            await self._servers_know()
        except InvalidInputError as error:
            self._refuse(request.node, request.token, request.machine, error)
            await _answer(message, JoinReply(error=str(error)))
        except BusUnavailableError as error:  # it may ask again
            log.warning("%s waits: %s", request.node, error)
        except OSError:
            log.exception("%s waits", request.node)
        else:
            await _answer(message, JoinReply(pool=pool))

    def _let_in(self, request: JoinRequest) -> str:
        """Give who asks a node's rights, if a token allows it; return the pool."""
        book, fact = self._book.admitted(request, self._keyring.users(), time.time())
        self._keyring.enrol(request.node, request.public_key)
        if book != self._book:
            self._save(book)
            self._say(fact)
        return fact.pool

    def _refuse(self, name: str, token: str, machine: str, error: Exception) -> None:
        now = time.monotonic()
        for count in self._floods.held_back(now).values():
            self._say(Alert(text=f"{more_text(count)}: somebody was not let in, as the lines before say"))
        if self._floods.admit("refusals", now):
            log.warning("%s was not let in: %s", name or "somebody", error)
            self._say(EnrolmentRefused(name=name, token=token, machine=machine, reason=one_line(str(error))))

    async def _on_papers(self, message: Msg) -> None:
        node = message.subject.rsplit(".", 1)[-1]  # the server lets nobody else ask there
        try:
            request = _decoded(message.data, PapersRequest, MOST_PAPERS)
            made = self._keyring.papers(node, request.certificate_request.encode())
        except InvalidInputError as error:
            log.warning("no papers for %s: %s", node, error)
            await _answer(message, Papers(error=str(error)))
        else:
            certificate, authority, fabric = made
            await _answer(
                message, Papers(certificate=certificate.decode(), authority=authority.decode(), fabric=fabric)
            )

    # --- people ------------------------------------------------------------------------------------------------------

    async def _on_query(self, data: bytes) -> bytes:
        return self._asked(data, orders=False)

    async def _on_order(self, data: bytes) -> bytes:
        return self._asked(data, orders=True)

    def _asked(self, data: bytes, *, orders: bool) -> bytes:
        try:
            query = codec.decode_asked(data, orders=orders)
            reply = self._obeyed(query)
        except InvalidInputError as error:
            reply = Reply(error=str(error))
        return codec.encode(reply)

    def _obeyed(self, query: Query) -> Reply:
        if isinstance(query, CreateToken):
            self._save(self._book.added(query, time.time()))
            text = f"token {query.token} lets {query.uses} into pool {query.pool} for {query.seconds:g} s"
        elif isinstance(query, RevokeToken):
            self._save(self._book.revoked(query.token))
            text = f"token {query.token} lets nobody in any more; who came by it stays"
        else:
            return Reply(tokens=self._book.views(time.time()))
        self._say(order_taken(query, text))
        return Reply(text=text)

    def _save(self, book: Book) -> None:
        write_secret(self._file, msgspec.json.format(msgspec.json.encode(book)))
        self._book = book

    # --- what follows ------------------------------------------------------------------------------------------------

    def _say(self, fact: Message) -> None:
        own = secrets.token_hex(8)
        self._facts.put_nowait(msgspec.structs.replace(fact, id=own, at=time.time(), source=ENROLLER, correlation=own))

    async def _publish(self) -> None:
        while True:
            fact = await self._facts.get()
            await retry_until_available(
                partial(self._bus.append, subjects.for_message(fact), codec.encode(fact), fact.id), "publishing"
            )

    async def _servers_know(self) -> None:
        """Return when the servers have read what stands in their file by now."""
        read = self._read
        self._written.set()
        await asyncio.shield(read)

    async def _reload(self) -> None:
        """Have the servers read their file, once for all that was written meanwhile."""
        while True:
            await self._written.wait()
            self._written.clear()
            read, self._read = self._read, asyncio.get_running_loop().create_future()
            try:
                await reload(self._bus.client)
            except (BusUnavailableError, NatsError) as error:
                read.set_exception(BusUnavailableError(str(error)))
                read.exception()  # nobody may wait for it
            else:
                read.set_result(None)

    async def _reconnect(self) -> None:
        async for down_s in self._bus.reconnected():
            log.info("the bus was away for %.1f s", down_s)


def read_book(path: Path) -> Book:
    """Return the tokens in a file, none where there is no file.

    Raises:
        InvalidInputError: it can't be read.
    """
    if not path.exists():
        return Book()
    try:
        return msgspec.json.decode(read_secret(path), type=Book)
    except msgspec.MsgspecError as error:
        raise InvalidInputError(f"{path}: no list of tokens: {error}; remove it, and make new tokens") from error


def _decoded(data: bytes, kind: type[R], most: int) -> R:
    if len(data) > most:
        raise InvalidInputError(f"a question of {len(data)} bytes; {most} are allowed")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"a question that can't be read: {error}; use a version of Unicron like this one"
        ) from None


async def _answer(message: Msg, reply: Record) -> None:
    if message.reply:
        try:
            await message.respond(msgspec.msgpack.encode(reply))
        except NatsError as error:
            log.info("an answer was lost: %s", error)
