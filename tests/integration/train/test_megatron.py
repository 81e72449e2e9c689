"""megatron-core's own model, schedules and optimizer, with ranks struck: it ends as if nothing had happened."""

import asyncio
import os
import subprocess
import sys
import textwrap

import pytest
import pytest_asyncio
import torch
from helpers import ROOT
from helpers.training import running_cluster, task
from msgspec.structs import replace

from unicron.contracts.events import Regrouped
from unicron.contracts.tasks import ParallelLayout, TaskState

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

EXAMPLE = ROOT / "examples" / "megatron"
SMALL = ["--width", "16", "--layers", "2", "--heads", "2", "--context", "8"]
STRUCK = """
    import os, signal, sys
    import torch
    sys.path.insert(0, {example!r})
    import train  # for megatron
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from unicron.train.megatron import Optimizer

    where, count = os.environ.get("STRIKE", "never 0").split()
    calls = [int(count)]

    def strike():
        calls[0] -= 1
        if calls[0] or os.environ["UNICRON_PLACE"] != "1":
            return
        try:
            os.close(os.open(os.environ["MARKER"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)

    def before(owner, name):
        then = getattr(owner, name)
        def struck(self, *arguments, **named):
            strike()
            return then(self, *arguments, **named)
        setattr(owner, name, struck)

    def backward():
        then = TransformerLayer.forward
        def forward(self, *arguments, **named):
            found = then(self, *arguments, **named)
            if found[0].requires_grad:
                found[0].register_hook(lambda _: strike())
            return found
        TransformerLayer.forward = forward

    if where == "backward":
        backward()
    elif where == "gathering":  # in the update, between what a rank does alone and what it hands round
        from megatron.core.distributed import DistributedDataParallel
        before(DistributedDataParallel, "start_param_sync")
    elif where != "never":
        before(TransformerLayer if where == "forward" else Optimizer, where)
    train.main()
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory):
    async with running_cluster(tmp_path_factory.mktemp("megatron"), nodes=2, slots=2) as found:
        yield found


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "struck.py"
    path.write_text(textwrap.dedent(STRUCK).replace("{example!r}", repr(str(EXAMPLE))))
    return path


async def trained(scene, script, out, name, layout, *options, **env):
    """Train to the end; return the parameters of every place."""
    size = layout.replica_workers
    out.mkdir()
    spec = task(
        script, name, min_workers=size, max_workers=2 * size, microbatches=4, iterations=6, layout=layout, env=env
    )
    await scene.client.submit(replace(spec, command=[*spec.command, *SMALL, "--out", str(out), *options]))
    view = await scene.until_state(name, TaskState.FINISHED, TaskState.FAILED, timeout_s=90.0)
    assert view.state is TaskState.FINISHED, (view.reason, view.traceback)
    await scene.until(lambda: len(list(out.glob("place-*.pt"))) == size)  # they write when they are through
    return {path.name: torch.load(path, weights_only=True) for path in out.glob("place-*.pt")}


CASES = [
    ("tensor", "forward 12"),
    ("pipeline", "backward 12"),
    ("tensor", "prepare 3"),
    ("shard", "gathering 4"),
]


@pytest.mark.parametrize(("degree", "strike"), CASES, ids=lambda each: each.replace(" ", "-"))
async def test_a_lost_rank_makes_no_difference_to_the_parameters(scene, script, tmp_path, degree, strike):
    layout = ParallelLayout(**{degree: 2})
    options = ["--distributed-optimizer"] if degree == "shard" else []
    marker = tmp_path / "marker"
    name = strike.replace(" ", "-") + "-" + degree
    expected = await trained(scene, script, tmp_path / "expected", "calm-" + name, layout, *options)
    found = await trained(scene, script, tmp_path / "found", name, layout, *options, STRIKE=strike, MARKER=str(marker))
    assert marker.exists(), "nothing was struck"
    assert found.keys() == expected.keys()
    for place, parameters in expected.items():
        for key, value in parameters.items():
            assert torch.allclose(found[place][key], value, rtol=1e-5, atol=1e-7), (place, key)
    joined = sorted(scene.of(Regrouped, task=name), key=lambda each: each.epoch)
    assert joined[-1].epoch > 0
    assert all(each.iteration >= 1 for each in joined if each.epoch > 0), "nobody begins anew"


async def test_what_can_not_be_kept_right_is_refused_by_name(tmp_path):
    text = (EXAMPLE / "train.py").read_text()
    text = text.replace("DistributedDataParallelConfig(", "DistributedDataParallelConfig(overlap_grad_reduce=True, ")
    path = tmp_path / "refused.py"
    path.write_text(text.replace("hidden_dropout=0.0", "hidden_dropout=0.0, calculate_per_token_loss=True"))
    kept = {name: value for name, value in os.environ.items() if not name.startswith("UNICRON_")}
    found = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, str(path)],
        env={**kept, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 1
    assert "does without calculate_per_token_loss, overlap_grad_reduce: switch" in found.stderr


async def test_a_shape_for_each_size_is_refused(scene):
    layouts = {4: ParallelLayout(tensor=2), 2: ParallelLayout(pipeline=2)}
    await scene.client.submit(task(EXAMPLE / "train.py", "table", min_workers=2, max_workers=4, layouts=layouts))
    view = await scene.until_state("table", TaskState.FAILED, TaskState.FINISHED)
    assert "give one shape for all sizes" in view.traceback
