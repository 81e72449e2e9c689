"""Process groups that are interrupted at any moment, and gradients whose reduce was cut off: real ranks, real gloo."""

import pytest
from helpers import likenccl
from helpers.ranks import run_ranks

pytestmark = pytest.mark.slow

RANK = """
    import json, os, random, sys, threading, time
    import torch
    from unicron.train.groups.group import Group

    rank, world, epochs = map(int, sys.argv[2:5])
    first = Group(torch.device("cpu"))
    first.form(membership("first", 0, world))  # all are there: it can begin, by the clock of rank 0
    start = torch.tensor([time.time() + 0.3 if rank == 0 else 0.0], dtype=torch.float64)
    first.finish(first.begin_all_reduce(start))
    first.leave()
    group, newest, jitter = Group(torch.device("cpu")), [-1], random.Random(rank)
    gaps = random.Random(7)
    times = [start.item()]
    for _ in range(epochs - 1):
        times.append(times[-1] + gaps.choice([0.001, 0.01, 0.03, 0.1, 0.2, 0.5]))

    def interrupt():
        for epoch, when in enumerate(times):
            while (left := when + jitter.random() * 0.004 - time.time()) > 0:
                group.abort_below(newest[0])
                time.sleep(min(left, 0.05))
            newest[0] = epoch
        while group.epoch < epochs - 1:
            group.abort_below(epochs - 1)
            time.sleep(0.05)

    threading.Thread(target=interrupt, daemon=True).start()
    formed = 0
    while True:
        while newest[0] <= group.epoch:
            time.sleep(0.0005)
        epoch = newest[0]
        try:
            group.form(membership("test", epoch, world))
            formed += 1
            while newest[0] == epoch:
                numbers = torch.full((100_000,), float(rank + 1))
                group.finish(group.begin_all_reduce(numbers))
                if epoch == epochs - 1:
                    print(json.dumps({"formed": formed, "sum": numbers[0].item()}), flush=True)
                    group.gather(b"")
                    os._exit(0)  # as forked workers do: an abandoned group has a thread that never ends
        except RuntimeError:
            pass
"""


@pytest.mark.parametrize(
    "epochs", ["12", pytest.param("60", marks=pytest.mark.exhaustive("more moments at which groups are interrupted"))]
)
async def test_a_group_that_is_interrupted_at_any_moment_forms_again(tmp_path, epochs):
    found = await run_ranks(tmp_path, RANK, 3, epochs)
    assert [each["sum"] for each in found] == [6.0] * 3
    assert all(each["formed"] >= 2 for each in found), "the interruptions struck groups that were at work"


LEFT = """
    import json, os, sys, threading
    import torch
    from unicron.train.groups.group import Group

    rank, left, told = int(sys.argv[2]), threading.Event(), []
    group = Group(torch.device("cpu"), None, lambda epoch: (told.append(epoch), left.set()))
    for epoch in (0, 1):
        group.form(membership("t", epoch, 3))
        group.barrier()
    if rank == 2:
        print(json.dumps([]), flush=True)
        os._exit(0)
    left.wait(30)
    print(json.dumps(told), flush=True)
    os._exit(0)
"""


async def test_a_rank_that_is_in_no_collective_hears_at_once_when_a_peer_leaves_and_of_no_older_group(tmp_path):
    first, second, _ = await run_ranks(tmp_path, LEFT, 3)
    assert first == second == [1]


