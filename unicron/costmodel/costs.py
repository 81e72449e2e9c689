"""Seconds and bytes that a parallel configuration costs each GPU.

All functions take one `LayoutArrays`, whose entries are arrays that broadcast against each other, and return arrays of
the broadcast shape. Sources: Narayanan et al. 2021 (arXiv:2104.04473), Korthikanti et al. 2022 (arXiv:2205.05198), and
Rajbhandari et al. 2020 (arXiv:1910.02054) for the optimizer that is spread over the data-parallel ranks.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from unicron.contracts.tasks import ModelSpec
from unicron.costmodel import formulas
from unicron.costmodel.catalogue import Accelerator

Array = NDArray[Any]

PARAMETER_BYTES, GRADIENT_BYTES, OPTIMIZER_BYTES = 2, 4, 12
"""Of each parameter: bfloat16; float32 main gradient; float32 main parameter and Adam's two moments."""


class Constants(NamedTuple):
    """Constants that data sheets lack. The time of an iteration is linear in `1 / matmul_efficiency` and the other two.

    Attributes:
        matmul_efficiency: share of the peak that large matrix products reach.
        touches: how often each byte of an activation that is stored passes between GPU and memory in one pass
            (written, read by the next operation, and more where operations are not fused).
        layer_overhead_s: seconds of one layer with one microbatch that don't depend on its size: launching some
            hundred kernels, and the ends of matrix products that leave the GPU half empty.
    """

    matmul_efficiency: float
    touches: float
    layer_overhead_s: float


FITTED = Constants(matmul_efficiency=0.79, touches=3.07, layer_overhead_s=1.8e-3)
"""Fitted on the 26 rows of the 3.6B model in data/throughput/vtrain_multi.csv, and on nothing else.

`python -m benchmarks.throughput_model` fits them again, and judges them on the models that they were not fitted on.
"""


class LayoutArrays(NamedTuple):
    """Parallel configurations.

    Attributes:
        tensor, pipeline, data: degrees of parallelism; their product is the number of GPUs.
        microbatch: sequences of one microbatch.
        recompute: NONE, SELECTIVE (together with sequence parallelism) or FULL of `formulas`.
        distributed: whether the data-parallel ranks share the optimizer state out (Megatron's distributed optimizer).
        chunks: model chunks of a GPU in the interleaved schedule; 1 is the plain one.
        summed_bytes: of a gradient on its way between data-parallel ranks. Megatron sums float32 where it trains in
            bfloat16, and 2 bytes where it trains in float16.
    """

    tensor: Array
    pipeline: Array
    data: Array
    microbatch: Array
    recompute: Array
    distributed: Array
    chunks: int = 1
    summed_bytes: int = GRADIENT_BYTES

    @property
    def selective(self) -> Array:
        """For layouts that recompute only the attention core, and split norms and dropouts along the sequence."""
        return np.equal(self.recompute, formulas.SELECTIVE)

    @property
    def full(self) -> Array:
        """For layouts that recompute whole layers."""
        return np.equal(self.recompute, formulas.FULL)


