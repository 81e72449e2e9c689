"""A byte-level GPT trained on the text files of a folder, by default the source of the Python standard library.

    python train.py                     one plain process
    unicron submit examples/gpt/task.yaml    the same script on a cluster, healing itself

What a script needs for that stands between the two lines of dashes below.
"""

import argparse
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from unicron.train import Session


class Block(nn.Module):
    """One transformer layer: causal self-attention and a feed-forward part, both behind a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output; `x` is (batch, sequence, width), and so is it."""
        batch, sequence, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, sequence, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, sequence, width))
        mixed: torch.Tensor = x + self.mlp(self.norm_mlp(x))
        return mixed


class GPT(nn.Module):
    """A decoder-only transformer over bytes."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, sequence, 256) of the next byte; `tokens` is (batch, sequence)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.embed(tokens) + self.position(positions))))
        return logits


def read_corpus(folder: Path, limit: int = 4_000_000) -> torch.Tensor:
    """Return the first `limit` bytes of the text files below `folder`, in order of their names."""
    found = bytearray()
    for path in sorted([*folder.glob("*.py"), *folder.glob("*.txt"), *folder.glob("*.md")]):
        found += path.read_bytes()
        if len(found) >= limit:
            break
    if len(found) < 10_000:
        raise SystemExit(
            f"{folder}: {len(found)} bytes in .py, .txt and .md files are too few; give a folder with more"
        )
    return torch.frombuffer(found[:limit], dtype=torch.uint8)


def batch_of(corpus: torch.Tensor, size: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw `size` pieces of text; the session has seeded torch for this very microbatch."""
    starts = torch.randint(len(corpus) - context - 1, (size,))
    pieces = torch.stack([corpus[start : start + context + 1] for start in starts.tolist()]).long()
    return pieces[:, :-1], pieces[:, 1:]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path(sysconfig.get_path("stdlib")))
    parser.add_argument("--out", type=Path, help="file that the parameters are to be in at the end")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--iterations", type=int, default=50, help="without a cluster; else the task file decides")
    parser.add_argument("--microbatches", type=int, default=8, help="likewise")
    parser.add_argument("--batch", type=int, default=8, help="samples of a microbatch")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--accumulate", choices=("float32", "float64"), default="float64")
    return parser.parse_args()


def main() -> None:
    """Train."""
    args = arguments()
    corpus = read_corpus(args.corpus)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    model = GPT(args.width, args.layers, heads=4, context=args.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # ---------------------------------------------------------------------------------------------------------------
    session = Session(
        seed=args.seed,
        accumulate_dtype=getattr(torch, args.accumulate),
        iterations=args.iterations,
        microbatches=args.microbatches,
    )
    session.protect(model=model, optimizer=optimizer)
    if args.out:
        session.save(args.out)
    for iteration in session.iterations():
        for _ in session.microbatches():
            inputs, targets = batch_of(corpus, args.batch, args.context)
            logits = model(inputs.to(device))
            session.backward(functional.cross_entropy(logits.flatten(0, 1), targets.to(device).flatten()))
        session.step()
        # -----------------------------------------------------------------------------------------------------------
        print(f"iteration {iteration} loss {session.loss:.4f} on {session.world_size} workers", flush=True)


if __name__ == "__main__":
    main()
