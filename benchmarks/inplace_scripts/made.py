"""Scripts that are made up of the parts in `parts.toml` and `extras.toml`, as text."""

import random
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.inplace_scripts.shapes import BODIES, INNERS, OUTERS, Body, block, deeper, loops

SCOPES = ("module", "main", "class", "state", "exit", "record", "context")
SIZES = {  # samples, batches, epochs
    "small": (60, 10, 4),
    "many_samples": (3000, 10, 4),
    "large_batches": (6000, 10, 4),
    "more_samples": (300, 10, 4),
    "many_epochs": (24, 4, 12),
    "one_epoch": (288, 48, 1),
    "long": (540, 90, 4),
}
PLACES = ["batch"] * 4 + ["loss"] * 10 + ["backward", "backward", "updated", "ended", "ended", "closing", "closing"]
"""Of a body, about as much as they take in real scripts: between the end of the reduce and of the update is little."""

MOMENTS = {
    "batch": "head",
    "loss": "amid",
    "backward": "between",
    "updated": "behind",
    "ended": "behind",
    "closing": "epoch end",
}
"""What a place is to healing: before the forward pass, amid the passes, between reduce and update, or behind that."""

EXTRAS = [0, 1, 1, 2, 2, 3]  # how many kinds of `extras.toml` a script has
IMPORTS = """import collections, contextlib, copy, os, random, sys
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from benchmarks.inplace_scripts.case import FOLDER, begin, keep, strike
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
begin(rank)"""
STRIKE = "strike(rank, $step)"
DATA = """x = torch.randn(@samples, 8)
$data, $history, $total, $step = TensorDataset(x, x.sum(1, keepdim=True).sin()), [], 0.0, 0
$held = torch.randn(16, 8)
$held_y = $held.sum(1, keepdim=True).sin()"""
MEAN = """mean = torch.tensor($total, dtype=torch.float64)
dist.all_reduce(mean)
$history.append(float(mean) / (world * @batches))
$total = 0.0"""
KEEP = "keep(rank, net=$net, optimizer=$optimizer, history=$history, step=$step, ...drawn=drawn_last)"
DRAWN = "[float(torch.rand(())), random.random(), float(np.random.rand())]"
USUAL = {
    "metric": {"setup": "$told = []", "kept": "told=$told"},
    "evaluation": {"setup": "$errors = []", "kept": "errors=$errors"},
}
"""Defaults of choices of a kind."""

NAMES = {
    "net": ("net", "network", "encoder", "backbone"),
    "model": ("model", "ddp", "wrapped", "parallel"),
    "optimizer": ("optimizer", "opt", "optim"),
    "loader": ("loader", "train_loader", "dataloader", "train_dl"),
    "step": ("step", "iteration", "global_step", "n_iter", "it"),
    "history": ("history", "losses", "epoch_losses"),
    "data": ("data", "dataset", "train_set"),
    "total": ("total", "running_loss", "train_loss"),
}
"""What variables are called in scripts."""


def _expanded(kind: str, part: dict[str, Any]) -> dict[str, Any]:
    """Return a choice with what it leaves out."""
    if "torch" not in part:
        usual = USUAL.get(kind, {})
        return {**usual, **part, "setup": block(usual.get("setup", ""), part.get("setup", ""))} if usual else part
    schedule = {
        "setup": f"$scheduler = torch.optim.lr_scheduler.{part['torch']}",
        "kept": "rates=$scheduler.state_dict()['_last_lr']",
    }
    return schedule | part if "closing" in part else schedule | part | {"updated": "$scheduler.step()"}


