"""A decoder that is spread over several workers by torch's own means, in whatever layout the task file asks for.

    python train.py                               one plain process
    unicron submit examples/parallel/task.yaml    the same script on a cluster, healing itself

The layout is in `session.mesh`; each dimension of size 1 leaves its part of the model whole. Losses are the same in
all layouts, up to the order of summation.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from unicron.train import Session

VOCABULARY = 256


class Block(nn.Module):
    """One transformer layer; linear layers by columns come before those by rows, as tensor parallelism wants it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output; `x` is (batch, sequence, width), and so is it."""
        normed = self.norm_attention(x)
        # a tensor-parallel rank has some of the heads
        query, key, value = (
            part(normed).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        mixed: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm_mlp(x))))
        return mixed


class Decoder(nn.Module):
    """The layers of one pipeline stage; the first embeds, the last has the head."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(VOCABULARY, width)
        self.position = nn.Parameter(torch.randn(context, width) / width**0.5)
        self.blocks = nn.ModuleDict({str(number): Block(width, heads) for number in range(layers)})
        self.head: nn.Module | None = nn.Linear(width, VOCABULARY, bias=False)

    def keep(self, stage: int, stages: int) -> None:
        """Keep what belongs to one stage of the pipeline."""
        if len(self.blocks) % stages:
            raise SystemExit(f"--layers {len(self.blocks)}: must be a multiple of the {stages} pipeline stages")
        each = len(self.blocks) // stages
        for name in list(self.blocks):
            if int(name) // each != stage:
                del self.blocks[name]
        if stage > 0:
            self.embed = self.position = None  # type: ignore[assignment]
        if stage < stages - 1:
            self.head = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, sequence, 256) of tokens (batch, sequence), or what the next stage goes on with."""
        if self.embed is not None:
            x = self.embed(x) + self.position[: x.shape[1]]
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if self.head is not None else x


def spread(model: Decoder, mesh: Any, heads: int) -> None:
    """Spread a model over the mesh of a replica."""
    model.keep(mesh["pipeline"].get_local_rank(), mesh["pipeline"].size())
    if (tensor := mesh["tensor"]).size() > 1:
        from torch.distributed.tensor.parallel import (  # noqa: PLC0415 takes a second, and most layouts need none
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        if heads % tensor.size():
            raise SystemExit(f"--heads {heads}: must be a multiple of the {tensor.size()} tensor-parallel ranks")
        plan: dict[str, Any] = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
        plan |= dict.fromkeys(("out", "down"), RowwiseParallel())
        for block in model.blocks.values():
            parallelize_module(block, tensor, plan, src_data_rank=None)
    if (shard := mesh["shard"]).size() > 1:
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 likewise

        for block in model.blocks.values():
            fully_shard(block, mesh=shard)
        fully_shard(model, mesh=shard)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="folder of the file model.pt that the parameters are to be in at the end"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=20, help="without a cluster; else the task file decides")
    parser.add_argument("--microbatches", type=int, default=8, help="likewise")
    parser.add_argument("--batch", type=int, default=8, help="samples of a microbatch")
    parser.add_argument("--chunks", type=int, default=4, help="into which a pipeline cuts a microbatch")
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    """Train on a language that a few rules make up."""
    args = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    model = Decoder(args.width, args.layers, args.heads, args.context)
    session = Session(
        seed=args.seed, accumulate_dtype=torch.float64, iterations=args.iterations, microbatches=args.microbatches
    )
    mesh = session.mesh
    if args.batch % (shards := mesh["shard"].size()):
        raise SystemExit(
            f"--batch {args.batch}: must be a multiple of the {shards} shards, which count alike in the mean"
        )
    model.to(device)
    spread(model, mesh, args.heads)
    # one by one: torch does not update parameters that are spread together with those that are whole
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    session.protect(model=model, optimizer=optimizer, rates=rates)
    if args.out:
        session.save(args.out / "model.pt")
    pipeline, schedule = mesh["pipeline"], None
    first, last = (pipeline.get_local_rank() == end for end in (0, pipeline.size() - 1))
    if pipeline.size() > 1:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # noqa: PLC0415 likewise

        stage = PipelineStage(model, pipeline.get_local_rank(), pipeline.size(), device, group=pipeline.get_group())
        schedule = Schedule1F1B(stage, args.chunks, loss_fn=loss_of)
    shard = mesh["shard"].get_local_rank()
    for iteration in session.iterations():
        for _ in session.microbatches():
            text = torch.randint(VOCABULARY, (args.batch, args.context + 1))
            text = ((text.cumsum(1) + text[:, :1]) % VOCABULARY).to(device)  # the same on all ranks of the replica
            inputs, targets = text[shard::shards, :-1].contiguous(), text[shard::shards, 1:]
            if schedule is None:
                session.backward(loss_of(model(inputs), targets))
            else:
                session.run(schedule, *([inputs] if first else []), target=targets if last else None)
        session.step()
        rates.step()
        print(f"iteration {iteration} loss {session.loss:.6f} on {session.world_size} workers", flush=True)


if __name__ == "__main__":
    main()
