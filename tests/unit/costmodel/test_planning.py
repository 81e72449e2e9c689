"""The cost model: its catalogue, its formulas, and the best configuration of each size by them."""

import subprocess
import sys
import tomllib
from importlib.resources import files

import msgspec
import numpy as np
import pytest
from helpers.costmodel import gpt, one

from unicron.contracts.tasks import ModelSpec, ParallelLayout
from unicron.costmodel import catalogue, costs, formulas, planning
from unicron.costmodel.costs import FITTED, Constants
from unicron.errors import InvalidInputError

A100 = catalogue.accelerator("A100")


def brute_force(model, workers):
    """Return the least seconds on so many GPUs, by trying everything one at a time."""
    gpu, found = catalogue.accelerator(model.accelerator), []
    for tensor in (1, 2, 4, 8):
        for pipeline in range(1, model.layers + 1):
            data, rest = divmod(workers, tensor * pipeline)
            if rest or model.heads % tensor or not 1 <= data <= model.batch:
                continue
            if not model.padded and (model.layers % pipeline or model.batch % data):
                continue
            share = -(-model.batch // data)
            for microbatch in planning.MICROBATCHES:
                if microbatch > share or (not model.padded and share % microbatch):
                    continue
                for kind in range(3):
                    for distributed in (False, True):
                        on = one(tensor, pipeline, data, microbatch, kind, distributed)
                        if costs.memory_bytes(model, on)[0] <= gpu.memory_bytes:
                            found.append(float(costs.iteration_s(model, gpu, on)[0]))
    return min(found, default=None)


@pytest.mark.slow
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("size", "batch"), [("1.3B", 96), ("13B", 48)])
def test_the_curve_is_the_best_of_all_configurations(size, batch, padded):
    model = gpt(size, batch=batch, padded=padded)
    curve = planning.curve(model, 40)
    expected = {x: best for x in range(1, 41) if (best := brute_force(model, x)) is not None}
    assert dict(zip(curve.sizes.tolist(), curve.seconds.tolist(), strict=True)) == pytest.approx(expected)


def test_a_configuration_takes_the_seconds_and_the_gpus_it_says():
    model = gpt("175B")
    curve = planning.curve(model, 1024)
    for index, (size, seconds) in enumerate(zip(curve.sizes, curve.seconds, strict=True)):
        best = curve.configuration(index)
        on = one(*best[:4], formulas.RECOMPUTE.index(best.recompute), best.distributed)
        assert best.tensor * best.pipeline * best.data == size
        assert costs.iteration_s(model, A100, on) == pytest.approx(seconds)
        assert costs.memory_bytes(model, on) <= A100.memory_bytes
    assert "tensor" in str(curve.configuration(0))


def test_flops_are_model_flops():
    curve = planning.curve(gpt("7B"), 64)
    assert curve.flops == pytest.approx(formulas.iteration_flops(gpt("7B")) / curve.seconds)
    assert np.all(curve.flops < curve.sizes * A100.peak_flops)


def test_strict_divisibility_dips_between_48_and_56_as_in_figure_4_and_padding_does_not():
    strict, padded = (planning.curve(gpt("7B", padded=each), 64) for each in (False, True))
    assert 48 in strict.sizes
    assert 56 not in strict.sizes
    at = dict(zip(padded.sizes.tolist(), padded.flops.tolist(), strict=True))
    assert at[56] > at[48]
    both = np.isin(padded.sizes, strict.sizes)
    assert padded.flops[both] == pytest.approx(strict.flops, rel=0.05)


def test_175b_needs_48_gpus_of_80_gb_and_fewer_larger_ones():
    model = gpt("175B")
    assert planning.curve(model, 47).sizes.size == 0
    assert planning.curve(model, 48).sizes.tolist() == [48]
    text = planning.shortage(model, 16)
    assert "174.6 billion" in text
    assert "at least 48 A100 of 80 GB" in text
    assert "16 are too few" in text
    assert "at least 24 H200 of 141 GB" in planning.shortage(msgspec.structs.replace(model, accelerator="H200"), 16)
    assert planning.shortage(model, 48) == ""


def test_a_layer_too_large_for_any_gpu_says_so():
    model = gpt("175B", hidden=960_000, heads=96, layers=2)
    assert "does not fit into 16384 A100" in planning.shortage(model, 8)


