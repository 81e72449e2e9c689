"""megatron-core's own model, schedules and optimizer, with ranks struck: it ends as if nothing had happened."""

import asyncio
import textwrap

import pytest
import torch
from helpers import ROOT, standby
from helpers.local_cluster import local_cluster
from helpers.parallel import struck_script
from helpers.training import shared, task

from unicron.contracts.events import Regrouped
from unicron.contracts.tasks import ParallelLayout

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

EXAMPLE = ROOT / "examples" / "megatron"
SMALL = ["--width", "16", "--layers", "2", "--heads", "2", "--context", "8"]
STRUCK = """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from unicron.train.megatron import Optimizer

    if where == "backward":
        in_backward(TransformerLayer)
    elif where == "start_param_sync":  # in the update, between what a rank does alone and what it hands round
        before(DistributedDataParallel, where)
    elif where != "never":
        before(TransformerLayer if where == "forward" else Optimizer, where)
    train.main()
"""
ALIKE = """
    import sys
    sys.path.insert(0, {folder!r})
    import torch
    import train
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from unicron.train import megatron

    made, seen, kept, norms = [], [], {}, []
    provide, optimize, draw = train.model_provider, train.get_megatron_optimizer, train.batches

    def provider(args):
        made.append(provide(args))
        kept.update(begin={name: each.detach().clone() for name, each in made[0].named_parameters()}, args=args)
        return made[0]

    def drawn(args):
        for batch in draw(args):
            seen.append(batch)
            yield batch

    step = megatron.Training.step

    def stepped(self):
        step(self)
        norms.append(self.grad_norm)

    train.model_provider, train.batches, megatron.Training.step = provider, drawn, stepped
    train.main()  # the session's loop
    ours = {name: each.detach().clone() for name, each in made[0].named_parameters()}

    with torch.no_grad():
        for name, each in made[0].named_parameters():
            each.copy_(kept["begin"][name])
    args, [model] = kept["args"], made
    config = train.OptimizerConfig(lr=1e-3, clip_grad=1.0)
    optimizer = optimize(config, [model], use_gloo_process_groups=False)
    model.config.finalize_model_grads_func = finalize_model_grads
    size = args.microbatches * args.chunks
    for norm, first in zip(norms, range(0, len(seen), size), strict=True):  # megatron-core's own
        model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=train.forward_step, data_iterator=iter(seen[first : first + size]), model=[model],
            num_microbatches=size, seq_length=args.context, micro_batch_size=args.batch, forward_only=False,
        )
        _, theirs, _ = optimizer.step()
        assert abs(norm - theirs) < 1e-4 * theirs, (norm, theirs)  # Adam does not mind how large gradients are
    theirs = dict(model.named_parameters())
    assert len(seen) == 3 * size
    for name, each in ours.items():
        assert not torch.equal(each, kept["begin"][name]), (name, "is not trained")
        assert torch.allclose(each, theirs[name], rtol=1e-4, atol=1e-6), (name, (each - theirs[name]).abs().max())
"""

scene = shared(local_cluster, nodes=2, slots=2)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return struck_script(tmp_path_factory.mktemp("script"), EXAMPLE, STRUCK)


@pytest.fixture(scope="module")
def expected():
    """What has come of undisturbed runs, by the degree that their layout has."""
    return {}


async def trained(scene, script, out, name, degree, **env):
    """Train to the end in a layout of two parts; return the parameters of both places."""
    out.mkdir()
    fields = {"min_workers": 2, "max_workers": 4, "microbatches": 4, "iterations": 4}
    words = [*SMALL, "--out", str(out), *(["--distributed-optimizer"] if degree == "shard" else [])]
    await scene.client.submit(task(script, name, *words, layout=ParallelLayout(**{degree: 2}), env=env, **fields))
    await scene.ends(name)
    found = torch.load(out / "model.pt", weights_only=True)
    return {key: each for key, each in found.items() if each is not None}  # megatron-core's modules have extra states


CASES = [
    ("tensor", "kill forward 12"),
    ("pipeline", "kill backward 12"),
    ("tensor", "kill prepare 3"),
    ("shard", "kill start_param_sync 4"),
]


@pytest.mark.parametrize(("degree", "strike"), CASES, ids=lambda each: each.replace(" ", "-"))
async def test_a_lost_rank_makes_no_difference_to_the_parameters(expected, scene, script, tmp_path, degree, strike):
    marker = tmp_path / "marker"
    name = strike.replace(" ", "-") + "-" + degree
    if degree not in expected:
        expected[degree] = await trained(scene, script, tmp_path / "expected", "calm-" + degree, degree)
    found = await trained(scene, script, tmp_path / "found", name, degree, STRIKE=strike, MARKER=str(marker))
    assert marker.exists(), "nothing was struck"
    assert found.keys() == expected[degree].keys()
    assert {key.split("-")[3] for key in found} == {"0", "1"}, "all places"
    for key, value in expected[degree].items():
        assert torch.allclose(found[key], value, rtol=1e-5, atol=1e-7), key
    joined = sorted(scene.of(Regrouped, task=name), key=lambda each: each.epoch)
    assert joined[-1].epoch > 0
    assert all(each.iteration >= 1 for each in joined if each.epoch > 0), "nobody begins anew"


async def test_a_session_makes_the_same_updates_as_megatron_cores_own_loop(tmp_path):
    path = tmp_path / "alike.py"
    path.write_text(textwrap.dedent(ALIKE).replace("{folder!r}", repr(str(EXAMPLE))))
    options = [*SMALL, "--iterations", "3", "--microbatches", "4"]
    code, written = await asyncio.to_thread(standby.run, path, *options)
    assert code == 0, written


async def test_what_can_not_be_kept_right_is_refused_by_name(tmp_path):
    text = (EXAMPLE / "train.py").read_text()
    text = text.replace("DistributedDataParallelConfig(", "DistributedDataParallelConfig(overlap_grad_reduce=True, ")
    path = tmp_path / "refused.py"
    path.write_text(text.replace("hidden_dropout=0.0", "hidden_dropout=0.0, calculate_per_token_loss=True"))
    code, written = await asyncio.to_thread(standby.run, path)
    assert code == 1
    assert "does without calculate_per_token_loss, overlap_grad_reduce: switch" in written


async def test_a_shape_for_each_size_is_refused(scene):
    layouts = {4: ParallelLayout(tensor=2), 2: ParallelLayout(pipeline=2)}
    await scene.client.submit(task(EXAMPLE / "train.py", "table", min_workers=2, max_workers=4, layouts=layouts))
    assert "give one shape for all sizes" in (await scene.fails("table")).traceback
