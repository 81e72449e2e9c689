"""Groups that are interrupted, on a backend that behaves as NCCL did on GPUs: nobody hangs or errs."""

import textwrap

import pytest
from helpers import likenccl
from helpers.ranks import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not likenccl.can_be_built(), reason=likenccl.MISSING)]

BEGIN = """
    import asyncio, faulthandler, json, os, random, threading, time
    from types import SimpleNamespace
    import torch
    import torch.distributed as dist
    from unicron.errors import GroupBrokenError
    from unicron.train.groups import connections, nccl
    from unicron.train.groups.group import Group
    from unicron.train.groups.inner import InnerGroups
    from unicron.train.groups.rendezvous import Rendezvous
    from unicron.train.worker.replica import Replica

    faulthandler.dump_traceback_later(20, exit=True)
    rank, size, cpu, told = int(sys.argv[2]), int(sys.argv[3]), torch.device("cpu"), []

    def tried(what):
        try:
            told.append(what())
        except GroupBrokenError:
            told.append("broken")

    def numbers():
        return torch.full((100_000,), rank + 1.0)

    def formed(epoch, **fields):
        group.form(membership("manners", epoch, size, **fields))

    def summed():
        mine = numbers()
        group.finish(group.begin_all_reduce(mine))
        group.confirm()
        return mine.unique().tolist()

    def inner_groups(**degrees):
        layout = ParallelLayout(**degrees)
        replica, place = divmod(rank, layout.replica_workers)
        inner = InnerGroups(layout, place, cpu)
        return inner, lambda epoch: inner.form(epoch, lambda: Rendezvous(membership(f"inner-{replica}", epoch, size)))

    def summed_within(group=None):
        mine = numbers()
        dist.all_reduce(mine, group=group)
        return mine.unique().tolist()

    marks = Rendezvous(membership("marks", 0, size))
    left = Rendezvous(membership("marks", 0, size))  # what is set behind a wait on one connection is set after it

    def leaves_with(interrupt):
        # while it waits for the last rank, which comes after that; all have read what they summed before
        def leave():
            interrupt()
            left.set("left", "")
        marks.set(f"begins-{rank}", "")
        if rank == 1:
            marks.wait([f"begins-{other}" for other in range(size)])
            threading.Timer(0.2, leave).start()
        elif rank == 2:
            marks.wait(["left"])

    def ends():
        print(json.dumps(told), flush=True)
        marks.set(f"ends-{rank}", "")
        marks.wait([f"ends-{other}" for other in range(size)])  # who ends takes its connections along
        os._exit(0)
"""


async def ranks(tmp_path, script, count):
    return await run_ranks(tmp_path, textwrap.dedent(BEGIN) + textwrap.dedent(script), count, **likenccl.env())


RIGHT = """
    from torch._C._distributed_c10d import HashStore, ProcessGroup

    dist.init_process_group("gloo", store=Rendezvous(membership("plain", 0, size)), rank=rank, world_size=size)
    like = ProcessGroup(HashStore(), rank, size)
    like._set_default_backend(ProcessGroup.BackendType.NCCL)
    made = nccl.Communicator(Rendezvous(membership("like", 0, size)), rank, size, cpu)
    like._register_backend(cpu, ProcessGroup.BackendType.NCCL, made.group)
    c10d = dist.distributed_c10d
    c10d._world.pg_map[like], c10d._world.pg_names[like] = ("nccl", None), "like"
    c10d._world.pg_group_ranks[like] = {each: each for each in range(size)}
    next_, last, n = (rank + 1) % size, (rank - 1) % size, 90_001

    def rows(*shape):
        return [torch.zeros(*shape) for _ in range(size)]

    def batch(group, got):
        sent = torch.randn(n)
        if group is None:
            works = [dist.isend(sent, next_), dist.irecv(got, last)]
        else:
            with c10d._coalescing_manager(group, cpu, async_ops=True) as together:
                dist.isend(sent, group=group, group_dst=next_)
                dist.irecv(got, group=group, group_src=last)
            works = together.works
        for each in works:
            each.wait()

    def noise(*shape):
        return [torch.randn(*shape)]

    calls = {
        "sum": (noise(n), lambda group, x: dist.all_reduce(x, group=group)),
        "int": ([torch.arange(n) * rank], lambda group, x: dist.all_reduce(x, group=group)),
        "max": (noise(n), lambda group, x: dist.all_reduce(x, dist.ReduceOp.MAX, group=group)),
        "broadcast": (noise(n), lambda group, x: dist.broadcast(x, 1, group=group)),
        "all_gather": (rows(n), lambda group, *x: dist.all_gather([*x], *noise(n), group=group)),
        "into": (noise(5 * size), lambda group, x: dist.all_gather_into_tensor(x, *noise(5), group=group)),
        "scatter": (noise(4), lambda group, x: dist.scatter(x, None if rank else rows(4), group=group)),
        "parts": (noise(n), lambda group, x: dist.reduce_scatter_tensor(x, *noise(n * size), group=group)),
        "swap": (noise(2 * size), lambda group, x: dist.all_to_all_single(x, *noise(2 * size), group=group)),
        "batch": (rows(n)[:1], batch),
    }
    for name, (outputs, call) in calls.items():
        found = []
        for group in (None, like):
            torch.manual_seed(rank)
            found.append([each.clone() for each in outputs])
            call(group, *found[-1])
        if not all(torch.allclose(one, other, atol=1e-4) for one, other in zip(*found)):
            told.append(name)
    if rank == 0:
        marks.wait(["enqueued-1", "enqueued-2"])
    x = torch.ones(1)
    like.allreduce([x]).wait()
    marks.set(f"enqueued-{rank}", "")
    told.append(x.item())
    ends()
"""


