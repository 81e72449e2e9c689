"""Hands snapshots of this node to others, and takes copies of what is saved elsewhere: gRPC streams of pieces."""

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import msgspec
from xxhash import xxh3_128

from unicron.addresses import Address
from unicron.contracts.states import KEPT, SAVED, StateRef
from unicron.errors import InvalidInputError, StateTransferError, UntimelyProofError, explain_lack
from unicron.fabric_proofs import CallProof
from unicron.snapshots.gate import Gate
from unicron.snapshots.memory import SnapshotMemory
from unicron_agent.calls import grpc
from unicron_agent.fabric import CHALLENGE, Fabric, RefusalLog
from unicron_agent.traffic import NodeTraffic

FETCH, KEEP = "/unicron.v1.State/Fetch", "/unicron.v1.State/Keep"
PIECE = 2 * 1024 * 1024
TIMEOUT_S = 600.0
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
"""A client that connects and asks for nothing is closed soon; data that is never read takes no growing window.

With the probe 50 strangers who send at once take 130 MB, without it 5.
"""

_ref: msgspec.msgpack.Decoder[StateRef] = msgspec.msgpack.Decoder(StateRef)

AT_ONCE, REFUSAL_S = 8, 0.2
"""Strangers that learn why they are turned away as soon as they can read it, rather than at once; and when: seconds."""

OTHER = "the proof is of another request than this: ask for what was proven"

OnReceived = Callable[[str, StateRef | None], None]
"""Called with the name of a copy that lies here now; without a state, it is being written over."""


class SnapshotServer(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Serves the snapshots of one node.

    Args:
        memory: where they lie.
        node: its name.
        received: called for each copy.
        traffic: of the node.
        fabric: what opens it.
    """

    def __init__(
        self, memory: SnapshotMemory, node: str, on_received: OnReceived, traffic: NodeTraffic, fabric: Fabric
    ) -> None:
        self._memory, self._node, self._on_received, self._traffic = memory, node, on_received, traffic
        self._fabric, self._strangers = fabric, RefusalLog("state server")
        self._address, self._refusing = "", 0
        self._busy: set[str] = set()

    async def serve(self, host: str) -> tuple[grpc.aio.Server, str]:
        """Start the server on a free port of `host`; return it and its host:port."""
        server = grpc.aio.server(options=SERVER_LIMITS)
        server.add_generic_rpc_handlers((self,))
        self._address = str(Address(host, self._fabric.open_port(server, host)))
        await server.start()
        return server, self._address

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return what answers a call, before anything of it but its metadata is read."""
        method, shown = str(details.method), None
        if method not in {FETCH, KEEP}:
            return None
        if self._fabric.requires_proof:
            try:
                shown = self._fabric.verify_call(details.invocation_metadata, method, self._address)
            except InvalidInputError as error:
                return grpc.stream_stream_rpc_method_handler(partial(self._refuse, error))
        if method == FETCH:
            return grpc.unary_stream_rpc_method_handler(partial(self._send_snapshot, shown))
        return grpc.stream_stream_rpc_method_handler(partial(self._receive_copy, shown))

    async def _refuse(
        self, problem: InvalidInputError, _: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        """Turn a stranger away; nothing of what it sends is read, or it would take memory."""
        self._strangers.record(str(context.peer()).rpartition(":")[0], problem)
        if self._refusing < AT_ONCE:
            self._refusing += 1
            try:
                await asyncio.sleep(REFUSAL_S)  # a client that has not sent its first message yet would not learn why
            finally:
                self._refusing -= 1
        asked = ((CHALLENGE, self._fabric.issue_challenge()),) if isinstance(problem, UntimelyProofError) else ()
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{self._node} was shown {problem}", asked)

    async def _send_snapshot(
        self, shown: CallProof | None, request: bytes, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[bytes]:
        if shown is not None and not shown.matches(request):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, OTHER)
        try:
            path = self._memory.path(request.decode(errors="replace"))
        except StateTransferError as error:
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        with path.open("rb") as file:
            while piece := file.read(PIECE):
                yield piece

    async def _receive_copy(
        self, shown: CallProof | None, pieces: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        """Take a copy: first what it is, then its content; one that wants no receipts gets one answer in the end."""
        first = await anext(pieces, b"")
        if shown is not None and not shown.matches(first):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, OTHER)
        try:
            ref = self._check_announced(first)
        except StateTransferError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        wanted = RECEIPTS in (context.invocation_metadata() or ())
        receipts = _Receipts(context, self._traffic, ref.size) if wanted else None
        if not self._memory.holds(ref.at(self._node, self._address)):  # else somebody may be reading it
            try:
                await context.send_initial_metadata((ADMITTED, RECEIPTS) if wanted else (ADMITTED,))
                await self._write_or_remove(ref, pieces, receipts)
            except StateTransferError as error:
                await context.abort(grpc.StatusCode.DATA_LOSS, str(error))
            except OSError as error:
                async for piece in pieces:  # a client that is still sending would not learn why
                    await _acknowledge(receipts, piece)
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{self._memory.folder}: {explain_lack(error)}")
        if receipts is None:
            await context.write(b"")

    def _check_announced(self, first: bytes) -> StateRef:
        try:
            ref = _ref.decode(first)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise StateTransferError(f"a copy that does not say what it is: {error}") from error
        name = self._memory.check_name(ref.location.name)
        if not name.endswith((SAVED, KEPT)) or not name.startswith(f"{ref.location.worker}.") or ref.size <= 0:
            raise StateTransferError(f"{name} of {ref.size} bytes is nothing that a worker has saved or left behind")
        if name in self._busy:
            raise StateTransferError(f"{name} is being written already")
        self._memory.check_room(name, ref.size)
        return ref

    async def _write_or_remove(self, ref: StateRef, pieces: AsyncIterator[bytes], receipts: "_Receipts | None") -> None:
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
        self._on_received(name, None)
        with path.open("r+b" if self._memory.begin_overwrite(name, ref.size) else "w+b") as file:
            async for piece in pieces:
                digest.update(piece)
                size += file.write(piece)
                if size > ref.size:
                    break
                await _acknowledge(receipts, piece)
            if (size, digest.digest()) != (ref.size, ref.checksum):
                raise StateTransferError(f"{name}: {size} bytes of {ref.size} came, or others than were sent")
        here = ref.at(self._node, self._address)
        self._memory.add_label(here)
        self._on_received(name, here)


class _Receipts:
    """Says of each piece of a copy that it arrived, as soon as the next may come."""

    def __init__(self, context: grpc.aio.ServicerContext, traffic: NodeTraffic, size: int) -> None:
        self._context, self._traffic = context, traffic
        self._gate = Gate(traffic.line, size, PIECE, asyncio.get_running_loop().time())

    async def acknowledge(self, size: int) -> None:
        """Acknowledge a piece."""
        self._gate.passes(size)
        held_s = await self._traffic.wait_until_idle(self._gate)
        await self._context.write(RECEIPT.pack(held_s))


async def _acknowledge(receipts: _Receipts | None, piece: bytes) -> None:
    if receipts is not None:
        await receipts.acknowledge(len(piece))