@pytest.mark.parametrize(
    ("workers", "padded", "says"),
    [
        (56, False, ["56 is no product", "96 layers", "'padded: true'"]),
        (8, False, ["each would need", "80 GB"]),
        (97, True, ["each would need"]),
        (1537 * 97, True, ["is no product"]),
        (48, False, []),
    ],
)
def test_an_infeasible_size_has_a_reason(workers, padded, says):
    text = planning.why_not(gpt("175B", padded=padded), workers)
    assert bool(text) == bool(says)
    for part in says:
        assert part in text


def test_one_measurement_scales_the_whole_curve():
    model = gpt("7B", anchor_workers=64, anchor_mfu=0.40)
    plain, anchored = planning.curve(gpt("7B"), 256), planning.curve(model, 256)
    at = plain.sizes.tolist().index(64)
    assert anchored.flops[at] == pytest.approx(0.40 * 312e12 * 64)
    assert anchored.flops / plain.flops == pytest.approx(anchored.flops[at] / plain.flops[at])
    assert anchored.flops * anchored.seconds == pytest.approx(formulas.iteration_flops(model))


def test_the_anchor_may_be_larger_than_what_is_asked_for():
    model = gpt("7B", anchor_workers=256, anchor_mfu=0.40)
    small, large = planning.curve(model, 64), planning.curve(model, 256)
    assert small.sizes.tolist() == [each for each in large.sizes.tolist() if each <= 64]
    assert small.flops == pytest.approx(large.flops[: small.sizes.size])


def test_an_anchor_that_can_not_have_been_measured_is_refused():
    with pytest.raises(InvalidInputError, match=r"anchor_workers 56: 56 is no product.*size that was measured"):
        planning.curve(gpt("7B", anchor_workers=56, anchor_mfu=0.4), 64)


def test_an_unknown_accelerator_is_refused():
    with pytest.raises(InvalidInputError, match="V100"):
        planning.curve(gpt("7B", accelerator="V100"), 64)


def test_tensor_groups_stay_inside_nodes_of_any_size():
    curve = planning.curve(gpt("13B", gpus_per_node=6, padded=True), 64)
    assert set(curve.choices[:, 0].tolist()) <= {1, 2}  # 3 and 6 don't divide 40 heads


@pytest.mark.parametrize("most", [0, 1])
def test_no_gpus_are_an_empty_curve(most):
    assert planning.curve(gpt("7B"), most).sizes.tolist() == []


def test_a_declared_shape_leaves_only_its_configurations():
    free = planning.curve(gpt("7B"), 128)
    for shape in (ParallelLayout(tensor=2, pipeline=4), ParallelLayout(tensor=8)):
        curve = planning.curve(gpt("7B"), 128, shape)
        layouts = [curve.configuration(index).layout for index in range(len(curve.sizes))]
        assert layouts
        assert layouts == [shape.with_workers(size) for size in curve.sizes.tolist()]
        best = dict(zip(free.sizes.tolist(), free.seconds.tolist(), strict=True))
        assert all(seconds >= best[size] for size, seconds in zip(curve.sizes.tolist(), curve.seconds, strict=True))


def test_ranks_that_share_a_replica_out_are_data_parallel_with_a_distributed_optimizer():
    curve = planning.curve(gpt("7B"), 64, ParallelLayout(shard=8))
    found = [curve.configuration(index) for index in range(len(curve.sizes))]
    assert found
    assert all(one.distributed and one.data % 8 == 0 and one.tensor == one.pipeline == 1 for one in found)


# --- a layout for each size ------------------------------------------------------------------------------------------

TWO_BY_FOUR, FLAT = ParallelLayout(tensor=2, pipeline=4), ParallelLayout(shard=8)


def by_size(curve):
    return dict(zip(curve.sizes.tolist(), curve.flops.tolist(), strict=True))


def test_each_size_has_the_flops_of_its_own_layout():
    free, first, second = (by_size(planning.curve(gpt("7B"), 64, shape)) for shape in (None, TWO_BY_FOUR, FLAT))
    found = planning.curve_of(gpt("7B"), {64: FLAT, 16: TWO_BY_FOUR, 32: TWO_BY_FOUR.with_workers(32), 8: TWO_BY_FOUR})
    assert by_size(found) == {8: first[8], 16: first[16], 32: first[32], 64: second[64]}
    assert found.sizes.tolist() == [8, 16, 32, 64]
    assert found.configuration(0).layout.is_like(TWO_BY_FOUR)
    assert by_size(found)[16] != free[16]


