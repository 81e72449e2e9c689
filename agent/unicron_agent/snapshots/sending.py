"""Sends copies of this node's snapshots to other nodes, in pieces, while training sends nothing."""

import asyncio
import contextlib
import io
import logging
import math
from collections import deque
from typing import Any

import msgspec

from unicron.aio import gather_or_cancel
from unicron.contracts.states import Keeper, StateRef
from unicron.errors import StateTransferError, UnsoundStateError
from unicron.snapshots.gate import Gate
from unicron.snapshots.memory import SnapshotMemory, verify
from unicron_agent.calls import grpc
from unicron_agent.fabric import Fabric, challenge_in
from unicron_agent.snapshots.server import ADMITTED, KEEP, LIMITS, PIECE, RECEIPT, RECEIPTS, TIMEOUT_S
from unicron_agent.traffic import NodeTraffic

log = logging.getLogger(__name__)

HALVES = 2
"""Pieces of a copy that are under way at once: while one is written there, the next is sent."""


async def send_copy(
    memory: SnapshotMemory, ref: StateRef, keeper: Keeper, traffic: NodeTraffic, fabric: Fabric, *, paced: bool
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
                        await asyncio.to_thread(verify, ref, path)
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
    header = fabric.proof_metadata(KEEP, keeper.address, announced, challenge)
    call = channel.stream_stream(KEEP)(timeout=TIMEOUT_S, metadata=(*header, RECEIPTS) if paced else header)
    try:
        await _Sending(call, announced, file, ref.size, traffic, paced=paced).run()
    except grpc.aio.AioRpcError as error:
        if challenge or not (challenge := challenge_in(error)):
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
            await gather_or_cancel(self._read_receipts(), self._send())
        finally:
            self._traffic.line.on_its_way -= sum(size for size, _ in self._under_way)

    async def _read_receipts(self) -> None:
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
        """Send what it is, and once that is admitted its content: a call that is over gives no reason."""
        await self._call.write(self._announced)
        answer = tuple(await self._call.initial_metadata())
        left = self._size if ADMITTED in answer else 0
        gate = Gate(self._traffic.line, left, PIECE, asyncio.get_running_loop().time())
        while left:
            await self._room.acquire()
            size = await self._traffic.next_piece_size(gate) if self._paced else min(left, PIECE)
            self._under_way.append((size, asyncio.get_running_loop().time()))
            self._traffic.line.on_its_way += size
            await self._call.write(self._file.read(size))
            left -= size
            if RECEIPTS not in answer:  # it gives none, or none is wanted
                self._end_piece()
        await self._call.done_writing()

    def _arrived(self, held_s: float) -> None:
        now = asyncio.get_running_loop().time()
        size, sent_at = self._end_piece()
        self._traffic.line.arrived(size, now - max(sent_at, self._arrived_at) - held_s)
        log.debug("a piece of %d bytes was on its way from %.6f to %.6f", size, sent_at, now - held_s)
        self._arrived_at = now

    def _end_piece(self) -> tuple[int, float]:
        """Have one piece less under way, and room for another."""
        size, sent_at = self._under_way.popleft()
        self._traffic.line.on_its_way -= size
        self._room.release()
        return size, sent_at
