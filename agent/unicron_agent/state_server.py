"""Hands states of this node to others, and takes copies of what is saved elsewhere: gRPC streams of pieces."""

import asyncio
import contextlib
import io
import logging
import math
import mmap
import struct
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import msgspec
from xxhash import xxh3_128

from unicron.aio import together
from unicron.checkpoints.gate import Gate
from unicron.contracts.states import KEPT, SAVED, Keeper, StateRef, label
from unicron.errors import InvalidInputError, StateTransferError, UnsoundStateError, UntimelyProofError
from unicron.proofs import CallProof
from unicron_agent.fabric import CHALLENGE, Fabric, Strangers, challenged
from unicron_agent.memory import StateMemory
from unicron_agent.traffic import NodeTraffic

log = logging.getLogger(__name__)

FETCH, KEEP = "/unicron.v1.State/Fetch", "/unicron.v1.State/Keep"
PIECE = 2 * 1024 * 1024
TIMEOUT_S = 600.0
HALVES = 2
"""Pieces of a copy that are under way at once: while one is written there, the next is sent."""

RECEIPT = struct.Struct("<d")
"""Says for each piece for how many seconds it was held back, so that the next does not come while others send there."""

ADMITTED, RECEIPTS = ("admitted", "yes"), ("receipts", "yes")
LIMITS = [("grpc.max_receive_message_length", PIECE + 1024), ("grpc.max_send_message_length", PIECE + 1024)]

SERVER_LIMITS = [
    *LIMITS,
    ("grpc.server_handshake_timeout_ms", 5_000),
    ("grpc.max_connection_idle_ms", 10_000),
    ("grpc.http2.bdp_probe", 0),
]
"""Whoever connects and asks for nothing is gone soon; and what is sent but never read takes no growing window.

With the probe 50 strangers who send at once take 130 MB, without it 5.
"""

_ref: msgspec.msgpack.Decoder[StateRef] = msgspec.msgpack.Decoder(StateRef)

AT_ONCE, REFUSAL_S = 8, 0.2
"""Strangers that are told why they are turned away when they can hear it, rather than at once; and when: seconds."""

OTHER = "the proof is of another request than this: ask for what was proven"

Received = Callable[[str, StateRef | None], None]
"""Told of a copy that lies here now; or, without one, that what has this name is being written over."""


def check(ref: StateRef, path: Path) -> None:
    """Raise if the file of a state is not what its checksum says.

    Raises:
        UnsoundStateError: it is not.
    """
    checksum = b""
    with path.open("rb") as file:
        if 0 < ref.size <= path.stat().st_size:
            with mmap.mmap(file.fileno(), ref.size, access=mmap.ACCESS_READ) as content:
                checksum = xxh3_128(content).digest()
    if checksum != ref.checksum:
        raise unsound(ref)


def unsound(ref: StateRef) -> UnsoundStateError:
    """Return the error that a state is not what its checksum says."""
    name, node = ref.location.name, ref.location.node
    return UnsoundStateError(f"state {name!r} of {node}: wrong checksum; this is not what was exported")


