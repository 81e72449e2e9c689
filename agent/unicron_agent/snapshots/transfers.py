"""Carries out what the core wants done with snapshots: fetch, copy, write to storage, remove."""

import asyncio
import logging
from collections.abc import Callable, Coroutine

from unicron.contracts.states import Keeper, StateRef
from unicron.contracts.worker import StateFetched
from unicron.errors import StateTransferError, UnsoundStateError
from unicron.snapshots.memory import SnapshotMemory
from unicron_agent.calls import grpc
from unicron_agent.effects import AbandonCopies, Effect, ObtainState, RemoveState, SendCopy, StorePart, UseStorage
from unicron_agent.fabric import Fabric
from unicron_agent.snapshots.sending import send_copy
from unicron_agent.snapshots.server import SnapshotServer
from unicron_agent.snapshots.sources import source_of
from unicron_agent.snapshots.storage import Job, run_storage_job
from unicron_agent.stimuli import CopyReceived, CopySent, StateUnsound, Stimulus, StorageUsed
from unicron_agent.traffic import NodeTraffic
from unicron_agent.workers.supervisor import Supervisor

log = logging.getLogger(__name__)

STORING_S = 0.2
"""How often an order to write to storage looks whether what is being written of the same worker is done."""

Handle = Callable[[Stimulus], None]
Answer = Callable[[str, StateFetched], None]


class Transfers:
    """The snapshots of a node that are on their way.

    Args:
        node: its name.
        memory: of the node.
        traffic: of its workers.
        fabric: what opens other nodes, and this one to them.
        supervisor: starts the processes that use the storage.
        handle: is called with what came of it.
        answer: is called with a worker and the snapshot that it asked for.

    Attributes:
        on_fetched: is called with the seconds that fetching a snapshot took.
    """

    def __init__(
        self,
        node: str,
        memory: SnapshotMemory,
        traffic: NodeTraffic,
        fabric: Fabric,
        supervisor: Supervisor,
        handle: Handle,
        answer: Answer,
    ) -> None:
        self._node, self._memory, self._traffic, self._fabric = node, memory, traffic, fabric
        self._supervisor, self._handle, self._answer = supervisor, handle, answer
        self._jobs: set[asyncio.Task[None]] = set()
        self._sending: dict[tuple[StateRef, str], asyncio.Task[None]] = {}
        self._storing: set[str] = set()
        self.on_fetched: Callable[[float], None] = lambda _: None

    async def serve(self, host: str) -> tuple[grpc.aio.Server, str]:
        """Hand out what lies here and take copies, on a free port of `host`; return the server and its host:port."""
        server = SnapshotServer(self._memory, self._node, self._received, self._traffic, self._fabric)
        return await server.serve(host)

    def carry_out(self, effect: Effect) -> None:
        """Begin what an effect on snapshots says."""
        match effect:
            case ObtainState(worker, ref):
                self._spawn(self._obtain(worker, ref))
            case SendCopy(ref, keeper, paced):
                self._sending[ref, keeper.node] = self._spawn(self._send(ref, keeper, paced=paced))
            case AbandonCopies(worker, nodes):
                for ref, node in list(self._sending):
                    if ref.location.worker == worker and node in nodes:
                        self._sending.pop((ref, node)).cancel()
            case UseStorage(job):
                self._spawn(self._use_storage(job))
            case RemoveState(name):
                self._memory.remove(name)

    def _spawn(self, job: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        return task

    def _received(self, name: str, ref: StateRef | None) -> None:
        self._handle(CopyReceived(name, ref))

    async def _obtain(self, worker: str, ref: StateRef) -> None:
        source, now = source_of(ref, self._node, self._memory, self._fabric), asyncio.get_running_loop().time
        began = now()
        try:
            path = await source.obtain(ref, self._memory.fetched_path(worker, ref.location.name))
            self.on_fetched(now() - began)
            answer = StateFetched(name=ref.location.name, path=str(path), own=True)
        except StateTransferError as error:
            if isinstance(error, UnsoundStateError):
                self._handle(StateUnsound(ref, str(error)))
            log.warning("worker %s gets no state: %s", worker, error)
            answer = StateFetched(name=ref.location.name, error=str(error))
        self._answer(worker, answer)

    async def _send(self, ref: StateRef, keeper: Keeper, *, paced: bool) -> None:
        problem, unsound = "", False
        try:
            await send_copy(self._memory, ref, keeper, self._traffic, self._fabric, paced=paced)
        except StateTransferError as error:
            log.warning("%s", error)
            problem, unsound = str(error), isinstance(error, UnsoundStateError)
        self._sending.pop((ref, keeper.node), None)
        self._handle(CopySent(ref, keeper.node, problem, unsound))

    async def _use_storage(self, job: Job) -> None:
        """Write to storage or look there; while one part of a worker is being written, no other is begun."""
        worker = job.ref.location.worker if isinstance(job, StorePart) else ""
        while worker in self._storing:
            if not (isinstance(job, StorePart) and job.ordered):
                return
            await asyncio.sleep(STORING_S)
        self._storing |= {worker} if worker else set()
        try:
            self._handle(StorageUsed(await run_storage_job(job, self._node, self._memory, self._supervisor)))
        finally:
            self._storing.discard(worker)
