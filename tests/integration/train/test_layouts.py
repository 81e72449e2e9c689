"""Models spread over several workers, with ranks struck at every point: what comes of it is what one process gets."""

import asyncio
import json
import textwrap

import pytest
import pytest_asyncio
from helpers import likenccl, standby
from helpers.local_cluster import local_cluster
from helpers.parallel import (
    EXAMPLE,
    ITERATIONS,
    MICROBATCHES,
    PARALLEL,
    differing,
    plain_parameters,
    struck_script,
    trained,
)
from helpers.training import shared, task

from unicron.contracts.events import Regrouped, WorkerExited, WorkerRaised
from unicron.contracts.tasks import ParallelLayout

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

scene = shared(local_cluster, nodes=2, slots=2)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return struck_script(tmp_path_factory.mktemp("script"), EXAMPLE, PARALLEL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(script, tmp_path_factory):
    """The parameters after a run of one plain process."""
    return await plain_parameters(script, tmp_path_factory.mktemp("expected"), ITERATIONS, MICROBATCHES)


async def test_a_model_whose_parts_are_to_be_sent_while_it_is_built_is_refused(scene, tmp_path):
    text = (EXAMPLE / "train.py").read_text().replace(", src_data_rank=None", "")
    path = tmp_path / "sends.py"
    path.write_text(text)
    await scene.client.submit(task(path, "sends", min_workers=2, max_workers=2, layout=ParallelLayout(tensor=2)))
    told = (await scene.fails("sends")).traceback
    assert "give src_data_rank=None to parallelize_module and distribute_tensor" in told


CASES = [
    ({"shard": 2}, "kill fetch 1"),
    ({"tensor": 2}, "stop backward 12"),
    ({"tensor": 2}, "kill forward 12"),
    ({"shard": 2}, "kill backward 12"),
    ({"pipeline": 2}, "raise forward 12"),
    ({"tensor": 2}, "kill reduce 3"),
    ({"pipeline": 2}, "kill update 3"),
    ({"shard": 2}, "kill publish 3"),
]

WITHOUT = pytest.mark.skipif(not likenccl.can_be_built(), reason=likenccl.MISSING)
ON_STREAMS = [pytest.param(*CASES[number], "nccl", marks=WITHOUT) for number in (2, 3, 6)]
"""Some again, whose groups behave as NCCL's do on GPUs; `make test-all` runs all of this so."""


@pytest.mark.parametrize(
    ("degrees", "strike", "groups"),
    [*((*case, "gloo") for case in CASES), *ON_STREAMS],
    ids=lambda each: "".join(each).replace(" ", "-"),
)
async def test_a_lost_rank_makes_no_difference_to_the_parameters(
    expected, scene, script, tmp_path, degrees, strike, groups
):
    name = "-".join((*strike.split(), *degrees, groups))
    marker = tmp_path / "marker"
    layout = ParallelLayout(**degrees)
    strikes = {"STRIKE": strike, "MARKER": str(marker)} | (likenccl.env() if groups == "nccl" else {})
    found = await trained(scene, script, tmp_path, name, layout, **strikes)
    assert marker.exists(), "nothing was struck"
    assert differing(found, expected) == []
    joined = sorted(scene.of(Regrouped, task=name), key=lambda each: each.epoch)
    began = 0 if "fetch" in strike else 2  # the first to take a state does so in the very first membership
    assert joined[-1].epoch > 0
    assert all(each.iteration >= began for each in joined if each.epoch > 0), "nobody begins anew"
    assert [each.iteration for each in joined] == sorted(each.iteration for each in joined), "or goes back"


WAITS = """
    import json, os, sys, threading
    import torch
    sys.path.insert(0, {example!r})
    import train
    from unicron.train.groups import nccl

    waits = []
    # these read their own memory
    HOSTS = ("/groups/group.py", "/groups/inner.py", "/optim/optimizer.py", "/tensor/_utils.py")

    def noted(owner, name, waits_for):
        usual = getattr(owner, name)
        def call(*arguments):
            caller = sys._getframe(1).f_code
            here = threading.current_thread() is threading.main_thread() and not caller.co_filename.endswith(HOSTS)
            if here and waits_for(arguments[0]):
                waits.append(caller.co_name)
            return usual(*arguments)
        setattr(owner, name, call)

    class Event(nccl.event):
        def record(self):
            Event.newest = self
            super().record()

    for name in ("__bool__", "__float__", "__index__", "__int__", "cpu", "item", "numpy", "tolist"):
        noted(torch.Tensor, name, lambda _: True)
    nccl.event = Event
    noted(nccl, "await_event", lambda ended: ended is Event.newest)  # before an older one a GPU has more to do

    class Session(train.Session):
        def __init__(self, **arguments):
            super().__init__(finite="stop", **arguments)

        def iterations(self):
            for each in super().iterations():
                self.within = 0
                before = len(waits)
                yield each
                with open(os.path.join({out!r}, f"{os.getpid()}.waits"), "a") as file:
                    print(json.dumps([each, self.within, waits[before:]]), file=file)

        def microbatches(self):
            for each in super().microbatches():
                before = len(waits)
                yield each
                self.within += len(waits) - before

    train.Session = Session
    train.main()
"""


@WITHOUT
@pytest.mark.parametrize("degrees", [{}, {"tensor": 2}, {"pipeline": 2}, {"shard": 2}], ids="".join)
async def test_a_processor_waits_for_its_gpu_in_no_microbatch_and_seldom_in_an_iteration(scene, tmp_path, degrees):
    path = tmp_path / "waits.py"
    text = textwrap.dedent(WAITS).replace("{example!r}", repr(str(EXAMPLE)))
    path.write_text(text.replace("{out!r}", repr(str(tmp_path))))
    name = "-".join(("waits", *degrees))
    await trained(scene, path, tmp_path, name, ParallelLayout(**degrees), **likenccl.env())
    found = [json.loads(line) for each in tmp_path.glob("*.waits") for line in each.read_text().splitlines()]
    later = [(within, by) for iteration, within, by in found if iteration >= 2]  # before, states may be compared
    assert len(later) >= 2 * (ITERATIONS - 2)
    once_more = (
        ["synchronize"] if degrees else []
    )  # of its own computation; and before the update, with nothing to wait for
    assert later == [(0, ["keep_pace", "synchronize", *once_more, "finite", "outcome", *once_more])] * len(later)


STATE = """
    import io, sys
    import torch
    sys.path.insert(0, {example!r})
    import train
    from unicron.contracts.tasks import ParallelLayout
    from unicron.train.snapshots import shards
    from unicron.train.snapshots.gathering import Gathering, collect_state, load_state
    from unicron.train.groups.inner import InnerGroups

    def made(seed):
        torch.manual_seed(seed)
        model = train.Decoder(width=16, layers=2, heads=2, context=8)
        train.spread(model, mesh, heads=2)
        optimizer = torch.optim.AdamW(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    mesh = InnerGroups(ParallelLayout(tensor=2, shard=2), 3, torch.device("cpu")).mesh
    ours, theirs = made(1), made(2)
    file = io.BytesIO()
    torch.save(collect_state(7, ours), file)
    file.seek(0)
    gathering = Gathering(theirs)
    gathering.add(torch.load(file, weights_only=True))
    load_state(gathering.result(7), theirs)
    kinds = set()
    for one, other in zip(ours["model"].parameters(), theirs["model"].parameters(), strict=True):
        assert one.placements == other.placements and torch.equal(one.to_local(), other.to_local())
        kinds |= {type(each).__name__ for each in one.placements}
        for name, held in ours["optimizer"].state[one].items():
            assert torch.equal(shards.local(held), shards.local(theirs["optimizer"].state[other][name])), name
    assert {"Shard", "_StridedShard"} <= kinds, kinds
"""


OVERLAPS = """
    import sys
    import torch
    sys.path.insert(0, {example!r})
    import train
    from unicron.contracts.tasks import ParallelLayout
    from unicron.train.session import gradients
    from unicron.train.groups.inner import InnerGroups
    from unicron.train.worker.shell import run
    from unicron.train.worker.timing import PlannedCollection
    from unicron.train.session.ranks import TorchRanks

    class Twice:
        begun, on_streams = 0, False

        def begin_all_reduce(self, tensor):
            self.begun += 1
            tensor *= 2
            return self

        def finish(self, _):
            pass

    gradients.BUCKET_BYTES, ranks = 4096, TorchRanks(None, 0)
    ranks.prepare(torch.device("cpu"))
    ranks.group = group = Twice()
    mesh = InnerGroups(ParallelLayout(**{sys.argv[1]: 2}), 1, torch.device("cpu")).mesh
    model = train.Decoder(width=16, layers=2, heads=2, context=8)
    train.spread(model, mesh, heads=2)
    held = gradients.TorchGradients(ranks, torch.float64, 1, PlannedCollection(0))
    held.prepare(model.parameters())
    for _ in range(2):  # in the first pass it only looks
        held.clear()
        before, text = group.begun, torch.randint(256, (2, 9))
        with held.overlapping():
            loss = train.loss_of(model(text[:, :-1]), text[:, 1:])
            loss.backward()
        begun = group.begun - before
        held.loss = loss.detach()
        held.accumulate()
        held.begin(0, range(held.buckets))
        for bucket in range(held.buckets):
            run(held.reduce(bucket))
        assert torch.equal(held._reduced, 2 * held._accumulated)
        held.publish()
        model.zero_grad()
    assert begun == held.buckets - 1 > 5, begun
"""


@pytest.mark.parametrize("dimension", ["shard", "tensor"])
async def test_a_model_that_is_spread_begins_to_reduce_in_its_backward_pass(tmp_path, dimension):
    path = tmp_path / "overlaps.py"
    path.write_text(textwrap.dedent(OVERLAPS).replace("{example!r}", repr(str(EXAMPLE))))
    code, written = await asyncio.to_thread(standby.run, path, dimension, parts=True)
    assert code == 0, written


async def test_a_state_that_is_spread_over_two_dimensions_survives_its_way(tmp_path):
    path = tmp_path / "spread.py"
    path.write_text(textwrap.dedent(STATE).replace("{example!r}", repr(str(EXAMPLE))))
    code, written = await asyncio.to_thread(standby.run, path, parts=True)
    assert code == 0, written


LATE = """
    import os, sys
    import torch
    sys.path.insert(0, {example!r})
    import train

    class Session(train.Session):
        def iterations(self):
            yield from super().iterations()
            if os.environ["UNICRON_PLACE"] == "1":
                os._exit(3)
            whole = [each.full_tensor() for each in self._states.protected["model"].parameters()]  # a script's own way
            torch.save(whole, {noise!r})

    train.Session = Session
    train.main()
"""


async def test_results_that_a_lost_rank_had_a_part_of_are_not_made_of_noise(scene, tmp_path):
    path = tmp_path / "late.py"
    text, noise = textwrap.dedent(LATE).replace("{example!r}", repr(str(EXAMPLE))), tmp_path / "noise"
    path.write_text(text.replace("{noise!r}", repr(str(noise))))
    assert await trained(scene, path, tmp_path, "late", ParallelLayout(shard=2)), (
        "what a session saves was there before"
    )
    first = {f"late-{number}" for number in range(1, 5)}  # one that leaves early may be replaced for a moment
    await scene.until(lambda: first <= {each.worker for each in scene.of(WorkerExited, task="late")})
    assert not noise.exists()
    raised = scene.of(WorkerRaised, task="late")
    assert raised
    assert {each.exception for each in raised} == {"unicron.errors.GroupBrokenError"}, "and it is told why"
