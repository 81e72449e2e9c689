"""Scripts that are made up of the parts in `parts.toml`, as text."""

import random
import re
import tomllib
from pathlib import Path
from textwrap import indent

SHAPES = ("epochs", "enumerated", "while", "iterator", "function", "nested_function", "generator")
SCOPES = ("module", "main", "class", "state", "exit")
EPOCHS, BATCHES = 4, 10
PLACES = ["batch"] * 3 + ["loss"] * 10 + ["backward", "updated", "ended", "ended", "closing", "closing"]
"""Of a body, about as much as they take in real scripts: between the end of the reduce and of the update is little."""

IMPORTS = """import collections, contextlib, copy, os, random, sys
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from benchmarks.inplace_scripts.case import FOLDER, keep, strike
rank = int(os.environ["RANK"])
os.write(os.open(FOLDER / "begun", os.O_WRONLY | os.O_CREAT | os.O_APPEND), f"{rank}\\n".encode())"""
STRIKE = "strike(rank, $step)"
DATA = """x = torch.randn(60, 8)
$data, $history, $total, $step = TensorDataset(x, x.sum(1, keepdim=True).sin()), [], 0.0, 0
$held = torch.randn(16, 8)
$held_y = $held.sum(1, keepdim=True).sin()"""
MEAN = f"""mean = torch.tensor($total, dtype=torch.float64)
dist.all_reduce(mean)
$history.append(float(mean) / {2 * BATCHES})
$total = 0.0"""
KEEP = "keep(rank, net=$net, optimizer=$optimizer, history=$history, step=$step, ...drawn=drawn_last)"
DRAWN = "[float(torch.rand(())), random.random(), float(np.random.rand())]"
USUAL = {
    "metric": {"setup": "$told = []", "kept": "told=$told"},
    "evaluation": {"setup": "$errors = []", "kept": "errors=$errors"},
}
"""Defaults of choices of a kind."""


def _expanded(kind: str, part: dict[str, str]) -> dict[str, str]:
    """Return a choice with what it leaves out."""
    if "torch" not in part:
        return USUAL.get(kind, {}) | part if part else part
    schedule = {
        "setup": f"$scheduler = torch.optim.lr_scheduler.{part['torch']}",
        "kept": "rates=$scheduler.state_dict()['_last_lr']",
    }
    return schedule | part if "closing" in part else schedule | part | {"updated": "$scheduler.step()"}


KINDS = {
    kind: {name: _expanded(kind, part) for name, part in choices.items()}
    for kind, choices in tomllib.loads(Path(__file__).with_name("parts.toml").read_text()).items()
}


def made(seed: int, number: int) -> tuple[str, dict[str, str]]:
    """Return a script, and what was drawn for it."""
    dice = random.Random(f"{seed}:{number}")
    chosen = {
        kind: dice.choice([*options, *(["none"] * 2 if "none" in options else [])]) for kind, options in KINDS.items()
    }
    chosen |= {"shape": dice.choice(SHAPES), "scope": dice.choice(SCOPES), "strike": dice.choice(PLACES)}
    chosen["at"] = f"{dice.randrange(2)}:{dice.randrange(1, EPOCHS * BATCHES - 2)}"
    if chosen["strike"] == "closing":
        chosen["at"] = f"{dice.randrange(2)}:{BATCHES * dice.randrange(1, EPOCHS)}"
    every = int(KINDS["accumulation"][chosen["accumulation"]]["every"])
    if chosen["strike"] in {"backward", "updated"}:  # which come once an update
        rank, iteration = map(int, chosen["at"].split(":"))
        chosen["at"] = f"{rank}:{iteration // every * every + every - 1}"
    return written(chosen), chosen


def written(chosen: dict[str, str]) -> str:
    """Return the text of a script."""
    parts = [KINDS[kind][chosen[kind]] for kind in KINDS]

    def at(place: str) -> str:
        return block(*(part.get(place, "") for part in parts), STRIKE if chosen["strike"] == place else "")

    def first(name: str, default: str = "") -> str:
        return next((part[name] for part in parts if name in part), default)

    every, flags = int(first("every")), sorted({part["flags"] for part in parts if "flags" in part})
    wrapped = f"$model = DistributedDataParallel({', '.join(['$net', *flags])})"
    setup = block(at("seeds"), DATA, at("models"), wrapped, at("setup"))
    updates = block(at("backward"), at("clip"), "$optimizer.step()", at("updated"), "$optimizer.zero_grad()")
    step = block(
        f"last = $step % {every} == {every - 1}\n{at('batch')}",
        f"with {first('context', 'contextlib.nullcontext()')}:",
        deeper(block(at("loss"), f"(loss / {every}).backward()")),
        "if last:",
        deeper(updates),
        block("$total += float(loss.detach())", at("ended"), "$step += 1"),
    )
    closing = block(MEAN, at("closing"))
    item = "number" if first("unpacked") else "x, y"
    defined, loops = _loops(chosen["shape"], item, first("source"), at("epoch"), step, closing, first("stop"))
    kept = "".join(f"{part['kept']}, " for part in parts if "kept" in part)
    ending = block(at("results"), f"drawn_last = {DRAWN}", KEEP.replace("...", kept), "dist.destroy_process_group()")
    return _scoped(chosen["scope"], block(IMPORTS, at("imports"), at("classes")), setup, defined, loops, ending)


