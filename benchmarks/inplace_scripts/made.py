"""Scripts that are made up of the parts in `parts.toml`, as text."""

import random
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
DRAWN = "[float(torch.rand(())), random.random(), float(np.random.rand())]"
USUAL = {
    "metric": {"setup": "$told = []", "kept": "told=$told"},
    "evaluation": {"setup": "$errors = []", "kept": "errors=$errors"},
}
"""What choices of a kind have if they name nothing else."""

Lines = list[str]


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

    def lines(place: str) -> list[str]:
        found = [line for part in parts if place in part for line in part[place].split("\n")]
        return [*found, "strike(rank, $step)"] if chosen["strike"] == place else found

    every = next(part["every"] for part in parts if "every" in part)
    context = next((part["context"] for part in parts if "context" in part), "contextlib.nullcontext()")
    source = next(part["source"] for part in parts if "source" in part)
    stop = next((part["stop"] for part in parts if "stop" in part), "")
    flags = sorted({part["flags"] for part in parts if "flags" in part})
    wrap = f"$model = DistributedDataParallel({', '.join(['$net', *flags])})"
    whole = any("unpacked" in part for part in parts)
    setup = [
        *lines("seeds"),
        "x = torch.randn(60, 8)",
        "$data, $history, $total, $step = TensorDataset(x, x.sum(1, keepdim=True).sin()), [], 0.0, 0",
        "$held = torch.randn(16, 8)",
        "$held_y = $held.sum(1, keepdim=True).sin()",
        *lines("models"),
        wrap,
        *lines("setup"),
    ]
    updates = [
        *(["strike(rank, $step)"] if chosen["strike"] == "backward" else []),
        *lines("clip"),
        "$optimizer.step()",
        *lines("updated"),
        "$optimizer.zero_grad()",
    ]
    step = [
        f"last = $step % {every} == {int(every) - 1}",
        *lines("batch"),
        f"with {context}:",
        *indented(lines("loss")),
        f"    (loss / {every}).backward()",
        "if last:",
        *indented(updates),
        "$total += float(loss.detach())",
        *lines("ended"),
        "$step += 1",
    ]
    closing = [
        "mean = torch.tensor($total, dtype=torch.float64)",
        "dist.all_reduce(mean)",
        f"$history.append(float(mean) / {2 * BATCHES})",
        "$total = 0.0",
        *lines("closing"),
    ]
    item = "number" if whole else "x, y"
    defined, loops = _loops(chosen["shape"], item, source, lines("epoch"), step, closing, stop)
    ending = [
        *lines("results"),
        f"drawn_last = {DRAWN}",
        f"keep(rank, net=$net, optimizer=$optimizer, history=$history, step=$step, {_kept(parts)}drawn=drawn_last)",
        "dist.destroy_process_group()",
    ]
    head = [*IMPORTS.split("\n"), *lines("imports")]
    head += [line for part in parts if "classes" in part for line in ["", "", *part["classes"].split("\n")]]
    return _scoped(chosen["scope"], head, setup, defined, loops, ending)


def _kept(parts: Sequence[Any]) -> str:
    return "".join(f"{part['kept']}, " for part in parts if "kept" in part)


def indented(lines: Sequence[str]) -> list[str]:
    """Return lines one level deeper."""
    return [f"    {line}" if line else line for line in lines]


def _loops(
    shape: str, item: str, source: str, epoch: Lines, step: Lines, closing: Lines, stop: str
) -> tuple[Lines, Lines]:
    """Return functions that the loops call, and the loops."""
    stops = [f"if {stop}:", "    break"] if stop else []
    inner = [f"for {item} in {source}:", *indented(step)]
    if shape == "enumerated":
        inner = [f"for index, ({item}) in enumerate({source}):" if "," in item else inner[0], *indented(step)]
    rounds = [f"for epoch in range({EPOCHS}):", *indented([*epoch, *inner, *closing, *stops])]
    if shape in {"epochs", "enumerated"}:
        return [], rounds
    if shape == "while":
        rounds = ["epoch = 0", f"while epoch < {EPOCHS}:", *indented([*epoch, *inner, *closing, *stops, "epoch += 1"])]
        return [], rounds
    if shape == "function":
        called = ["def train_epoch(epoch):", *indented(inner)]
        return called, [rounds[0], *indented([*epoch, "$$train_epoch(epoch)", *closing, *stops])]
    if shape == "nested_function":
        names = item if item != "x, y" else "x, y"
        called = [f"def train_step(epoch, {names}):", *indented(step), ""]
        called += ["def train_epoch(epoch):", f"    for {item} in {source}:", f"        $$train_step(epoch, {names})"]
        return called, [rounds[0], *indented([*epoch, "$$train_epoch(epoch)", *closing, *stops])]
    if shape == "iterator":
        again = [*closing, "epoch += 1", *epoch, f"batches = iter({source})", "continue"]
        return [], [
            "epoch = 0", *epoch, f"batches = iter({source})", f"while $step < {EPOCHS * BATCHES}:", "    try:",
            f"        {item} = next(batches)", "    except StopIteration:", *indented(indented(again)), *indented(step),
            *closing,
        ]  # fmt: skip
    called = ["def forever():", "    while True:", f"        for each in {source}:", "            yield each"]
    rounds = ["epoch = 0", *epoch, "batches = $$forever()", f"for index in range({EPOCHS * BATCHES}):"]
    ends = [f"if index % {BATCHES} == {BATCHES - 1}:", *indented([*closing, "epoch += 1", *epoch])]
    return called, [*rounds, *indented([f"{item} = next(batches)", *step, *ends])]


_ASSIGNED = re.compile(r"^\s*((?:\$\w+(?:, )?)+) (?:=|\+=) ", re.MULTILINE)


def _scoped(scope: str, head: Lines, setup: Lines, defined: Lines, loops: Lines, ending: Lines) -> str:
    begin = ["dist.init_process_group('gloo')"]
    names = sorted({name for found in _ASSIGNED.findall("\n".join(defined)) for name in re.findall(r"\w+", found)})
    functions = Lines()
    for line in defined:
        functions.append(line)
        if line.startswith("def ") and names and scope in {"module", "main", "exit"}:
            functions.append(f"    {'global' if scope == 'module' else 'nonlocal'} {', '.join(names)}")
    if scope == "class":
        methods = [re.sub(r"^def (\w+)\(", r"def \1(self, ", line).replace("(self, )", "(self)") for line in defined]
        lines = [
            *head, "", "", "class Training:", "    def __init__(self):", *indented(indented(setup)), "",
            *indented(methods), "", "    def fit(self):", *indented(indented([*loops, *ending])), "",
            *begin, "Training().fit()",
        ]  # fmt: skip
        return _named(lines, "self.", "self.")
    if scope in {"main", "exit"}:
        lines = [*head, "", "", "def main():", *indented([*begin, *setup, *functions, *loops, *ending, "return 0"])]
        lines += ["", "", "if __name__ == '__main__':", "    sys.exit(main())" if scope == "exit" else "    main()"]
        return _named(lines, "", "")
    if scope == "state":
        lines = [*head, "from types import SimpleNamespace", "state = SimpleNamespace()", *begin, *setup, *functions]
        return _named([*lines, *loops, *ending], "state.", "")
    return _named([*head, *begin, *setup, *functions, *loops, *ending], "", "")


def _named(lines: Lines, variables: str, functions: str) -> str:
    text = "\n".join(line for line in lines if line is not None) + "\n"
    text = text.replace("$$", functions)
    return re.sub(r"\$(\w+)", lambda found: variables + found[1], text)