def test_what_a_layout_can_not_run_is_left_out_and_has_a_reason():
    model, layouts = gpt("7B"), {8: TWO_BY_FOUR, 56: TWO_BY_FOUR, 1: ParallelLayout()}
    assert planning.curve_of(model, layouts).sizes.tolist() == [8]
    assert planning.curve_of(model, {}).sizes.tolist() == []
    assert planning.why_not(model, 8, TWO_BY_FOUR) == ""
    assert "data degree of 7: it must divide the 1536 sequences" in planning.why_not(model, 56, TWO_BY_FOUR)
    assert "on 1 GPUs with tensor 1 x pipeline 1 each would need" in planning.why_not(model, 1, ParallelLayout())


def test_one_anchor_scales_all_layouts_by_what_it_was_of_its_own():
    plain = gpt("7B")
    layouts = {4: ParallelLayout(tensor=4), 48: FLAT, 64: TWO_BY_FOUR}
    bare = planning.curve_of(plain, layouts).flops
    for at, size in enumerate(layouts):  # 4 are too few for the others
        anchored = planning.curve_of(gpt("7B", anchor_workers=size, anchor_mfu=0.4), layouts)
        assert anchored.flops[at] == pytest.approx(0.4 * 312e12 * size)
        assert anchored.flops / bare == pytest.approx(anchored.flops[at] / bare[at])
    elsewhere = planning.curve_of(gpt("7B", anchor_workers=128, anchor_mfu=0.4), layouts)
    best = by_size(planning.curve(plain, 128))[128]
    assert elsewhere.flops / bare == pytest.approx(0.4 * 312e12 * 128 / best)


def test_an_anchor_that_its_layout_can_not_run_is_refused():
    with pytest.raises(InvalidInputError, match="anchor_workers 56: 56 GPUs with tensor 2 x pipeline 4 have a data"):
        planning.curve_of(gpt("7B", anchor_workers=56, anchor_mfu=0.4), {56: TWO_BY_FOUR})


def test_the_best_layouts_are_those_of_the_best_configurations():
    curve = planning.curve(gpt("13B"), 48)
    best = [curve.configuration(at) for at in range(len(curve.sizes))]
    expected = {one.layout.workers: (one.tensor, one.pipeline, 1, 1) for one in best if one.layout.workers >= 8}
    found = planning.best_layouts(gpt("13B"), range(8, 49))
    assert {size: (one.tensor, one.pipeline, one.shard, one.replicas) for size, one in found.items()} == expected
    with pytest.raises(InvalidInputError, match=r"from 44 to 44 .* 44 is no product .* that can are 24, 30, 32, 40"):
        planning.best_layouts(gpt("13B"), [44])


# --- formulas --------------------------------------------------------------------------------------------------------


H, S, V = 12288, 2048, 51200
NOTHING = Constants(float("inf"), 0, 0)


# --- counts ----------------------------------------------------------------------------------------------------------


PUBLISHED = {"1.3B": 1.3, "7B": 6.7, "13B": 12.85, "70B": 64.9, "175B": 174.6}


@pytest.mark.parametrize(("size", "billions"), PUBLISHED.items())
def test_parameters_are_the_published_ones(size, billions):
    assert formulas.parameters(gpt(size)) / 1e9 == pytest.approx(billions, abs=0.05)


def test_flops_are_those_of_narayanan_et_al():
    model, l = gpt("175B"), 96  # noqa: E741 - the paper's letter
    plain = 72 * 1536 * S * l * H**2 * (1 + S / (6 * H) + V / (12 * l * H))
    again = 96 * 1536 * S * l * H**2 * (1 + S / (6 * H) + V / (16 * l * H))
    assert formulas.iteration_flops(model) == pytest.approx(plain, rel=1e-12)
    assert formulas.iteration_flops(model, formulas.FULL) == pytest.approx(again, rel=1e-12)
    selective = formulas.iteration_flops(model, formulas.SELECTIVE)
    assert selective - plain == pytest.approx(1536 * l * 4 * S**2 * H, rel=1e-6)


def test_a_published_iteration_time_and_rate_agree():
    """Korthikanti et al. table 5: 175B in 18.13 s on 64 A100 with full recompute is 51.6 % of the peak (HFU)."""
    flops = formulas.iteration_flops(gpt("175B", batch=64), formulas.FULL)
    assert flops / 18.13 / 64 / A100.peak_flops == pytest.approx(0.516, abs=0.005)