def block(*texts: str) -> str:
    """Return lines one after the other, without those that are empty."""
    return "\n".join(text.strip("\n") for text in texts if text.strip())


def deeper(text: str, levels: int = 1) -> str:
    """Return lines further to the right."""
    return indent(text, "    " * levels)


def _loops(shape: str, item: str, source: str, epoch: str, step: str, closing: str, stop: str) -> tuple[str, str]:
    """Return functions that the loops call, and the loops."""
    closing = block(closing, stop and f"if {stop}:\n    break") if shape not in {"iterator", "generator"} else closing
    over = f"for {item} in {source}:"
    if shape == "enumerated" and "," in item:
        over = f"for index, ({item}) in enumerate({source}):"
    inner, rounds, begin = block(over, deeper(step)), f"for epoch in range({EPOCHS}):", block("epoch = 0", epoch)
    again = block("epoch += 1", epoch)
    match shape:
        case "while":
            return "", block(f"epoch = 0\nwhile epoch < {EPOCHS}:", deeper(block(epoch, inner, closing, "epoch += 1")))
        case "function":
            called = block("def train_epoch(epoch):", deeper(inner))
            return called, block(rounds, deeper(block(epoch, "$$train_epoch(epoch)", closing)))
        case "nested_function":
            called = block(f"def train_step(epoch, {item}):", deeper(step), "def train_epoch(epoch):")
            called = block(called, f"    {over}\n        $$train_step(epoch, {item})")
            return called, block(rounds, deeper(block(epoch, "$$train_epoch(epoch)", closing)))
        case "iterator":
            batches = f"batches = iter({source})"
            ended = deeper(block(closing, again, batches, "continue"), 2)
            body = f"    try:\n        {item} = next(batches)\n    except StopIteration:\n{ended}"
            return "", block(begin, batches, f"while $step < {EPOCHS * BATCHES}:", body, deeper(step), closing)
        case "generator":
            called = f"def forever():\n    while True:\n        for each in {source}:\n            yield each"
            loop = f"batches = $$forever()\nfor index in range({EPOCHS * BATCHES}):\n    {item} = next(batches)"
            ends = block(f"if index % {BATCHES} == {BATCHES - 1}:", deeper(block(closing, again)))
            return called, block(begin, loop, deeper(block(step, ends)))
    return "", block(rounds, deeper(block(epoch, inner, closing)))


_ASSIGNED = re.compile(r"^\s*((?:\$\w+(?:, )?)+) (?:=|\+=) ", re.MULTILINE)


def _scoped(scope: str, head: str, setup: str, defined: str, loops: str, ending: str) -> str:
    """Return the text with its variables where they are to be: of the module, a function, an object or a namespace."""
    begin, variables, functions = "dist.init_process_group('gloo')", "", ""
    names = sorted({name for found in _ASSIGNED.findall(defined) for name in re.findall(r"\w+", found)})
    if scope == "class":
        variables = functions = "self."
        methods = re.sub(r"^def (\w+)\(", r"def \1(self, ", defined, flags=re.MULTILINE).replace("(self, )", "(self)")
        fit = block("def fit(self):", deeper(block(loops, ending)))
        body = deeper(block("def __init__(self):", deeper(setup), methods, fit))
        text = block(head, "class Training:", body, begin, "Training().fit()")
    elif scope == "state":
        variables = "state."
        state = "from types import SimpleNamespace\nstate = SimpleNamespace()"
        text = block(head, state, begin, setup, defined, loops, ending)
    else:
        where = f"    {'global' if scope == 'module' else 'nonlocal'} {', '.join(names)}"
        defined = re.sub(r"^def .*$", rf"\g<0>\n{where}", defined, flags=re.MULTILINE) if names else defined
        body = block(begin, setup, defined, loops, ending)
        call = "    sys.exit(main())" if scope == "exit" else "    main()"
        main = block("def main():", deeper(block(body, "return 0")), "if __name__ == '__main__':", call)
        text = block(head, body if scope == "module" else main)
    return re.sub(r"\$(\w+)", lambda found: variables + found[1], text.replace("$$", functions)) + "\n"