class StateServer(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Serves the states of one node.

    Args:
        memory: where they lie.
        node: its name.
        received: told of copies.
        traffic: of the node.
        fabric: what opens it.
    """

    def __init__(
        self, memory: StateMemory, node: str, received: Received, traffic: NodeTraffic, fabric: Fabric
    ) -> None:
        self._memory, self._node, self._received, self._traffic = memory, node, received, traffic
        self._fabric, self._strangers = fabric, Strangers("state server")
        self._address, self._refusing = "", 0
        self._busy: set[str] = set()

    async def serve(self, host: str) -> tuple[grpc.aio.Server, str]:
        """Start the server on a free port of `host`; return it and its host:port."""
        server = grpc.aio.server(options=SERVER_LIMITS)
        server.add_generic_rpc_handlers((self,))
        self._address = f"{host}:{self._fabric.open_port(server, host)}"
        await server.start()
        return server, self._address

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return what answers a call, before anything of it but its metadata is read."""
        method, shown = str(details.method), None
        if method not in {FETCH, KEEP}:
            return None
        if self._fabric.closed:
            try:
                shown = self._fabric.checked(details.invocation_metadata, method, self._address)
            except InvalidInputError as error:
                return grpc.stream_stream_rpc_method_handler(partial(self._refuse, error))
        if method == FETCH:
            return grpc.unary_stream_rpc_method_handler(partial(self._fetch, shown))
        return grpc.stream_stream_rpc_method_handler(partial(self._keep, shown))

    async def _refuse(
        self, problem: InvalidInputError, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        """Turn a stranger away; nothing of what it sends is read, or it would take memory."""
        self._strangers.note(str(context.peer()).rpartition(":")[0], problem)
        if self._refusing < AT_ONCE:
            self._refusing += 1
            try:
                await asyncio.sleep(REFUSAL_S)  # whose first message is not on its way yet would not hear why
            finally:
                self._refusing -= 1
        asked = ((CHALLENGE, self._fabric.challenge()),) if isinstance(problem, UntimelyProofError) else ()
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{self._node} was shown {problem}", asked)

    async def _fetch(
        self, shown: CallProof | None, request: bytes, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        if shown is not None and not shown.is_of(request):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, OTHER)
        try:
            path = self._memory.path(request.decode(errors="replace"))
        except StateTransferError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                yield piece

    async def _keep(
        self, shown: CallProof | None, pieces: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        """Take a copy: first what it is, then its content; whoever wants no receipts gets one answer in the end."""
        first = await anext(pieces, b"")
        if shown is not None and not shown.is_of(first):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, OTHER)
        try:
            ref = self._admitted(first)
        except StateTransferError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        wanted = RECEIPTS in (context.invocation_metadata() or ())
        receipts = _Receipts(context, self._traffic, ref.size) if wanted else None
        if not self._memory.holds(ref.at(self._node, self._address)):  # else somebody may be reading it
            try:
                await context.send_initial_metadata((ADMITTED, RECEIPTS) if wanted else (ADMITTED,))
                await self._take(ref, pieces, receipts)
            except StateTransferError as error:
                await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
            except OSError as error:
                async for piece in pieces:  # whoever is still sending would not hear why
                    await _acknowledge(receipts, piece)
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._memory.folder}: {error.strerror}")
        if receipts is None:
            await context.write(b"")

    def _admitted(self, first: bytes) -> StateRef:
        try:
            ref = _ref.decode(first)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StateTransferError(f"a copy that does not say what it is: {error}") from error
        name = self._memory.checked(ref.location.name)
        if not name.endswith((SAVED, KEPT)) or not name.startswith(f"{ref.location.worker}.") or ref.size <= 0:
            raise StateTransferError(f"{name} of {ref.size} bytes is nothing that a worker has saved or left behind")
        if name in self._busy:
            raise StateTransferError(f"{name} is being written already")
        self._memory.check_room(name, ref.size)
        return ref

    async def _take(self, ref: StateRef, pieces: AsyncIterator[bytes], receipts: "_Receipts | None") -> None:
        """Take the content of a copy; of one that is not whole in the end nothing stays."""
        name, whole = ref.location.name, False
        self._busy.add(name)
        try:
            await self._write(ref, pieces, receipts)
            whole = True
        finally:
            self._busy.discard(name)
            if not whole:
                self._memory.remove(name)

    async def _write(self, ref: StateRef, pieces: AsyncIterator[bytes], receipts: "_Receipts | None") -> None:
        """Write a copy over an older one, and label it in the end."""
        name, digest, size = ref.location.name, xxh3_128(), 0
        path: Path = self._memory.folder / name
        self._received(name, None)
        if path.exists() and path.stat().st_nlink > 1:
            path.unlink()  # somebody reads it under another name
        with path.open("r+b" if path.exists() else "w+b") as file:
            file.truncate(min(ref.size, path.stat().st_size))  # without its label it is no state from here on
            async for piece in pieces:
                digest.update(piece)
                size += file.write(piece)
                if size > ref.size:
                    break
                await _acknowledge(receipts, piece)
            if (size, digest.digest()) != (ref.size, ref.checksum):
                raise StateTransferError(f"{name}: {size} bytes of {ref.size} came, or others than were sent")
            here = ref.at(self._node, self._address)
            file.write(label(here))
        self._received(name, here)


class _Receipts:
    """Says of each piece of a copy that it arrived, as soon as the next may come."""

    def __init__(self, context: grpc.aio.ServicerContext, traffic: NodeTraffic, size: int) -> None:
        self._context, self._traffic = context, traffic
        self._gate = Gate(traffic.line, size, PIECE, asyncio.get_running_loop().time())

    async def give(self, size: int) -> None:
        """Acknowledge a piece."""
        self._gate.passes(size)
        held_s = await self._traffic.until_idle(self._gate)
        await self._context.write(RECEIPT.pack(held_s))


async def _acknowledge(receipts: _Receipts | None, piece: bytes) -> None:
    if receipts is not None:
        await receipts.give(len(piece))


async def send_copy(
    memory: StateMemory, ref: StateRef, keeper: Keeper, traffic: NodeTraffic, fabric: Fabric, *, paced: bool
) -> None:
    """Send a copy of a state to another node, one that was saved or left behind.

    Args:
        memory: where it lies.
        ref: what it is.
        keeper: the other node.
        traffic: of this node.
        fabric: what opens the other one.
        paced: send it while training sends nothing, rather than now.

    Raises:
        UnsoundStateError: it is not what its checksum says.
        StateTransferError: it did not get there, whole.
    """
    path = memory.path(ref.location.name)
    try:
        with path.open("rb") as file:
            async with fabric.channel(keeper.address, keeper.node, LIMITS) as channel:
                try:
                    await _send(channel, ref, keeper, file, traffic, fabric, paced=paced)
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.DATA_LOSS:
                        await asyncio.to_thread(check, ref, path)
                    raise StateTransferError(error.details()) from error
    except (StateTransferError, OSError) as error:
        if isinstance(error, UnsoundStateError):
            raise
        raise StateTransferError(f"no copy of {ref.location.name} for {keeper.address}: {error}") from error


async def _send(
    channel: grpc.aio.Channel,
    ref: StateRef,
    keeper: Keeper,
    file: io.BufferedReader,
    traffic: NodeTraffic,
    fabric: Fabric,
    *,
    paced: bool,
    challenge: bytes = b"",
) -> None:
    """Send a copy; once more, where the other node wants another proof: one of the two clocks is off."""
    announced = msgspec.msgpack.encode(ref)
    header = fabric.header(KEEP, keeper.address, announced, challenge)
    call = channel.stream_stream(KEEP)(timeout=TIMEOUT_S, metadata=(*header, RECEIPTS) if paced else header)
    try:
        await _Sending(call, announced, file, ref.size, traffic, paced=paced).run()
    except grpc.aio.AioRpcError as error:
        if challenge or not (challenge := challenged(error)):
            raise
        await _send(channel, ref, keeper, file, traffic, fabric, paced=paced, challenge=challenge)


class _Sending:
    """A copy on its way, in pieces; for each there is a receipt where they are paced."""

    def __init__(
        self, call: Any, announced: bytes, file: io.BufferedReader, size: int, traffic: NodeTraffic, *, paced: bool
    ) -> None:
        self._call, self._announced = call, announced
        self._file, self._size, self._traffic, self._paced = file, size, traffic, paced
        self._room = asyncio.Semaphore(HALVES)
        self._under_way: deque[tuple[int, float]] = deque()
        self._arrived_at = 0.0

    async def run(self) -> None:
        """Send it; return when all of it is there.

        Raises:
            grpc.aio.AioRpcError: it never will be.
        """
        try:
            await together(self._hear(), self._send())
        finally:
            self._traffic.line.on_its_way -= sum(size for size, _ in self._under_way)

    async def _hear(self) -> None:
        async for receipt in self._call:
            if receipt:
                held_s = RECEIPT.unpack(receipt)[0] if len(receipt) == RECEIPT.size else math.nan
                if not (self._under_way and 0.0 <= held_s <= TIMEOUT_S):
                    raise StateTransferError("it was answered with something that is no receipt")
                self._arrived(held_s)

    async def _send(self) -> None:
        with contextlib.suppress(asyncio.InvalidStateError):  # the call is over, and says why
            await self._send_all()

    async def _send_all(self) -> None:
        """Send what it is, and once that is admitted its content: of a call that is over no reason can be heard."""
        await self._call.write(self._announced)
        told = tuple(await self._call.initial_metadata())
        left = self._size if ADMITTED in told else 0
        gate = Gate(self._traffic.line, left, PIECE, asyncio.get_running_loop().time())
        while left:
            await self._room.acquire()
            size = await self._traffic.piece(gate) if self._paced else min(left, PIECE)
            self._under_way.append((size, asyncio.get_running_loop().time()))
            self._traffic.line.on_its_way += size
            await self._call.write(self._file.read(size))
            left -= size
            if RECEIPTS not in told:  # it gives none, or none is wanted
                self._forget()
        await self._call.done_writing()

    def _arrived(self, held_s: float) -> None:
        now = asyncio.get_running_loop().time()
        size, sent_at = self._forget()
        self._traffic.line.arrived(size, now - max(sent_at, self._arrived_at) - held_s)
        log.debug("a piece of %d bytes was on its way from %.6f to %.6f", size, sent_at, now - held_s)
        self._arrived_at = now

    def _forget(self) -> tuple[int, float]:
        """Have one piece less under way, and room for another."""
        size, sent_at = self._under_way.popleft()
        self._traffic.line.on_its_way -= size
        self._room.release()
        return size, sent_at