# --- bytes -----------------------------------------------------------------------------------------------------------


def test_state_takes_18_bytes_a_parameter_or_6_and_12_over_d():
    model = gpt("7B")
    parameters = formulas.parameters(model)
    assert costs.state_bytes(model, one(data=8)) == pytest.approx(18 * parameters)
    assert costs.state_bytes(model, one(data=8, distributed=True)) == pytest.approx(7.5 * parameters)


def test_the_first_stage_holds_its_layers_and_the_embedding():
    model = gpt("175B")
    expected = (96 / 12 * (12 * H**2 + 13 * H) + V * H) / 8
    assert costs.stage_parameters(model, one(tensor=8, pipeline=12)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("entries", "layer", "working"),
    [
        ({"recompute": formulas.NONE}, 34 + 5 * 96 * S / H, 0),
        ({"recompute": formulas.NONE, "tensor": 8}, 10 + 24 / 8 + 5 * 96 * S / H / 8, 0),
        ({"recompute": formulas.SELECTIVE, "tensor": 8}, 34 / 8, 5 * 96 * S / H / 8),
        ({"recompute": formulas.FULL, "tensor": 8}, 2, 10 + 24 / 8 + 5 * 96 * S / H / 8),
    ],
)
def test_activations_of_a_layer_are_those_of_korthikanti_et_al(entries, layer, working):
    on = one(pipeline=16, microbatch=2, **entries)
    each = S * 2 * H
    assert costs.activation_bytes(gpt("175B"), on) == pytest.approx(each * (layer * 6 * 16 + working))


def test_the_first_stage_keeps_no_more_microbatches_than_there_are():
    few, many = (costs.activation_bytes(gpt("175B", batch=b), one(tensor=8, pipeline=16)) for b in (4, 400))
    assert few < many / 3


def test_175b_fits_into_64_gpus_of_80_gb_and_not_into_32():
    model = gpt("175B")
    assert costs.memory_bytes(model, one(tensor=8, pipeline=8)) < A100.memory_bytes
    assert costs.memory_bytes(model, one(tensor=8, pipeline=4)) > A100.memory_bytes


# --- seconds ---------------------------------------------------------------------------------------------------------


def test_matrix_products_take_the_flops_over_peak_and_efficiency():
    model = gpt("7B", batch=8)
    on, constants = one(microbatch=8), Constants(0.5, 0, 0)
    seconds = costs.layers_s(model, A100, on, constants) + costs.head_s(model, A100, on, constants)
    assert seconds == pytest.approx(formulas.iteration_flops(model, formulas.FULL) / (0.5 * 312e12))


def test_each_layer_and_microbatch_costs_memory_traffic_and_an_overhead():
    model, on = gpt("7B", batch=8), one(recompute=formulas.NONE)
    stored = S * 4096 * (34 + 5 * 32 * S / 4096)
    moved = costs.layers_s(model, A100, on, Constants(float("inf"), 2, 0))
    assert moved == pytest.approx(32 * 2 * 3 * stored / 2.039e12)
    assert costs.layers_s(model, A100, on, Constants(float("inf"), 0, 1e-3)) == pytest.approx(0.032)


def test_recompute_costs_a_forward_pass_or_that_of_the_attention_core():
    no_overhead = FITTED._replace(layer_overhead_s=0.0)
    none, selective, full = (
        float(costs.layers_s(gpt("7B"), A100, one(recompute=kind), no_overhead)[0])
        for kind in (formulas.NONE, formulas.SELECTIVE, formulas.FULL)
    )
    assert full / none == pytest.approx(4 / 3, rel=1e-3)
    assert none < selective < full


def test_tensor_parallelism_costs_six_all_reduces_a_layer_and_more_across_nodes():
    model = gpt("7B")
    inside, across = (float(costs.tensor_s(model, A100, one(tensor=t))[0]) for t in (8, 16))
    assert inside == pytest.approx(32 * 6 * (2 * 7 / 8) * (2 * S * 4096) / 300e9)
    assert across == pytest.approx(32 * 6 * (2 * 15 / 16) * (2 * S * 4096) / 100e9)
    assert costs.tensor_s(model, A100, one()) == 0


