"""Training scripts that are made up of parts, healed in place: none may become another training without a word.

    python -m benchmarks.inplace_made --count 500 --seed 1 --json
    python -m benchmarks.inplace_made --seed 1 --only 17 --keep /tmp/made

Each script has one choice of each kind in `inplace_parts.toml`, a shape of its loops and a place for its variables,
drawn at random. It is run by two plain processes, as torchrun would; then in place on one cluster, with its drill, and
with one rank killed once, at an iteration and at a place of its body that are drawn, too. What comes of both is
compared bit by bit.

The figures count scripts. `healed` are those whose results are the plain run's, where nobody but the rank that was
killed has begun again; `began_again` those with the same results where all have, `said` those of them of which the log
says why. `in_window` are those that began again since the rank was killed between a reduced gradient and the end of the
loop's body, when nobody could take its place. `refused` ended with the reason why they can't be healed in place,
`ended` with another. `drill_s` is the median time from a drill's end of a rank to its being made up. `not_measured`
fail by themselves, or were not struck. `wrong_silently` and `hung` are to be 0.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import re
import runpy
import signal
import socket
import statistics
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from unicron_deploy.embedded import Cluster
from unicron_deploy.nats_server import free_port

from benchmarks.inplace import MARK, result
from benchmarks.inplace_verdicts import difference
from benchmarks.output import as_json
from benchmarks.strikes import ROOT, say
from unicron.bootstrap import connected_client
from unicron.client import Client
from unicron.contracts.events import TaskRecovered
from unicron.contracts.failures import FailureStatus
from unicron.contracts.tasks import UNCOUNTED, Healing, ParallelLayout, TaskSpec

KINDS: dict[str, dict[str, dict[str, str]]] = tomllib.loads((ROOT / "benchmarks" / "inplace_parts.toml").read_text())
SHAPES = ("epochs", "enumerated", "while", "iterator", "function", "nested_function", "generator")
SCOPES = ("module", "main", "class", "state", "exit")
EPOCHS, BATCHES = 4, 10
PLACES = ["batch"] * 3 + ["loss"] * 10 + ["backward", "updated", "ended", "ended", "closing", "closing"]
"""Of a body, about as much as they take in real scripts: between the end of the reduce and of the update is little."""

WINDOW = ("backward", "updated", "ended")
VERDICTS = ("healed", "began_again", "refused", "ended", "not_measured", "hung", "wrong_silently")
PATIENCE_S = 60.0
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
OWN_CARRIER = re.compile(r"can't be carried to another process as it is: (.+)")


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


Lines = list[str]


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


# --- running them ----------------------------------------------------------------------------------------------------


def plain_rank(script: str, folder: str, rank: int, port: int) -> None:
    """Be one rank of a plain run."""
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    log = os.open(Path(folder, f"log-{rank}"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = [script, folder]
    multiprocessing.set_start_method("fork", force=True)  # of loaders' workers, as everywhere else
    runpy.run_path(script, run_name="__main__")


def plain(script: Path, folder: Path) -> dict[int, Any]:
    """Return what each rank of a plain run has kept; nothing where it fails."""
    folder.mkdir()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=plain_rank, args=(str(script), str(folder), rank, port)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(PATIENCE_S)
        each.kill()
    return kept(folder)


def kept(folder: Path) -> dict[int, Any]:
    """Return what ranks have kept, by rank."""
    paths = {rank: result(folder, rank) for rank in range(2)}
    return {rank: torch.load(path, weights_only=False)["results"] for rank, path in paths.items() if path.exists()}


async def in_place(client: Client, name: str, script: Path, folder: Path, strike: str) -> str:
    """Run a script in place, one of its ranks struck; return how its task ended, empty where it did not."""
    folder.mkdir()
    spec = TaskSpec(
        name=name,
        command=["python", str(script), str(folder), strike],
        workdir=str(folder),
        min_workers=2,
        max_workers=2,
        iterations=UNCOUNTED,
        heal=Healing.IN_PLACE,
        layout=ParallelLayout(shard=2),
    )
    await client.submit(spec)
    began = time.monotonic()
    while time.monotonic() < began + PATIENCE_S:
        view = next(view for view in (await client.status()).tasks if view.spec.name == name)
        if view.state.ended:
            return f"{view.state}: {view.reason}"
        await asyncio.sleep(0.05)
    await client.remove(name)
    return ""


async def judged(client: Client, cluster: Cluster, seed: int, number: int, root: Path) -> dict[str, Any]:
    """Return what came of a script."""
    folder = root / f"{seed}-{number}"
    folder.mkdir()
    text, chosen = made(seed, number)
    (folder / "script.py").write_text(text)
    theirs = await asyncio.to_thread(plain, folder / "script.py", folder / "plain")
    row: dict[str, Any] = {"number": number, "chosen": chosen}
    if len(theirs) < 2:
        return row | {"verdict": "not_measured", "why": (folder / "plain" / "log-0").read_text()[-300:]}
    name, before = f"made-{seed}-{number}", await client.tail()
    ended = await in_place(client, name, folder / "script.py", folder / "struck", chosen["at"])
    ours, struck = kept(folder / "struck"), (folder / "struck" / MARK).exists()
    logs = "".join(path.read_text(errors="replace") for path in sorted(cluster.root.glob(f"nodes/*/logs/{name}-*.log")))
    (folder / "log").write_text(logs)
    begun = (folder / "struck" / "begun").read_text().split() if (folder / "struck" / "begun").exists() else []
    carried = OWN_CARRIER.search(logs)
    facts = [each async for _, each in client.follow(before, await client.tail()) if getattr(each, "task", "") == name]
    drills = [at for at, each in enumerate(facts) if getattr(each, "status", None) is FailureStatus.DRILL]
    back = [each.seconds for each in facts[drills[0] :] if isinstance(each, TaskRecovered)] if drills else []
    drilled, drill_s = bool(drills), back[0] if back else None
    row |= {"begun": len(begun), "drilled": drilled, "named": carried[1] if carried else "", "ended": ended}
    row |= {"drill_s": drill_s}
    if not ended:
        return row | {"verdict": "hung"}
    if ended.startswith("finished"):
        if why := difference(ours, theirs):
            return row | {"verdict": "wrong_silently", "why": why}
        if not struck:
            return row | {"verdict": "not_measured", "why": "nobody was struck"}
        return row | {"verdict": "healed" if len(begun) == 3 + drilled else "began_again"}
    return row | {"verdict": "refused" if "heal: restart" in ended or carried else "ended", "why": ended}


async def measure(seed: int, numbers: Sequence[int], root: Path) -> list[dict[str, Any]]:
    """Return what came of each script."""
    rows = []
    with _on_cluster(root) as cluster:
        await cluster.wait_until_ready(PATIENCE_S)
        async with connected_client(cluster.settings(), "benchmark") as client:
            for number in numbers:
                row = await judged(client, cluster, seed, number, root)
                rows.append(row)
                if row["verdict"] != "healed":
                    why = row.get("why") or row.get("named") or row.get("ended")
                    say(f"{number} {row['verdict']}: {why} {row['chosen']}")
    return rows


@contextlib.contextmanager
def _on_cluster(root: Path) -> Iterator[Cluster]:
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    os.environ |= paths | {"OMP_NUM_THREADS": "1", "UNICRON_ATTEMPTS": "1000", "UNICRON_NO_PROGRESS": "4"}
    cluster = Cluster(root / "cluster", 1, 2, free_port())
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return how many scripts came to what."""
    counted = Counter(row["verdict"] for row in rows)
    again = [row for row in rows if row["verdict"] == "began_again"]
    unsaid = [row for row in again if not row["named"]]
    drills = [row["drill_s"] for row in rows if row.get("drill_s")]
    return {
        "cases": len(rows),
        **{name: counted[name] for name in VERDICTS},
        "said": len(again) - len(unsaid),
        "in_window": sum(row["chosen"]["strike"] in WINDOW for row in unsaid),
        "drill_s": round(statistics.median(drills), 3) if drills else 0.0,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Make scripts up, run them, and print what came of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=20, help="of scripts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--only", type=int, nargs="*", metavar="NUMBER", help="these alone")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where scripts, logs and results stay; a new folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__"])
    with tempfile.TemporaryDirectory() as scratch:
        root = (options.keep or Path(scratch)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        numbers = options.only or range(options.first, options.first + options.count)
        rows = asyncio.run(measure(options.seed, numbers, root))
    found = figures(rows)
    if options.json:
        print(as_json("inplace_made", found, details={"rows": rows}))
    else:
        print(", ".join(f"{name} {count}" for name, count in found.items()))


if __name__ == "__main__":
    main()
