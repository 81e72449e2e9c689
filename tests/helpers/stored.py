"""Checkpoints on storage, as tests write and damage them."""

import torch

from unicron.contracts.tasks import ParallelLayout
from unicron.snapshots.storage.root import begin
from unicron.train.snapshots.gathering import collect_state
from unicron.train.snapshots.stored.commit import commit
from unicron.train.snapshots.stored.parts import write_part

TASK = "gpt"


def trained(seed=0):
    """Return a model and an optimizer with moments."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 8)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def save(root, iteration, states, layout=None, task=TASK):
    """Write a checkpoint of what each place has; return it."""
    layout = ParallelLayout(shard=len(states)) if layout is None else layout
    saving = begin(str(root), task, iteration, layout)
    return commit(saving, [write_part(saving, place, state) for place, state in enumerate(states)])


def save_trained(root, iteration, seed=0):
    """Write a checkpoint of a whole small model; return it and what was in it."""
    state = collect_state(iteration, trained(seed))
    return save(root, iteration, [state]), state


def of_model(iteration, **model):
    """Return the state of a place that has these parameters and nothing else."""
    return {"iteration": iteration, "objects": {"model": model}}


def spread(whole, parts, axis=0):
    """Return a tensor as each of so many places has it."""
    found, at = [], 0
    for shard in torch.chunk(whole, parts, axis):
        offset = [0] * whole.dim()
        offset[axis] = at
        at += shard.shape[axis]
        found.append({"__spread__": [list(whole.shape), offset], "shard": shard.clone()})
    return found


def alter(path, at=-200):
    """Change one byte of a file; a negative one counts from its end."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
