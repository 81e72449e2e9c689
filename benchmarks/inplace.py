"""Training scripts that know nothing of Unicron, healed in place: of how many what comes is what torchrun makes.

    python -m benchmarks.inplace --json
    python -m benchmarks.inplace plateau best_weights --strike 0:12
    python -m benchmarks.inplace --warm

Each script of `inplace_scripts/cases.toml` has a shape that people's scripts have, and trains for seconds. It is run by
torchrun, the baseline; by `unicron run --in-place`; and by that with one rank killed once, after a mark that it leaves.
The results of both runs in place are compared with torchrun's, bit by bit. A script that fails by itself, or does not
end well in place, is not struck. With `--warm` all run as tasks of one cluster, and the baseline by plain processes,
which takes a fraction of the time: that leaves out the command line, and its exit status.

Figures count scripts: `cases` all; `right`, `refused`, `not_measured`, `ended`, `hung`, `wrong_silently` by the worse
of two verdicts (`inplace_scripts.verdicts`), `undisturbed_right` and `struck_right` by one; `struck_as_undisturbed`
those whose results when struck were those in place with nothing struck. `undisturbed_s` and `struck_s` are medians from
start to end, the start of a cluster included.
"""

import asyncio
import contextlib
import os
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import stats
from benchmarks.harness.cluster import Scene, running
from benchmarks.harness.command import Figures, Options, Result, main, option, say
from benchmarks.harness.processes import ONE_THREAD, TORCHRUN, ended, start
from benchmarks.inplace_scripts.named import CASES, text
from benchmarks.inplace_scripts.runs import MARK, kept, plain, preload
from benchmarks.inplace_scripts.verdicts import Run, Verdict, difference, reason, verdict, worst
from benchmarks.inplace_scripts.warm import in_place

PATIENCE_S = 120.0
ABORTED = "terminate called without an active exception"
"""Last output of a rank in which gloo's threads abort as its interpreter ends, as in plain scripts now and then."""


def run(name: str, way: str, strike: str, folder: Path, patience: float) -> Run:
    """Run a script one way, in a new folder; `strike` says which rank is killed in which iteration."""
    folder.mkdir(parents=True)
    ranks = CASES[name].get("ranks", 2)
    (folder / "script.py").write_text(text(name))
    program = [str(folder / "script.py"), str(folder), *([strike] if way == "struck" else [])]
    if way == "torchrun":
        command = [*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks)]
    else:
        command = ["-m", "unicron_cli", "run", "--in-place", "--nproc-per-node", str(ranks)]
        command += ["--dir", str(folder / "cluster")]
    began = time.monotonic()
    status = execute([*command, *program], folder / "log", patience)
    seconds, log = time.monotonic() - began, (folder / "log").read_text(errors="replace")
    if way == "torchrun" and len(kept(folder, ranks)) == ranks and ABORTED in log:
        status = 0
    return _as_run(folder, ranks, status, log, seconds)


def _as_run(folder: Path, ranks: int, status: int | None, log: str, seconds: float) -> Run:
    """Return a run, by what its ranks have left in its folder."""
    found = kept(folder, ranks)
    killed = int((folder / MARK).read_text()) if (folder / MARK).exists() else 0
    struck = killed > 0 and killed not in {one["pid"] for one in found.values()}
    return Run(status, {rank: one["results"] for rank, one in found.items()}, log, struck=struck, seconds=seconds)


