"""The console over HTTP: pages as JSON, the same live over websockets, orders, and the files of the page."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from unicron.client import Client
from unicron.contracts.answers import StragglerView
from unicron.errors import BusUnavailableError, InvalidInputError, UnicronError
from unicron.observe.accounts.report import Report
from unicron.observe.state import JournalLine
from unicron_console import orders
from unicron_console.live import CLUSTER, Hub
from unicron_console.openapi import Endpoint, describe
from unicron_console.pages import plan_page, straggler_page
from unicron_console.tokens import Tokens
from unicron_console.views import (
    Access,
    Answer,
    ClusterPage,
    CurvePage,
    FailureLine,
    FailurePage,
    Log,
    NodePage,
    PlanPage,
    Question,
    StragglerPage,
    TaskPage,
    Wanted,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

FILES = Path(__file__).parent / "page"

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}

MOST_BODY = 64 << 10
"""Bytes of a question or an order."""

MOST_EVENTS = 1000
MOST_LINES = 200

ASKED_S = 1.0
"""So long what a service has answered is given to others who ask the same."""

REFUSED_S = 0.3
"""Delay of the answer to a wrong token."""

TOO_SLOW = 1013
"""Code with which a websocket is closed whose reader is too slow: "try again later"."""

KINDS = {"tasks": "task", "failures": "failure", "nodes": "node"}


class Web:
    """Answers browsers and programs.

    Args:
        hub: that has the pages.
        client: on the bus; orders are given by it in somebody's name.
        tokens: of the names that may order.
        hosts: names under which the console is reached; another one is a page elsewhere that pretends to be this one.
        chaos: whether faults may be injected.
    """

    def __init__(
        self, hub: Hub, client: Client, tokens: Tokens, hosts: Sequence[str] = ("*",), *, chaos: bool = False
    ) -> None:
        self._hub, self._client, self._tokens, self._chaos = hub, client, tokens, chaos
        self._asked: dict[object, tuple[float, asyncio.Task[Any]]] = {}
        self.ways = (
            Endpoint("/api/cluster", self._page, "The cluster at a glance.", ClusterPage),
            Endpoint("/api/tasks/{task}", self._page, "A task.", TaskPage),
            Endpoint("/api/tasks/{task}/curve", self._curve, "What the planner believes of its throughput.", CurvePage),
            Endpoint("/api/tasks/{task}/stragglers", self._stragglers, "The workers that slow it down.", StragglerPage),
            Endpoint("/api/failures", self._failures, "All failures that are known, newest first.", list[FailureLine]),
            Endpoint("/api/failures/{failure}", self._page, "A failure, by the id of its chain.", FailurePage),
            Endpoint("/api/nodes/{node}", self._page, "A node.", NodePage),
            Endpoint("/api/nodes/{node}/workers/{worker}/log", self._log, "The last lines of a worker.", Log),
            Endpoint("/api/plan", self._plan, "The plan in force, and what follows each next event.", PlanPage),
            Endpoint("/api/what-if", self._what_if, "What the planner would do.", PlanPage, Question),
            Endpoint("/api/goodput", self._goodput, "Where the time of all slots went.", Report),
            Endpoint("/api/events", self._events, "What changed: ?after=POSITION&limit=N.", list[JournalLine]),
            Endpoint("/api/access", self._access, "The token's name, and the orders that it allows.", Access),
            Endpoint("/api/orders", self._order, "Give an order, or learn what it would do.", Answer, Wanted),
        )
        self.app: ASGIApp = Starlette(
            routes=[
                *(Route(way.path, way.call, methods=["POST" if way.asked else "GET"]) for way in self.ways),
                Route("/api/openapi.json", self._openapi),
                Route("/healthz", self._health),
                WebSocketRoute("/api/live/cluster", self._live),
                *(WebSocketRoute(f"/api/live/{kinds}/{{{kind}}}", self._live) for kinds, kind in KINDS.items()),
                Mount("/static", StaticFiles(directory=FILES)),
                Route("/api/{path:path}", _nothing, methods=["GET", "POST"]),
                Route("/{path:path}", _index),
            ],
            middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)), Middleware(_Headers)],
            exception_handlers={UnicronError: _refused},
        )

    # --- pages -------------------------------------------------------------------------------------------------------

    async def _page(self, request: Request) -> Response:
        topic = _topic(request.path_params)
        page = self._hub.page(topic)
        return _json(page) if page is not None else _json(Answer(error=_unknown(topic)), 404)

    async def _live(self, socket: WebSocket) -> None:
        """Send a page, and then what changes of it, until either side ends it."""
        if not _same_origin(socket.headers):
            await socket.close()
            return
        await socket.accept()
        topic = _topic(socket.path_params)
        reader = self._hub.subscribe(topic)
        if reader is None:
            await socket.send_text(msgspec.json.encode({"gone": _unknown(topic)}).decode())
            await socket.close()
            return
        deaf = asyncio.create_task(_until_gone(socket))
        try:
            while (frame := await _first(reader.frames.get(), deaf)) is not None:
                await _first(socket.send_text(frame), deaf)
            if not deaf.done():
                await socket.close(TOO_SLOW)
        except (WebSocketDisconnect, RuntimeError):
            pass  # it went in the middle of a frame
        finally:
            deaf.cancel()
            self._hub.unsubscribe(topic, reader)

    async def _failures(self, _: Request) -> Response:
        return _json(self._hub.pages.failures())

    async def _events(self, request: Request) -> Response:
        after, limit = _number(request, "after", 0, 2**63), _number(request, "limit", 200, MOST_EVENTS)
        found = [entry for entry, _, _ in self._hub.picture.events if entry.position > after]
        return _json(found[-limit:] if limit else [])

    async def _goodput(self, _: Request) -> Response:
        return _json(self._hub.pages.report)

    # --- what services know ------------------------------------------------------------------------------------------

    async def _plan(self, _: Request) -> Response:
        return _json(plan_page(await self._ask("plan", self._client.plan), self._hub.now()))

    async def _what_if(self, request: Request) -> Response:
        asked = await _read(request, Question)

        def ask() -> Awaitable[Any]:
            return self._client.what_if(lose=asked.lose, join=asked.join, finish=asked.finish)

        return _json(plan_page(await self._ask(msgspec.json.encode(asked), ask), self._hub.now()))

    async def _curve(self, request: Request) -> Response:
        task = request.path_params["task"]
        curve = await self._ask(("curve", task), lambda: self._client.curve(task))
        return _json(CurvePage(task=curve.task, held=curve.held, points=curve.points))

    async def _stragglers(self, request: Request) -> Response:
        name = request.path_params["task"]
        task = self._hub.picture.tasks.get(name)
        if task is None:
            return _json(Answer(error=_unknown(("task", name))), 404)
        view: StragglerView | None = None
        with contextlib.suppress(BusUnavailableError):  # the page shows what is known without it
            view = await self._ask(("straggler", name), lambda: self._client.straggler(name))
        return _json(straggler_page(task, view, self._hub.now()))

    async def _log(self, request: Request) -> Response:
        node, worker = request.path_params["node"], request.path_params["worker"]
        lines = _number(request, "lines", 50, MOST_LINES)
        found = await self._ask(("log", node, worker, lines), lambda: self._client.log(node, worker, lines))
        return _json(Log(worker=worker, node=node, lines=found))

    async def _ask(self, key: object, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask a service, once for all who want to know the same at about the same time."""
        now = self._hub.now()
        self._asked = {known: each for known, each in self._asked.items() if now - each[0] < ASKED_S}
        if key not in self._asked:
            self._asked[key] = (now, asyncio.ensure_future(ask()))
        answer: T = await asyncio.shield(self._asked[key][1])
        return answer

    # --- orders ------------------------------------------------------------------------------------------------------

    async def _user(self, request: Request) -> str:
        """Return who asks; empty where no token is given.

        Raises:
            PermissionError: the token is nobody's.
        """
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if not scheme:
            return ""
        name = self._tokens.name(token.strip()) if scheme.lower() == "bearer" else ""
        if not name:
            await asyncio.sleep(REFUSED_S)
            raise PermissionError
        return name

    async def _access(self, request: Request) -> Response:
        try:
            name = await self._user(request)
        except PermissionError:
            return _json(Answer(error=WRONG_TOKEN), 401)
        known = [each for each in orders.ORDERS if self._chaos or each != orders.BREAK]
        return _json(
            Access(name=name, orders=known if name else [], faults=orders.faults() if name and self._chaos else [])
        )

    async def _order(self, request: Request) -> Response:
        try:
            name = await self._user(request)
        except PermissionError:
            return _json(Answer(error=WRONG_TOKEN), 401)
        if not name:
            none = "" if self._tokens else "; none was made: give the console a file with UNICRON_CONSOLE_TOKENS"
            return _json(Answer(error=f"orders need a token{none}"), 401)
        wanted = await _read(request, Wanted)
        order = orders.check(wanted, self._hub.picture, chaos=self._chaos)
        client = Client(self._client.bus, by=name)
        text = await (order.give if wanted.sure else order.preview)(client, wanted)
        if wanted.sure:
            log.info("%s ordered: %s %s %s %s", name, wanted.order, wanted.target, wanted.worker, wanted.value)
        return _json(Answer(text=text))

    # --- about itself ------------------------------------------------------------------------------------------------

    async def _openapi(self, _: Request) -> Response:
        return Response(describe(self.ways), media_type="application/json")

    async def _health(self, _: Request) -> Response:
        behind, silent_s = self._hub.behind, self._hub.silent_s
        why = f"{behind} entries of the journal are still to be read" if behind else ""
        why = f"NATS has not answered for {silent_s:.0f} s" if silent_s else why
        # what ails elsewhere is said, and is no reason to start this process anew
        return _json(Answer(error=why, text="; ".join(self._hub.ask())), 503 if why else 200)


