import pytest
from helpers.costmodel import gpt, one

from unicron.costmodel import catalogue, costs, formulas
from unicron.costmodel.costs import FITTED, Constants

A100 = catalogue.accelerator("A100")
H, S, V = 12288, 2048, 51200
NOTHING = Constants(float("inf"), 0, 0)


# --- counts -----------------------------------------------------------------------------------------------------------


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


# --- bytes ------------------------------------------------------------------------------------------------------------


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


# --- seconds ----------------------------------------------------------------------------------------------------------


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