REDUCE = """
    import json, sys
    import torch
    from unicron.train.session import gradients
    from unicron.train.worker.shell import run
    from unicron.train.worker.timing import PlannedCollection
    from unicron.train.session.ranks import TorchRanks

    gradients.BUCKET_BYTES = 800  # 100 float64
    rank = int(sys.argv[2])
    parameter = torch.nn.Parameter(torch.zeros(250))
    ranks = TorchRanks(None, 0)
    ranks.prepare(torch.device("cpu"))
    held, group = gradients.TorchGradients(ranks, torch.float64, 1, PlannedCollection(0)), ranks.group
    held.prepare([parameter])
    group.form(membership("first", 0, 3))
    held.clear()
    assert held.buckets == 3
    parameter.grad = torch.full((250,), float(rank + 1))
    held.loss = torch.tensor(1.0)
    held.accumulate()
    held.begin(0, range(3))
    for bucket in range(3):
        run(held.reduce(bucket))
    group.confirm()
    if rank == 2:
        print(json.dumps({}))  # lost, behind the reduce
        group.leave()
        sys.exit()
    if rank == 1:  # its reduce was cut off behind the first of three buckets, the second half overwritten
        held._reduced[100:] = -7
    group.form(membership("second", 1, 2))
    run(held.share(0, 0))
    run(held.share(1, 0))
    held.begin(0, [2])
    run(held.reduce(2))  # nobody is said to have the third bucket: it is reduced over those that are left
    held.publish()
    print(json.dumps({"grad": parameter.grad[[0, 99, 100, 199, 200, 249]].tolist(), "loss": held.outcome.loss}))
"""


async def test_finished_buckets_are_kept_and_shared_and_only_the_others_are_reduced_again(tmp_path):
    first, second, _ = await run_ranks(tmp_path, REDUCE, 3)
    assert first == second
    assert first["grad"] == [6.0, 6.0, 6.0, 6.0, 3.0, 3.0], "two buckets hold the lost rank's part, the third does not"
    assert first["loss"] == pytest.approx(1.0), "a mean, over the two that are left"


LATE = """
    import json, os, random, sys, time
    import torch
    from unicron.train.groups.connections import POLL
    from unicron.train.groups.group import Group

    rank = int(sys.argv[2])
    group = Group(torch.device("cpu"))
    group.form(membership("late", 0, 2))
    failures = []
    for _ in range(200):
        if rank == 1:  # arrive when the other's poll is about to time out
            time.sleep(POLL.total_seconds() - 0.0006 + random.random() * 0.0009)
        try:
            group.finish(group.begin_all_reduce(torch.ones(10)))
        except RuntimeError as error:
            failures.append(str(error)[:80])
    print(json.dumps(failures), flush=True)
    if rank == 0:
        try:
            group.finish(group.begin_all_reduce(torch.ones(10)))
        except RuntimeError:
            os._exit(0)  # the other is gone, and that is told
        os._exit(1)
    os._exit(0)
"""


@pytest.mark.skipif(likenccl.is_used(), reason="of gloo")
@pytest.mark.exhaustive("200 polls of 50 ms that time out just then, of a race inside of gloo")
async def test_a_collective_that_ends_as_a_poll_times_out_did_not_fail_and_a_lost_peer_still_does(tmp_path):
    assert await run_ranks(tmp_path, LATE, 2) == [[], []]


OTHERS = """
    import json, os, socket, sys, threading
    import torch
    from unicron.train.groups.group import Group

    rank = int(sys.argv[2])
    server = socket.create_server(("127.0.0.1", 0))
    pairs = [(socket.create_connection(server.getsockname()), server.accept()[0])]
    group = Group(torch.device("cpu"))
    group.abort_below(0)  # there is no group yet, and so nothing to shut
    group.form(membership("others", 0, 2))
    pairs.append((socket.create_connection(server.getsockname()), server.accept()[0]))
    threading.Timer(0.3, group.abort_below, [1]).start()
    woken = False
    try:
        while rank == 0:  # waits for a rank that does not come
            group.finish(group.begin_all_reduce(torch.ones(10)))
        threading.Event().wait(1.0)
    except RuntimeError:
        woken = True
    for ours, _ in pairs:
        ours.sendall(b"still there")
    print(json.dumps([woken, *(theirs.recv(100).decode() for _, theirs in pairs)]), flush=True)
"""


async def test_an_interrupted_group_leaves_the_program_s_own_connections_alone(tmp_path):
    assert await run_ranks(tmp_path, OTHERS, 2) == [
        [True, "still there", "still there"],
        [False, "still there", "still there"],
    ]