async def test_the_backend_computes_what_gloo_does_and_only_enqueues(tmp_path):
    assert await ranks(tmp_path, RIGHT, 3) == [[3.0]] * 3


POISON = """
    group = Group(cpu)
    formed(0)
    tried(summed)
    leaves_with(lambda: group.abort_below(1))
    tried(summed)
    group.abort_below(1)
    formed(1)
    tried(summed)
    ends()
"""


async def test_who_waits_for_the_same_sum_as_a_rank_that_is_interrupted_does_not_take_noise_for_it(tmp_path):
    assert await ranks(tmp_path, POISON, 3) == [[[6.0], "broken", [6.0]]] * 3


CHECK = """
    inner, form = inner_groups(tensor=2, shard=2)
    form(0)

    async def settle():
        inner.synchronize()

    async def confer(*numbers):
        return inner.gather(numbers)

    replica = Replica(SimpleNamespace(settle=settle, gather_in_replica=confer), None)
    replica.size = size

    def updated():
        mine = numbers()
        dist.all_reduce(mine)
        asyncio.run(replica.check())
        return mine.unique().tolist()

    tried(updated)
    leaves_with(lambda: inner.interrupt(1))
    tried(updated)
    inner.interrupt(1)
    form(1)
    tried(updated)
    if rank == 0:  # the sum of all waits behind another that nobody else comes to
        dist.all_reduce(numbers(), group=inner.mesh["tensor"].get_group())
    threading.Timer(0.3, inner.interrupt, [2]).start()
    tried(updated)
    ends()
"""


async def test_no_rank_of_a_replica_updates_its_model_by_noise(tmp_path):
    assert await ranks(tmp_path, CHECK, 4) == [[[10.0], "broken", [10.0], "broken"]] * 4


OPEN = """
    inner, form = inner_groups(pipeline=2)
    form(0)

    def swapped():
        sent, got = torch.full((2,), float(rank)), torch.zeros(2)
        both = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
        for each in dist.batch_isend_irecv(both):
            each.wait()
        return got[0].item()

    told.append(swapped())
    tried(lambda: inner.gather([]))  # behind this both have read what was swapped; who interrupts first breaks it
    told.pop()
    inner.interrupt(1)
    swapped()  # its first send raises, within a group of calls that nobody ends
    form(1)
    told += [summed_within(), swapped(), inner.epoch]
    ends()
"""


async def test_a_batch_of_transfers_that_broke_swallows_no_later_collective(tmp_path):
    assert await ranks(tmp_path, OPEN, 2) == [[1.0, [3.0], 1.0, 1], [0.0, [3.0], 0.0, 1]]


SPINNING = """
    layout = ParallelLayout(tensor=2, replicas=2)
    group, (inner, form) = Group(cpu), inner_groups(tensor=2)
    formed(0, layout=layout)
    form(0)
    told += [summed(), summed_within()]
    if rank == 2:
        dist.all_reduce(numbers())  # its kernel waits for rank 3, which does not come
    time.sleep(0.05)
    group.abort_below(1)
    inner.interrupt(1)
    began = time.monotonic()
    formed(1, layout=layout)  # frees what is idle, which waits for all kernels of this process
    form(1)
    told += [time.monotonic() - began < 4.0, summed(), summed_within()]
    ends()
"""