WRONG_TOKEN = "this token is nobody's; look into the file that UNICRON_CONSOLE_TOKENS names"  # noqa: S105 it is none


class _Headers:
    """Adds to each answer what keeps a browser from trusting anything but the page's own files."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)


def _topic(params: dict[str, str]) -> tuple[str, str]:
    return next(iter(params.items()), CLUSTER)


def _unknown(topic: tuple[str, str]) -> str:
    kind, name = topic
    more = "; the console remembers the latest 1,000" if kind == "failure" else ""
    return f"there is no {kind} {name!r}{more}"


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _read(request: Request, kind: type[T]) -> T:
    """Return what was sent.

    Raises:
        InvalidInputError: it is too large, or no such thing; names the field.
    """
    data = b""
    async for chunk in request.stream():
        data += chunk
        if len(data) > MOST_BODY:
            raise InvalidInputError(f"more than {MOST_BODY} bytes: nothing that is asked here is so long")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"not a {kind.__name__}: {error}; /api/openapi.json describes it") from error


def _number(request: Request, name: str, usual: int, most: int) -> int:
    text = request.query_params.get(name, str(usual))
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise InvalidInputError(f"{name}={text[:40]!r}: give a whole number")
    return min(int(text), most)


async def _refused(_: Request, error: Exception) -> Response:
    return _json(Answer(error=str(error)), 503 if isinstance(error, BusUnavailableError) else 400)


async def _nothing(request: Request) -> Response:
    return _json(Answer(error=f"nothing is at {request.url.path}; /api/openapi.json describes what there is"), 404)


async def _index(_: Request) -> Response:
    return FileResponse(FILES / "index.html")


def _same_origin(headers: Headers) -> bool:
    """Return whether no other site's script is behind a websocket; a browser says whose it is."""
    origin = headers.get("origin")
    return origin is None or urlsplit(origin).netloc == headers.get("host")


async def _until_gone(socket: WebSocket) -> None:
    """Return when the other side is gone; whatever it says is left alone."""
    try:
        while True:
            await socket.receive_text()
    except (WebSocketDisconnect, RuntimeError, KeyError):
        return


async def _first(job: Any, other: asyncio.Task[None]) -> Any:
    """Return what `job` gives, or None where `other` ends before that."""
    mine = asyncio.ensure_future(job)
    await asyncio.wait({mine, other}, return_when=asyncio.FIRST_COMPLETED)
    if mine.done():
        return mine.result()
    mine.cancel()
    return None
