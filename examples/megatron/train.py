"""megatron-core's GPT model, spread over several workers by its own tensor and pipeline parallelism.

    unicron submit examples/megatron/task.yaml

Without GPUs it trains on CPUs. The lines that a script of megatron-core changes by are marked with `# unicron`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from unicron.train import Session, megatron  # unicron

VOCABULARY = 128


def model_provider(args: argparse.Namespace) -> DistributedDataParallel:
    """Return this rank's part of the model."""
    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.width,
        num_attention_heads=args.heads,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        args.context,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    sharded = DistributedDataParallelConfig(use_distributed_optimizer=args.distributed_optimizer)
    return DistributedDataParallel(config, sharded, model)


def batches(args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Yield batches of a language that a few rules make up; ranks that share a batch are at the same seed."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    while True:
        text = torch.randint(VOCABULARY, (args.batch * size, args.context + 1))
        yield ((text.cumsum(1) + text[:, :1]) % VOCABULARY)[rank::size]


def loss_of(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the mean of the losses of all tokens, to go back from and to report."""
    loss = losses.float().mean()
    return loss, {"lm loss": loss.detach().clone()}


def forward_step(iterator: Iterator[torch.Tensor], model: torch.nn.Module) -> tuple[torch.Tensor, object]:
    """Run the model forward on the next batch."""
    text = next(iterator)
    tokens, labels = text[:, :-1], text[:, 1:]
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    mask = torch.ones(1, 1, tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
    return model(tokens, positions, mask, labels=labels), loss_of


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="folder of the file model.pt that all places' parameters are to be in at the end"
    )
    parser.add_argument("--iterations", type=int, default=20, help="without a cluster; else the task file decides")
    parser.add_argument("--microbatches", type=int, default=8, help="likewise")
    parser.add_argument("--chunks", type=int, default=2, help="batches that a session's microbatch is made of")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--distributed-optimizer", action="store_true", help="spread its state over layout.shard")
    return parser.parse_args()


def main() -> None:
    """Train."""
    args = arguments()
    session = Session(  # unicron
        accumulate_dtype=torch.float64, iterations=args.iterations, microbatches=args.microbatches
    )
    megatron.initialize_model_parallel(session)  # unicron
    torch.manual_seed(1)
    model = [model_provider(args)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(lr=1e-3, clip_grad=1.0, use_distributed_optimizer=args.distributed_optimizer),
        model,
        use_gloo_process_groups=False,
    )
    training = megatron.Training(session, model, optimizer)  # unicron
    if args.out:
        session.save(args.out / "model.pt")  # unicron
    for iteration in session.iterations():  # unicron
        for _ in session.microbatches():  # unicron
            training.run(  # unicron
                forward_step,
                batches(args),
                num_microbatches=args.chunks,
                seq_length=args.context,
                micro_batch_size=args.batch,
            )
        training.step()  # unicron
        print(f"iteration {iteration} loss {session.loss:.6f} on {session.world_size} workers", flush=True)


if __name__ == "__main__":
    main()