PLACES = """
    import json, threading
    import torch
    from unicron.errors import GroupBrokenError
    from unicron.train.groups.group import SHORT, Group

    layout = ParallelLayout(tensor=2, replicas=2)
    group, told = Group(torch.device("cpu")), []
    given = membership("places", 0, 4, layout=layout)
    group.form(given)
    told.append([text.decode() for text in group.gather(b"x" * given.rank)])
    told.append([len(text) - SHORT for text in group.gather(b"x" * (SHORT - 1 + given.rank))])
    numbers = torch.tensor([10.0 ** given.rank])
    group.finish(group.begin_all_reduce(numbers))
    told.append(numbers.item())
    numbers = torch.tensor([float(given.rank)])
    group.broadcast(numbers, 1)
    told.append(numbers.item())
    threading.Timer(0.3, group.abort_below, [1]).start()
    try:
        if given.rank == 0:
            group.finish(group.begin_all_reduce(numbers))  # rank 2, the other one with this place, does not come
            group.confirm()
        elif given.rank == 1:
            group.gather(b"")
        else:
            threading.Event().wait(1.0)
    except GroupBrokenError:
        told.append("woken")
    print(json.dumps(told), flush=True)
"""


async def test_gradients_are_summed_over_the_replicas_place_by_place_and_one_abort_wakes_all(tmp_path):
    everybody, about_short = ["", "x", "xx", "xxx"], [-1, 0, 1, 2]
    assert await run_ranks(tmp_path, PLACES, 4) == [
        [everybody, about_short, 101.0, 2.0, "woken"],
        [everybody, about_short, 1010.0, 3.0, "woken"],
        [everybody, about_short, 101.0, 2.0],
        [everybody, about_short, 1010.0, 3.0],
    ]


CONFER = """
    import json, os, sys, time
    import torch
    from unicron.contracts.tasks import ParallelLayout
    from unicron.train.groups.inner import InnerGroups
    from unicron.train.groups.rendezvous import Rendezvous

    rank = int(sys.argv[2])
    inner = InnerGroups(ParallelLayout(shard=2), rank, torch.device("cpu"))
    inner.form(0, lambda: Rendezvous(membership("confer", 0, 2)))
    told, asked, answered = [], [], []
    for numbers in ([], [float(rank)], [float(rank), 7.0]):
        inner.gather([0.0])
        time.sleep(0.05 * rank)
        asked.append(time.time())
        told.append(inner.gather(numbers))
        answered.append(time.time())
    print(json.dumps({"told": told, "asked": asked, "answered": answered}), flush=True)
    inner.gather([0.0])
    os._exit(0)
"""

SAVE = """
    import json, os, pathlib, sys, threading, time
    import torch
    from unicron.contracts.tasks import ParallelLayout
    from unicron.train.groups.inner import InnerGroups
    from unicron.train.groups.rendezvous import Rendezvous

    rank = int(sys.argv[2])
    inner = InnerGroups(ParallelLayout(shard=2), rank, torch.device("cpu"))
    inner.form(0, lambda: Rendezvous(membership("save", 0, 2)))
    inner.gather([])
    inner.strict = True
    interrupted = pathlib.Path(__file__).with_name("interrupted")
    if rank == 0:
        threading.Timer(0.05, lambda: (inner.interrupt(1), interrupted.touch())).start()
    while rank == 1 and not interrupted.exists():
        time.sleep(0.01)
    weights = torch.full((8,), float(rank))
    torch.distributed.all_reduce(weights)
    print(json.dumps(weights[0].item()), flush=True)
    os._exit(0)
"""


async def test_results_are_put_together_though_a_newer_membership_comes_behind_the_last_iteration(tmp_path):
    assert await run_ranks(tmp_path, SAVE, 2) == [1.0, 1.0]


async def test_ranks_of_a_replica_wait_for_one_another_whatever_they_have_to_say(tmp_path):
    first, second = await run_ranks(tmp_path, CONFER, 2)
    assert first["told"] == second["told"] == [[[], []], [[0.0], [1.0]], [[0.0, 7.0], [1.0, 7.0]]]
    for answered, asked in zip(first["answered"], second["asked"], strict=True):
        assert answered >= asked, "nobody has an answer before the last has asked"
