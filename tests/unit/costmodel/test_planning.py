import msgspec
import numpy as np
import pytest
from helpers.costmodel import gpt, one

from unicron.contracts.tasks import ParallelLayout
from unicron.costmodel import catalogue, costs, formulas, planning
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