def microbatches(model: ModelSpec, on: LayoutArrays) -> Array:
    """Return m, the microbatches of a pipeline in one iteration; the last may be padded."""
    return -(-model.batch // (on.data * on.microbatch))


def stage_layers(model: ModelSpec, on: LayoutArrays) -> Array:
    """Return the layers of the largest pipeline stage."""
    return -(-model.layers // on.pipeline)


# --- bytes ------------------------------------------------------------------------------------------------------------


def memory_bytes(model: ModelSpec, on: LayoutArrays) -> Array:
    """Return the bytes that the fullest GPU needs, that of the first pipeline stage."""
    return state_bytes(model, on) + activation_bytes(model, on)


def stage_parameters(model: ModelSpec, on: LayoutArrays) -> Array:
    """Return the parameters on one GPU of the first stage, which also has the embedding."""
    layers = stage_layers(model, on) * formulas.layer_parameters(model)
    return (layers + model.vocabulary * model.hidden) / on.tensor


def state_bytes(model: ModelSpec, on: LayoutArrays) -> Array:
    """Return the bytes of parameters, gradients and optimizer: 18 a parameter, or 6 + 12/d with a distributed one."""
    share = np.where(on.distributed, on.data, 1)
    return stage_parameters(model, on) * (PARAMETER_BYTES + GRADIENT_BYTES + OPTIMIZER_BYTES / share)


def activation_bytes(model: ModelSpec, on: LayoutArrays) -> Array:
    """Return the bytes of activations kept for the backward pass, by the first of the 1F1B stages.

    It holds those of min(p, m) microbatches. One layer, in multiples of s b h: 34 + 5 a s/h without parallelism, of
    which all but 10 are split over the tensor-parallel ranks; 34/t with sequence parallelism and selective recompute;
    2 with full recompute. What is recomputed is there once, for the layer at work.
    """
    rest, split, core = _layer_bytes(model, on)
    whole = rest + split + core
    kept = np.where(on.full, _hidden_bytes(model, on), np.where(on.selective, rest + split, whole))
    working = np.where(on.full, whole, np.where(on.selective, core, 0.0))
    in_flight = np.minimum(on.pipeline, microbatches(model, on))
    head = 4.0 * model.sequence * on.microbatch * (model.hidden + model.vocabulary) / on.tensor  # float32 logits
    return kept * stage_layers(model, on) * in_flight + working + np.where(on.pipeline == 1, head, 0.0)


def _hidden_bytes(model: ModelSpec, on: LayoutArrays) -> Array:
    """Return 2 s b h, the bfloat16 activations between two layers."""
    return 2.0 * model.sequence * on.microbatch * model.hidden


def _layer_bytes(model: ModelSpec, on: LayoutArrays) -> tuple[Array, Array, Array]:
    """Return what a layer stores of a microbatch: outside of tensor parallelism, inside of it, and attention's core."""
    each = _hidden_bytes(model, on) / 2
    rest = 10 * each / np.where(on.selective, on.tensor, 1)
    core = 5.0 * model.heads * model.sequence**2 * on.microbatch / on.tensor
    return rest, 24 * each / on.tensor, core


# --- seconds ----------------------------------------------------------------------------------------------------------


def iteration_s(model: ModelSpec, gpu: Accelerator, on: LayoutArrays, constants: Constants = FITTED) -> Array:
    """Return the seconds of an iteration of the last stage: its pipeline, the gradients' sum, the update.

    It works on m microbatches, and waits while one of them passes forward and backward through the p - 1 stages before
    it, or a chunk of each where the schedule is interleaved. Those have no output layer.

    Sending activations between stages and overlap of the gradients' sum with the backward pass are left out: the
    measured rows show neither (docs/reference/planning.md).
    """
    own = microbatches(model, on)
    slots = own + (on.pipeline - 1) / on.chunks
    layers = layers_s(model, gpu, on, constants) + tensor_s(model, gpu, on)
    pipeline: Array = slots * layers + own * head_s(model, gpu, on, constants)
    return pipeline + data_s(model, gpu, on) + optimizer_s(model, gpu, on)


def layers_s(model: ModelSpec, gpu: Accelerator, on: LayoutArrays, constants: Constants = FITTED) -> Array:
    """Return the seconds that the layers of a stage compute on a microbatch, forward and backward."""
    layers = stage_layers(model, on)
    per_layer = np.array([formulas.layer_flops(model, kind) for kind in range(len(formulas.RECOMPUTE))])
    flops = on.microbatch * layers * per_layer[on.recompute] / on.tensor
    rest, split, core = _layer_bytes(model, on)
    passes = np.array([3.0, 3.0, 4.0])[on.recompute]  # forward, twice as much backward, forward again
    moved = passes * (rest + split + core) + np.where(on.selective, core, 0.0)
    matmul: Array = flops / (gpu.peak_flops * constants.matmul_efficiency)
    other: Array = layers * (constants.touches * moved / gpu.memory_bandwidth + constants.layer_overhead_s)
    return matmul + other


def head_s(model: ModelSpec, gpu: Accelerator, on: LayoutArrays, constants: Constants = FITTED) -> Array:
    """Return the seconds that the output layer, which only the last stage has, computes on a microbatch."""
    flops = on.microbatch * formulas.head_flops(model) / on.tensor
    seconds: Array = flops / (gpu.peak_flops * constants.matmul_efficiency)
    return seconds


def tensor_s(model: ModelSpec, gpu: Accelerator, on: LayoutArrays) -> Array:
    """Return the seconds of tensor-parallel communication of a microbatch in one stage.

    Four all-reduces a layer, six with full recompute, each of 2(t-1)/t * 2 b s h bytes. A group larger than a node
    goes at the pace of the network.
    """
    calls = np.array([4.0, 4.0, 6.0])[on.recompute]
    sent = calls * 2 * (on.tensor - 1) / on.tensor * _hidden_bytes(model, on) * stage_layers(model, on)
    seconds: Array = sent / np.where(on.tensor <= model.gpus_per_node, gpu.link_bandwidth, gpu.node_bandwidth)
    return seconds


def data_s(model: ModelSpec, gpu: Accelerator, on: LayoutArrays) -> Array:
    """Return the seconds of summing the gradients over the data-parallel ranks.

    An all-reduce of 2(d-1)/d times the gradients; with a distributed optimizer half of that, and the parameters are
    gathered. Each tensor-parallel rank of a node sums its own part, so these sums share the node's network.
    """
    share = (on.data - 1) / on.data
    back = np.where(on.distributed, PARAMETER_BYTES, on.summed_bytes)
    sent = share * (on.summed_bytes + back) * stage_parameters(model, on)
    network = gpu.node_bandwidth / np.minimum(on.tensor, model.gpus_per_node)
    seconds: Array = sent / np.where(on.tensor * on.data <= model.gpus_per_node, gpu.link_bandwidth, network)
    return seconds


def optimizer_s(model: ModelSpec, gpu: Accelerator, on: LayoutArrays) -> Array:
    """Return the seconds of the update, which reads and writes the state once."""
    return 2 * state_bytes(model, on) / gpu.memory_bandwidth