async def test_a_communicator_that_waits_for_a_lost_rank_does_not_keep_another_from_being_freed(tmp_path):
    across, within = [[4.0], [6.0]], [[3.0], [7.0]]
    assert await ranks(tmp_path, SPINNING, 4) == [
        [across[place % 2], within[place // 2], True, across[place % 2], within[place // 2]] for place in range(4)
    ]


CONNECTING = """
    group, began = Group(cpu), time.monotonic()
    if rank == 1:
        def never(*_):
            raise GroupBrokenError("is stopped before it connects")
        usual, nccl.Communicator = nccl.Communicator, never
    threading.Timer(0.3, group.abort_below, [1]).start()
    tried(lambda: formed(0))
    told.append(time.monotonic() - began < 5.0)
    if rank == 1:
        nccl.Communicator = usual
    formed(1)
    tried(summed)
    ends()
"""


async def test_a_rank_that_waits_for_another_to_connect_can_be_interrupted(tmp_path):
    assert await ranks(tmp_path, CONNECTING, 2) == [["broken", True, [3.0]]] * 2


ERROR = """
    group = Group(cpu)
    formed(0)
    tried(summed)
    if rank == 0:  # a link is down: nobody is lost, and no agent says anything
        made, = group._connections._communicators
        threading.Timer(0.2, lambda: nccl.library().likenccl_fail(made._pointer, 6)).start()
        try:
            summed()
        except GroupBrokenError as error:
            told.append(str(error))
    ends()
"""


async def test_an_error_of_nccl_s_own_that_no_call_returns_interrupts(tmp_path):
    first, _ = await ranks(tmp_path, ERROR, 2)
    assert first == [[3.0], "NCCL error: remote process exited or there was a network error"]


SCRIPT = """
    import contextlib
    from unicron.train.inplace.groups import ScriptGroups

    def go_on(_):
        inner.cut(2)
        inner.form(2, lambda: Rendezvous(membership("script", 2, size)))
        return True

    loops = SimpleNamespace(has_begun=False, in_iteration=False, is_tried=False)
    peers = SimpleNamespace(waiting=lambda *_, **__: contextlib.nullcontext())
    inner = ScriptGroups(ParallelLayout(shard=3), rank, cpu, loops, go_on, peers)
    inner.form(1, lambda: Rendezvous(membership("script", 1, size)))
    inner.strict = True
    told.append(summed_within())
    leaves_with(lambda: inner.cut(2))
    told += [summed_within(), inner.epoch]
    ends()
"""


async def test_a_script_is_given_the_sum_of_the_next_membership_in_place_of_noise(tmp_path):
    assert await ranks(tmp_path, SCRIPT, 3) == [[[6.0], [6.0], 2]] * 3


RESULTS = """
    inner, form = inner_groups(tensor=3)
    form(0)
    told.append(summed_within())
    inner.strict = True  # no newer membership interrupts, and nobody drops what comes
    leaves_with(lambda: inner.cut(1))
    tried(summed_within)
    ends()
"""


async def test_results_that_are_put_together_behind_the_last_iteration_are_no_noise(tmp_path):
    assert await ranks(tmp_path, RESULTS, 3) == [[[6.0], "broken"]] * 3


GONE = """
    inner, form = inner_groups(tensor=2)
    form(0)
    told.append(summed_within())
    inner.strict = True
    if rank == 0:
        tried(summed_within)
    print(json.dumps(told), flush=True)
    os._exit(0)
"""


async def test_nobody_waits_for_the_part_of_a_rank_that_has_ended(tmp_path):
    assert await ranks(tmp_path, GONE, 2) == [[[3.0], "broken"], [[3.0]]]


DESTROYED = """
    inner, form = inner_groups(tensor=2)
    form(0)
    told.append(summed_within())
    dist.destroy_process_group()
    for _ in range(5):
        time.sleep(0.02)
    ends()
"""


async def test_groups_that_a_script_has_destroyed_are_not_looked_at_any_more(tmp_path):
    assert await ranks(tmp_path, DESTROYED, 2) == [[[3.0]]] * 2


RACE = """
    ROUNDS = 30
    nccl.library().likenccl_linger(3000)  # microseconds that a call takes at least
    group, newest, formed_at, jitter = Group(cpu), 0, -1, random.Random(rank)

    def interrupt():
        global newest
        while newest < ROUNDS:
            while group.epoch < newest:  # as a channel does: what was being formed may open further sockets
                group.abort_below(newest)
                time.sleep(0.001)
            until = time.monotonic() + 0.3
            while newest % 3 and formed_at < newest and time.monotonic() < until:  # in others while it is formed
                time.sleep(0.001)
            time.sleep(jitter.random() * 0.02)
            newest += 1
            group.abort_below(newest)

    threading.Thread(target=interrupt, daemon=True).start()
    while newest < ROUNDS or not told:
        try:
            epoch = newest
            formed(epoch)
            formed_at = epoch
            while newest == epoch or epoch == ROUNDS:
                mine = summed()
                if mine != [3.0]:
                    told.append(mine)
                if epoch == ROUNDS:
                    told.append("done")
                    break
        except GroupBrokenError:
            pass
    ends()
"""


async def test_no_communicator_is_freed_while_a_thread_is_within_a_call_of_it(tmp_path):
    assert await ranks(tmp_path, RACE, 2) == [["done"]] * 2