def _kinds(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    read = tomllib.loads(Path(__file__).with_name(name).read_text())
    return {kind: {each: _expanded(kind, part) for each, part in choices.items()} for kind, choices in read.items()}


USUALLY, RARELY = _kinds("parts.toml"), _kinds("extras.toml")
KINDS = USUALLY | {kind: {"none": {}, **choices} for kind, choices in RARELY.items()}


def made(seed: int, number: int, ranks: Sequence[int] = (2,)) -> tuple[str, dict[str, str]]:
    """Return a script, and what was drawn for it; it runs on as many ranks as one of these says."""
    dice = random.Random(f"{seed}:{number}")
    chosen = {
        kind: dice.choice([*options, *(["none"] * 2 if "none" in options else [])]) for kind, options in USUALLY.items()
    }
    extras = dice.sample(sorted(RARELY), dice.choice(EXTRAS))
    chosen |= {kind: dice.choice(sorted(RARELY[kind])) if kind in extras else "none" for kind in RARELY}
    chosen["size"] = dice.choice([*SIZES, "small", "small", "many_samples"])
    _reconcile(chosen, dice)
    chosen |= {"outer": dice.choice(OUTERS), "inner": dice.choice(INNERS), "body": dice.choice(BODIES)}
    chosen |= {"scope": dice.choice(SCOPES), "names": str(dice.randrange(1000)), "strike": dice.choice(PLACES)}
    chosen |= {"program": "pipeline" if dice.random() < 1 / 40 else "loop", "ranks": str(dice.choice(list(ranks)))}
    chosen["at"] = _struck_at(chosen, dice)
    return written(chosen), chosen


def _reconcile(chosen: dict[str, str], dice: random.Random) -> None:
    """Draw anew what does not go with something else that was drawn."""
    options = {kind: list(choices) for kind, choices in KINDS.items()} | {"size": list(SIZES)}
    for _ in range(20):
        drawn = [(kind, KINDS[kind][name]) for kind, name in chosen.items() if kind in KINDS]
        only = [(kind, set(names)) for _, part in drawn for kind, names in part.get("only", {}).items()]
        without = [(kind, set(names)) for _, part in drawn for kind, names in part.get("without", {}).items()]
        wrong = [kind for kind, names in only if chosen[kind] not in names]
        wrong += [kind for kind, names in without if chosen[kind] in names]
        if not wrong:
            return
        kind = wrong[0]
        left = [name for name in options[kind] if all(name in names for about, names in only if about == kind)]
        left = [name for name in left if all(name not in names for about, names in without if about == kind)]
        if left:
            chosen[kind] = dice.choice(left)
        else:  # two extras that can't both be had
            chosen |= {about: "none" for about, part in drawn if about in RARELY and kind in part.get("only", {})}


def _struck_at(chosen: Mapping[str, str], dice: random.Random) -> str:
    """Return RANK:ITERATION, and `:raise` behind it where an exception takes the place of a kill."""
    _, batches, epochs = SIZES[chosen["size"]]
    epochs = min(epochs, 3) if chosen["keeper"] == "early_stop" else epochs  # it may have stopped by then
    rank, iteration = dice.randrange(int(chosen["ranks"])), dice.randrange(1, epochs * batches - 2)
    if chosen["strike"] == "closing":
        iteration = batches * dice.randrange(1, max(2, epochs))
    every = int(KINDS["accumulation"][chosen["accumulation"]]["every"])
    if chosen["strike"] in {"backward", "updated"}:  # which come once an update
        iteration = iteration // every * every + every - 1
    return f"{rank}:{iteration}{':raise' if dice.random() < 1 / 6 else ''}"


def written(chosen: Mapping[str, str]) -> str:
    """Return the text of a script."""
    if chosen["program"] == "pipeline":
        return _pipeline(chosen)
    parts, dice = [KINDS[kind][chosen[kind]] for kind in KINDS], random.Random(chosen["names"])
    samples, batches, epochs = SIZES[chosen["size"]]

    def at(place: str, *, mixed: bool = False) -> str:
        found = [part[place] for part in parts if part.get(place)]
        found += [STRIKE] if chosen["strike"] == place else []
        return block(*(dice.sample(found, len(found)) if mixed else found))

    def first(name: str, default: str = "") -> str:
        return next((part[name] for part in parts if name in part), default)

    every, flags = int(first("every")), sorted({part["flags"] for part in parts if "flags" in part})
    wrapped = f"$model = DistributedDataParallel({', '.join(['$net', *flags])})"
    optimizer = KINDS["optimizer"][chosen["optimizer"]]["setup"]
    others = [
        part["setup"] for kind in KINDS if kind != "optimizer" and (part := KINDS[kind][chosen[kind]]).get("setup")
    ]
    setup = block(at("seeds"), DATA, at("models"), wrapped, optimizer, at("grouped"), *others)
    loss = at("loss").replace("$model(", f"{first('forward', '$model')}(")
    updates = block(
        at("backward"), at("clip"), "$optimizer.step()", at("updated", mixed=True), "$optimizer.zero_grad()"
    )
    step = block(
        f"last = $step % {every} == {every - 1}\n{at('batch')}",
        f"with {first('context', 'contextlib.nullcontext()')}:",
        deeper(block(loss, f"(loss / {every}).backward()")),
        "if last:",
        deeper(updates.replace("@loss", loss.replace(STRIKE, "pass"))),
        block("$total += float(loss.detach())", at("ended", mixed=True), "$step += 1"),
    )
    epoch, source = _source(
        first("source"), at("epoch"), [KINDS[kind][chosen[kind]] for kind in ("wrapped", "threads", "bars")]
    )
    item = "number" if first("unpacked") else "x, y"
    body = Body(item, source, epoch, step, block(MEAN, at("closing", mixed=True)), first("stop"), first("rounds"))
    made = loops(chosen["outer"], chosen["inner"], chosen["body"], body, dice)
    kept = "".join(f"{part['kept']}, " for part in parts if "kept" in part)
    ending = block(at("results"), f"drawn_last = {DRAWN}", KEEP.replace("...", kept), "dist.destroy_process_group()")
    head = block(IMPORTS, at("imports"), made.imports, at("classes"), made.classes)
    text = _scoped(
        chosen["scope"], head, block(setup, made.setup), made.functions, block(made.late, made.loops), ending
    )
    sizes = {"samples": samples, "size": samples // batches, "batches": batches, "epochs": epochs}
    text = re.sub(r"@(samples|size|batches|epochs)\b", lambda found: str(sizes[found[1]]), text)
    return text.replace("@total", str(epochs * batches))


def _source(source: str, epoch: str, wraps: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """Return what is done as an epoch begins, and what it goes over, wrapped."""
    for part in wraps:
        if "over" in part:
            epoch, source = epoch.replace("@source", source), part["over"].replace("@source", source)
    return epoch, source


_ASSIGNED = re.compile(r"^\s*((?:\$\w+(?:, )?)+) (?:=|\+=) ", re.MULTILINE)


def _assigned(text: str) -> set[str]:
    return {name for found in _ASSIGNED.findall(text) for name in re.findall(r"\w+", found)}


def _scoped(scope: str, head: str, setup: str, functions: str, loops: str, ending: str) -> str:
    """Return the text with its variables where they are to be: of the module, a function, an object or a namespace."""
    begin, variables, called = "dist.init_process_group('gloo')", "", ""
    names = sorted(_assigned(functions))
    unset = [f"${name} = None" for name in names if name not in _assigned(setup)]
    setup = block(*unset, setup)
    if scope == "class":
        variables = called = "self."
        methods = re.sub(r"^def (\w+)\(", r"def \1(self, ", functions, flags=re.MULTILINE).replace("(self, )", "(self)")
        fit = block("def fit_all(self):", deeper(block(loops, ending)))
        body = deeper(block("def __init__(self):", deeper(setup), methods, fit))
        text = block(head, "class Training:", body, begin, "Training().fit_all()")
    elif scope == "state":
        variables = "state."
        state = "from types import SimpleNamespace\nstate = SimpleNamespace()"
        text = block(head, state, begin, setup, functions, loops, ending)
    else:
        where = f"    {'global' if scope == 'module' else 'nonlocal'} {', '.join(f'${name}' for name in names)}"
        functions = re.sub(r"^def .*$", rf"\g<0>\n{where}", functions, flags=re.MULTILINE) if names else functions
        text = block(head, _main(scope, begin, block(setup, functions, loops, ending)))
    return re.sub(r"\$(\w+)", lambda found: variables + found[1], _renamed(text.replace("$$", called))) + "\n"


def _main(scope: str, begin: str, body: str) -> str:
    """Return what is run, as a module or in a function."""
    if scope == "module":
        return block(begin, body)
    before, call = "", "    sys.exit(main())" if scope == "exit" else "    main()"
    if scope == "record":
        before = "from torch.distributed.elastic.multiprocessing.errors import record\n@record"
    if scope == "context":
        before = f"@contextlib.contextmanager\ndef distributed():\n    {begin}\n    yield dist.get_rank()"
        begin, body = "", f"with distributed():\n{deeper(body)}"
    return block(before, "def main():", deeper(block(begin, body, "return 0")), "if __name__ == '__main__':", call)


def _renamed(text: str) -> str:
    """Return a text whose usual variables have one of their names, by what else is in it."""
    dice = random.Random(text)
    for name, names in NAMES.items():
        text = re.sub(rf"\${name}\b", f"${dice.choice(names)}", text)
    return text


def _pipeline(chosen: Mapping[str, str]) -> str:
    """Return a script whose ranks are the stages of a pipeline."""
    dice = random.Random(chosen["names"])
    schedule, optimizer = dice.choice(["ScheduleGPipe", "Schedule1F1B"]), dice.choice(["SGD", "Adam"])
    strike = "strike(rank, step)"
    lines = ["# a pipeline", IMPORTS, f"from torch.distributed.pipelining import PipelineStage, {schedule}"]
    lines += ["dist.init_process_group('gloo')", "torch.manual_seed(3)"]
    lines += ["part = nn.Linear(8, 1) if rank == world - 1 else nn.Sequential(nn.Linear(8, 8), nn.Tanh())"]
    lines += ["stage = PipelineStage(part, rank, world, torch.device('cpu'))"]
    lines += [f"schedule = {schedule}(stage, {dice.choice(['world', '2 * world'])}, loss_fn=nn.functional.mse_loss)"]
    lines += [f"optimizer = torch.optim.{optimizer}(part.parameters(), lr=0.02)", "step, history = 0, []"]
    _, batches, epochs = SIZES[chosen["size"]]
    lines += [f"for step in range({epochs * batches}):"]
    body = [strike] if chosen["strike"] in {"batch", "loss"} else []
    body += ["x = torch.randn(12, 8, generator=torch.Generator().manual_seed(step))", "optimizer.zero_grad()"]
    body += ["losses = []", "if rank == 0:\n    schedule.step(x)", "elif rank == world - 1:"]
    body += ["    schedule.step(target=x.sum(1, keepdim=True), losses=losses)", "else:\n    schedule.step()"]
    body += [strike] if chosen["strike"] == "backward" else []
    body += ["optimizer.step()", "history.append(float(sum(losses)))"]
    body += [strike] if chosen["strike"] in {"updated", "ended", "closing"} else []
    lines += [deeper(block(*body)), "keep(rank, part=part, history=history)", "dist.destroy_process_group()"]
    return block(*lines) + "\n"