async def run_warm(scene: Scene, name: str, way: str, strike: str, folder: Path, patience: float) -> Run:
    """Run a script one way, in place as a task of a cluster that is there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    script, ranks, began = folder.with_suffix(".py"), CASES[name].get("ranks", 2), time.monotonic()
    script.write_text(text(name))
    if way == "torchrun":
        found = await asyncio.to_thread(plain, script, folder, ranks)
        return _as_run(folder, ranks, 0 if len(found) == ranks else 1, "", time.monotonic() - began)
    folder.mkdir()
    words = [str(script), str(folder), *([strike] if way == "struck" else [])]
    ran = await in_place(scene, f"{name.replace('_', '-')}-{way}", words, ranks, patience, workdir=str(folder))
    status = None if ran.state == "hung" else 0 if ran.finished else 1
    return _as_run(folder, ranks, status, f"{ran.logs}\nunicron: {ran.reason}\n", ran.seconds)


def execute(words: Sequence[str], log: Path, patience: float) -> int | None:
    """Run Python with these arguments; return its exit status, or None where it had to be ended."""
    process = start(words, log, NO_COLOR="1", COLUMNS="400", **ONE_THREAD)
    with ended([process]), contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(patience)
    return None


def judged(strike: str, run: Callable[[str], Run]) -> dict[str, Any]:
    """Return what came of a script, each way it is run."""
    baseline = run("torchrun")
    ways = {"undisturbed": run("undisturbed")}
    if baseline.status == 0 and ways["undisturbed"].status == 0:
        ways["struck"] = run("struck")
    row: dict[str, Any] = {"torchrun": {"status": baseline.status, "seconds": round(baseline.seconds, 1)}}
    for way, found in ways.items():
        one = verdict(found, baseline, strike=way == "struck")
        row[way] = {"verdict": one, "status": found.status, "seconds": round(found.seconds, 1)}
        row[way] |= {"why": reason(found, baseline, one)}
        same = found.status == 0 and found.struck and not difference(found.results, ways["undisturbed"].results)
        row[way] |= {"as_undisturbed": same} if way == "struck" else {}
    return {"verdict": worst(row[way]["verdict"] for way in ways), "strike": strike, **row}


def figures(rows: dict[str, dict[str, Any]]) -> tuple[Figures, Figures]:
    """Return the figures in place, and those of torchrun."""
    counted = Counter(row["verdict"] for row in rows.values())
    struck = [row["struck"] for row in rows.values() if "struck" in row]
    undisturbed = [row["undisturbed"] for row in rows.values()]
    own = {
        "cases": len(rows),
        **{one.value: counted[one] for one in Verdict},
        "undisturbed_right": sum(one["verdict"] == Verdict.RIGHT for one in undisturbed),
        "struck_right": sum(one["verdict"] == Verdict.RIGHT for one in struck),
        "struck_as_undisturbed": sum(one["as_undisturbed"] for one in struck),
        "undisturbed_s": stats.median((one["seconds"] for one in undisturbed), 1),
        "struck_s": stats.median((one["seconds"] for one in struck), 1),
    }
    peer = [row["torchrun"] for row in rows.values()]
    failed = sum(one["status"] != 0 for one in peer)
    return own, {"failed": failed, "undisturbed_s": stats.median((one["seconds"] for one in peer), 1)}


async def _warm(rows: dict[str, Any], strikes: dict[str, str], root: Path, patience: float) -> None:
    """Run scripts as tasks of one cluster."""
    preload("benchmarks.inplace_scripts.warm")
    os.environ |= ONE_THREAD
    slots, loop = max(CASES[name].get("ranks", 2) for name in strikes), asyncio.get_running_loop()
    async with running(root / "cluster", 1, slots) as scene:
        for name, strike in strikes.items():

            def run(way: str, name: str = name, strike: str = strike) -> Run:
                running = run_warm(scene, name, way, strike, root / name / way, patience)
                return asyncio.run_coroutine_threadsafe(running, loop).result()

            rows[name] = await asyncio.to_thread(judged, strike, run)
            say(f"{name}: {rows[name]}")


def measure(options: Options, folder: Path) -> Result:
    """Run the scripts that are named, or all."""
    if unknown := sorted(set(options.names) - set(CASES)):
        raise SystemExit(f"no script {', '.join(unknown)}: there are {', '.join(CASES)}")
    root, patience = (options.keep or folder).resolve(), options.patience
    strikes = {name: options.strike or CASES[name].get("at", "1:12") for name in options.names or CASES}
    rows: dict[str, Any] = {}
    if options.warm:
        asyncio.run(_warm(rows, strikes, root, patience))
    for name, strike in strikes.items() if not options.warm else ():
        run_one = partial(_cold, name, strike, root / name, patience)
        rows[name] = judged(strike, run_one)
        say(f"{name}: {rows[name]}")
    own, peer = figures(rows)
    return Result(own, {"torchrun": peer}, rows)


def _cold(name: str, strike: str, folder: Path, patience: float, way: str) -> Run:
    return run(name, way, strike, folder / way, patience)


if __name__ == "__main__":
    main(
        measure,
        option("names", nargs="*", metavar="NAME", help="scripts to run, without any all"),
        option("--strike", default="", metavar="RANK:ITERATION", help="kill this one in all scripts"),
        option("--warm", action="store_true", help="run all on one cluster"),
        option("--patience", default=PATIENCE_S, metavar="S", help="after which a run hangs"),
        option("--keep", type=Path, metavar="DIR", help="where logs and results stay; a new folder"),
    )