def test_gradients_are_summed_over_the_network_that_tensor_parallel_ranks_share():
    model, parameters = gpt("7B"), formulas.parameters(gpt("7B"))
    assert costs.data_s(model, A100, one(data=64)) == pytest.approx(2 * 63 / 64 * 4 * parameters / 100e9)
    assert costs.data_s(model, A100, one(tensor=8, data=8)) == pytest.approx(2 * 7 / 8 * 4 * parameters / 100e9)
    assert costs.data_s(model, A100, one(tensor=4, data=2)) == pytest.approx(4 * parameters / 4 / 300e9)
    shared = costs.data_s(model, A100, one(data=64, distributed=True))
    assert shared == pytest.approx(0.75 * costs.data_s(model, A100, one(data=64)))


def test_gradients_of_float16_are_half_as_much_to_sum():
    model = gpt("7B")
    half = costs.data_s(model, A100, one(data=64)) / 2
    for distributed in (False, True):
        on = one(data=64, summed_bytes=2, distributed=distributed)
        assert costs.data_s(model, A100, on) == pytest.approx(half)


def test_a_pipeline_has_a_bubble_of_p_minus_1_microbatches_less_with_interleaving():
    model = gpt("175B", batch=64, vocabulary=0)
    times = [float(costs.iteration_s(model, A100, one(8, p, chunks=c), FITTED)[0]) for p, c in ((8, 1), (8, 3))]
    rest = float((costs.data_s(model, A100, one(8, 8)) + costs.optimizer_s(model, A100, one(8, 8)))[0])
    assert (times[0] - rest) / (times[1] - rest) == pytest.approx(71 / (64 + 7 / 3))


def test_the_bubble_has_no_output_layer_for_only_the_last_stage_has_it():
    model, on = gpt("175B", batch=64), one(8, 8)
    stage = costs.layers_s(model, A100, on) + costs.tensor_s(model, A100, on)
    rest = costs.data_s(model, A100, on) + costs.optimizer_s(model, A100, on)
    expected = 71 * stage + 64 * costs.head_s(model, A100, on) + rest
    assert costs.head_s(model, A100, on) > 0
    assert costs.iteration_s(model, A100, on) == pytest.approx(expected)


def test_padding_counts_the_padded_work():
    model = gpt("7B", batch=10)
    assert costs.microbatches(model, one(data=4, microbatch=2)) == 2
    assert costs.stage_layers(model, one(pipeline=7)) == 5
    assert costs.iteration_s(model, A100, one(data=4, microbatch=1), NOTHING) > 0


# --- catalogue --------------------------------------------------------------------------------------------------------


def test_the_catalogue_has_the_papers_gpus_and_sizes():
    assert list(catalogue.accelerators()) == ["A100", "A800", "H100", "H800", "H200", "B200"]
    assert list(catalogue.sizes()) == ["1.3B", "7B", "13B", "70B", "175B"]


def test_figures_are_those_of_the_data_sheets():
    assert catalogue.accelerator("A100").peak_flops == 312e12
    assert catalogue.accelerator("H200").memory_bytes == 141e9
    assert catalogue.accelerator("A800").link_bandwidth < catalogue.accelerator("A100").link_bandwidth
    assert catalogue.size("175B") == catalogue.Size(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200)


@pytest.mark.parametrize("name", ["accelerators.toml", "models.toml"])
def test_every_entry_has_a_comment_that_names_its_source(name):
    text = files("unicron.costmodel").joinpath(name).read_text()
    if name == "models.toml":
        assert "arXiv:2005.14165" in text
        return
    for entry in tomllib.loads(text):
        before = text.partition(f"\n[{entry}]")[0].rpartition("\n\n")[2]
        assert before.startswith("# NVIDIA"), entry


@pytest.mark.parametrize(("read", "says"), [(catalogue.accelerator, "B200"), (catalogue.size, "175B")])
def test_an_unknown_name_is_refused_with_the_known_ones(read, says):
    with pytest.raises(InvalidInputError, match=says):
        read("V100")


def test_task_files_and_checks_need_no_numpy():
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "import unicron.checks, unicron.taskfile, unicron.costmodel.formulas\n"
        "from pathlib import Path\n"
        "text = 'name: a\\ncommand: b\\nmodel: {size: 7B, batch: 8}'\n"
        "print(unicron.taskfile.parse(text, Path('/t.yaml')).spec.model.layers)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("32\n", "")


def test_sizes_have_the_fields_of_a_model():
    assert set(catalogue.Size.__struct_fields__) < set(ModelSpec.__struct_fields__)
