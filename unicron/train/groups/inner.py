"""The process groups inside of a replica: what the model's tensor, pipeline and shard parallelism runs on.

torch, and whatever builds on it, keeps groups in many places (meshes, sharded parameters, pipeline stages). So the
objects that it holds stay (`unicron.train.groups.switched`), and what is inside of them is formed anew when a rank of
the replica has been replaced.

Before a worker is in a membership its groups are ghosts: a collective returns at once with whatever is in its
tensors. So are groups that broke. A forward or backward pass runs to its end on them, no exception has to find its
way through torch's hooks, and all of torch's own books are in order at its end; what it computed is dropped.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroup, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from unicron.contracts.tasks import ParallelLayout
from unicron.errors import GroupBrokenError
from unicron.train.groups import nccl
from unicron.train.groups.connections import Connections, backend
from unicron.train.groups.switched import GLOBAL, NAME, TRANSFERS, Switched, Work
from unicron.train.worker.traffic import Traffic

DIMENSIONS = ("pipeline", "shard", "tensor")
"""Of a replica's mesh; places count the last one fastest."""


class InnerGroups:
    """All groups of this process's replica. torch's WORLD is the replica, a rank in it is a place.

    Attributes:
        device: of the model.
        place: of this process.
        mesh: of the replica.
        broken: some collective since they were last formed did not do what it should.
        muted: collectives return at once, for as long as this rank is not where the others are.
        strict: the last iteration is done. A collective that fails raises, as nobody would drop what comes of it, and
            no newer membership interrupts one.
    """

    def __init__(
        self, layout: ParallelLayout, place: int, device: torch.device, traffic: Traffic | None = None
    ) -> None:
        self.device, self._traffic = device, traffic or Traffic()
        self.broken = self.muted = self.strict = False
        self.place, self._size = place, layout.replica_workers
        self.on_streams = nccl.on_streams(device)
        self._connections = Connections()
        self._host_groups: dict[tuple[int, ...], Any] = {}
        self._groups: list[Switched] = []
        self._stores: list[Store] = []  # torch does not keep them
        dist.Backend.register_backend(NAME, self._create, extended_api=True, devices=["cpu", "cuda"])
        dist.init_process_group(NAME, rank=place, world_size=self._size, store=HashStore())
        if self.on_streams:
            nccl.prepare()
            dist.batch_isend_irecv = c10d.batch_isend_irecv = partial(_begin_batch, c10d.batch_isend_irecv)
        shape = (layout.pipeline, layout.shard, layout.tensor)
        self.mesh: DeviceMesh = init_device_mesh(device.type, shape, mesh_dim_names=DIMENSIONS)

    def _create(self, options: Any, _: Any) -> ProcessGroup:
        rank, size = options.group_rank, options.group_size
        group = Switched(self, tuple(options.global_ranks_in_group) or tuple(range(size)), rank, size)
        if size == 1:  # nobody can break it
            group.fill(_container(self.device, self._alone(), rank, size))
        elif self.strict and self.epoch >= 0:  # these ranks meet no other time
            with self._connections.extending():
                twin = next((each.inside for each in self._groups if each.places == group.places), None)
                group.fill(twin or self._connect(group, self._stores[0]))
        self._groups.append(group)
        return group

    def _alone(self) -> Any:
        where = HashStore(), 0, 1
        return nccl.Communicator(*where, self.device).group if self.on_streams else backend(*where)

    def _connect(self, group: Switched, store: Store) -> ProcessGroup:
        where, seat = PrefixStore("-".join(map(str, group.places)), store), (group.rank(), group.size())
        made = self._host_groups[group.places] = self._connections.connect(where, *seat)
        if self.on_streams:
            made = self._connections.connect_streams(self.device, PrefixStore("streams", where), *seat)
        return _container(self.device, made, *seat)

    def contains(self, inside: ProcessGroup) -> bool:
        """Return whether a group has this inside."""
        return any(each.inside is inside for each in self._groups)

    @property
    def world(self) -> "Switched":
        """The group of the whole replica."""
        return self._groups[0]

    @property
    def epoch(self) -> int:
        """Of the membership that they were last formed in, -1 where they are ghosts, broken or interrupted."""
        whole = not self.broken and self._connections.cut_at is None
        return self._connections.epoch if whole else -1

    @property
    def is_cut(self) -> bool:
        """Whether they were interrupted, or broke by themselves."""
        return self._connections.is_cut

    def form(self, epoch: int, meet: Callable[[], Store]) -> None:
        """Form all groups anew, with the other ranks of the replica.

        Args:
            epoch: of the membership.
            meet: returns a store that the ranks of this replica share, and nobody else.

        Raises:
            GroupBrokenError: interrupted by `interrupt`, or a peer was lost meanwhile.
        """
        self._empty_all()
        self.broken = False
        with self._connections.forming(epoch):
            store = meet()
            self._stores = [store]
            store.set(f"here-{self.place}", "")
            store.wait([f"here-{other}" for other in range(self._size)])
            made: dict[tuple[int, ...], ProcessGroup] = {}  # groups of the same ranks share what is inside of them
            with self._connections.freeing_older():
                for group in (each for each in self._groups if each.size() > 1):
                    if group.places not in made:
                        made[group.places] = self._connect(group, store)
                    group.fill(made[group.places])
        # a list of operations that an interrupted batch left behind would swallow later collectives
        c10d._world.pg_coalesce_state.clear()  # noqa: SLF001 torch has no finally there

    def interrupt(self, epoch: int) -> bool:
        """Break groups formed before `epoch`, which ends waits in them; return whether any was. From any thread."""
        return not self.strict and self.cut(epoch)

    def cut(self, epoch: int) -> bool:
        """Break groups formed before `epoch`, also strict ones; return whether any was there."""
        return self._connections.cut_below(epoch)

    def begin(self, group: Switched, name: str, arguments: Sequence[Any], named: dict[str, Any]) -> Work:
        """Begin a collective.

        Raises:
            GroupBrokenError: it can't be done, and the failure is reported.
        """
        work = self._begin_inside(group, name, arguments, named)
        if not self._needs_no_confirm(
            group, name
        ):  # now: ranks may wait for what they begin in different orders, or not at all
            work.wait()
        return work

    def _begin_inside(self, group: Switched, name: str, arguments: Sequence[Any], named: dict[str, Any]) -> Work:
        if self.strict and group.ghost:
            raise GroupBrokenError("a rank of this replica is gone, and with it its part of the model")
        if group.ghost and self._connections.epoch < 0:  # while a model is built; what is gathered is one's own
            getattr(group.inside, name)(*arguments, **named)
        if group.ghost or (self.muted and group.size() > 1):
            return Work()
        inside = group.inside
        self._traffic.begin()
        try:
            work = getattr(inside, name)(*arguments, **named)
        except RuntimeError as error:
            self._traffic.end()
            if self.on_streams and not isinstance(error, dist.DistError):
                raise  # of the GPU, or of what the script has given
            self._break(error)
            return Work()
        finish: Callable[[], None] = partial(self._connections.finish, work, inside)
        if work is None:
            finish = _no_wait
        elif self.on_streams:
            finish = partial(nccl.wait_on_stream, work)
        elif name in TRANSFERS:
            finish = partial(self._connections.finish_transfer, work, inside)
        return Work(partial(self._finish, finish, group, name))

    def _needs_no_confirm(self, group: Switched, name: str) -> bool:
        """Return whether the result of a collective is right without all ranks having confirmed its end."""
        return not (self.on_streams and self.strict and group.size() > 1 and name in GLOBAL)

    def _finish(self, finish: Callable[[], None], group: Switched, name: str) -> None:
        try:
            finish()
        except GroupBrokenError as error:
            self._break(error)
        finally:
            self._traffic.end()
        if not self._needs_no_confirm(group, name):
            self.confirm(group)

    def _break(self, error: RuntimeError) -> None:
        """Cut the connections, so that peers notice, and replace the groups by ghosts."""
        self.broken = True
        self._connections.cut_below(self._connections.epoch + 1)
        self._empty_all()
        if self.strict:
            raise GroupBrokenError(str(error)) from error

    def _empty_all(self) -> None:
        for group in self._groups:
            if group.size() > 1:
                group.empty()

    def gather(self, numbers: Sequence[float]) -> list[tuple[float, ...]]:
        """Return the numbers of every rank of the replica, by place; they go over gloo, and no GPU takes part.

        Raises:
            GroupBrokenError: the replica's groups are not formed, or broke.
        """
        # one more than given: for an empty tensor gloo waits for nobody, and to have waited is what this is for
        own = torch.tensor([*numbers, 0.0], dtype=torch.float64)
        gathered = [torch.empty_like(own) for _ in range(self._size)]
        self._run_or_break(
            lambda: self._run_on_processors(self.world, lambda peers: peers.allgather([gathered], [own]))
        )
        return [tuple(row.tolist()[:-1]) for row in (gathered if self._size > 1 else [own])]

    def synchronize(self) -> None:
        """Wait until the GPU has finished all that was enqueued.

        Raises:
            GroupBrokenError: groups broke, so that what was computed may be noise.
        """
        if self.on_streams:
            self._run_or_break(self._connections.synchronize, GroupBrokenError)  # any other error is the GPU's own

    def confirm(self, group: Switched) -> None:
        """Wait until all ranks of a group have seen their enqueued collectives end, so that the results are right.

        Raises:
            GroupBrokenError: it did not, on some rank.
        """
        self._barrier(group)  # a kernel waits for ever for a rank that is gone; this does not
        self.synchronize()
        self._barrier(group)

    def _barrier(self, group: Switched) -> None:
        self._run_or_break(lambda: self._run_on_processors(group, lambda peers: peers.allreduce([torch.zeros(1)])))

    def _run_on_processors(self, group: Switched, begin: Callable[[Any], Any]) -> None:
        if group.size() > 1:
            peers = self._host_groups[group.places]
            self._connections.finish(begin(peers), peers)

    def _run_or_break(self, what: Callable[[], None], broken: type[RuntimeError] = RuntimeError) -> None:
        """Run something that needs other ranks; it raises `broken` where one of them is lost.

        Raises:
            GroupBrokenError: the groups are not formed, or broke.
        """
        if self.epoch >= 0:
            try:
                what()
            except broken as error:
                self._break(error)
        if self.epoch < 0:
            raise GroupBrokenError("a rank of this replica is gone")


def _begin_batch(otherwise: Callable[..., Any], operations: Sequence[dist.P2POp]) -> Any:
    """Begin sends and receives as one operation, as NCCL needs; torch does so for groups of its own class only."""
    group = operations[0].group or dist.group.WORLD
    if not isinstance(group, Switched) or group.ghost or group.groups.muted:
        return otherwise(operations)
    with c10d._coalescing_manager(group, group.groups.device, async_ops=True) as together:  # noqa: SLF001
        for each in operations:
            peer = {"group_dst" if each.op is dist.isend else "group_src": each.group_peer}
            each.op(each.tensor, group=group, tag=each.tag, **peer)
    return together.works


def _no_wait() -> None:
    """Wait for a collective whose end torch has waited for."""


def _container(device: torch.device, inside: Any, rank: int, size: int) -> ProcessGroup:
    kind = ProcessGroup.BackendType.NCCL if nccl.on_streams(device) else ProcessGroup.BackendType.GLOO
    group = ProcessGroup(HashStore(), rank, size)
    group._set_default_backend(kind)  # noqa: SLF001 torch's own way, see torch.distributed.distributed_c10d
    group._register_backend(device, kind, inside)  # noqa: SLF001
    return group
