"""Training scripts that know nothing of Unicron, healed in place: of how many what comes is what torchrun makes.

    python -m benchmarks.inplace --json
    python -m benchmarks.inplace plateau best_weights --strike 0:12

Each script in `benchmarks/inplace_scripts` has one shape that people's scripts have, trains for seconds on two ranks
(one of them on four), and keeps each rank's results. It is run three ways: by torchrun; by `unicron run --in-place`
with nothing struck; and by that with one rank killed once, at a given iteration. That counts only if the process has
left a mark just before its SIGKILL, and no results since. What comes of both runs in place is compared with torchrun's
results, bit by bit. A script that fails by itself, or does not end well in place, is not struck.

The figures count scripts: `cases` are all; `right`, `refused`, `not_measured`, `ended`, `hung` and `wrong_silently` go
by the worse of the two verdicts (`inplace_verdicts` says what they mean), `undisturbed_right` and `struck_right` by one
of them. `struck_as_undisturbed` are those whose results when struck were what the same script had got in place with
nothing struck, whatever torchrun's are. Seconds are medians from start to end; a cluster takes some of them to start.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.inplace_verdicts import Run, Verdict, difference, reason, verdict, worst
from benchmarks.output import as_json
from benchmarks.strikes import ROOT, say

SCRIPTS = ROOT / "benchmarks" / "inplace_scripts"
HELPERS = {"__init__", "case"}
MARK = "struck"
"""As `inplace_scripts.case` calls the file; the module itself is only for scripts."""

RANKS = {"half_of_the_ranks": 4}
STRIKES = {"best_on_first_rank": "0:12", "log_opened": "0:12"}
"""Of scripts that differ in this from the others: ranks, and which of them is killed in which iteration."""

USUAL_RANKS, USUAL_STRIKE = 2, "1:12"
PATIENCE_S, GRACE_S = 120.0, 30.0
"""Within which a run has to end, and then within which it has to end when asked to."""

ABORTED = "terminate called without an active exception"
"""What a rank writes that gloo's threads abort as its interpreter ends, which happens to plain scripts now and then."""

TORCHRUN, UNDISTURBED, STRUCK = "torchrun", "undisturbed", "struck"


def scripts() -> list[str]:
    """Return the names of all scripts."""
    return sorted(path.stem for path in SCRIPTS.glob("*.py") if path.stem not in HELPERS)


def run(name: str, way: str, strike: str, folder: Path, patience: float) -> Run:
    """Run a script one way.

    Args:
        name: of the script.
        way: to run it.
        strike: RANK:ITERATION, where a rank is killed.
        folder: a new one, for all that comes of it.
        patience: seconds after which it hangs.
    """
    folder.mkdir(parents=True)
    ranks = RANKS.get(name, USUAL_RANKS)
    program = [str(SCRIPTS / f"{name}.py"), str(folder), *([strike] if way == STRUCK else [])]
    if way == TORCHRUN:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    else:
        command = ["-m", "unicron_cli", "run", "--in-place", "--nproc-per-node", str(ranks)]
        command += ["--dir", str(folder / "cluster")]
    began = time.monotonic()
    status = execute([sys.executable, *command, *program], folder / "log", patience)
    seconds = time.monotonic() - began
    kept = {
        rank: torch.load(path, weights_only=False) for rank in range(ranks) if (path := result(folder, rank)).exists()
    }
    killed = int((folder / MARK).read_text()) if (folder / MARK).exists() else 0
    log = (folder / "log").read_text(errors="replace")
    if way == TORCHRUN and len(kept) == ranks and ABORTED in log:
        status = 0
    return Run(
        status,
        {rank: one["results"] for rank, one in kept.items()},
        log,
        struck=killed > 0 and killed not in {one["pid"] for one in kept.values()},
        seconds=seconds,
    )


def result(folder: Path, rank: int) -> Path:
    """Return where a script keeps the results of a rank."""
    return folder / f"result-{rank}.pt"


def execute(command: Sequence[str], log: Path, patience: float) -> int | None:
    """Return the exit status of a command, or None where it had to be ended."""
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    plain = {"NO_COLOR": "1", "COLUMNS": "400", "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | paths | plain, stdout=out, stderr=out, start_new_session=True
        )
    try:
        return process.wait(patience)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.terminate()  # both launchers end what they have started
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(name: str, strike: str, folder: Path, patience: float) -> dict[str, Any]:
    """Return what came of a script, each way."""
    baseline = run(name, TORCHRUN, strike, folder / TORCHRUN, patience)
    undisturbed = run(name, UNDISTURBED, strike, folder / UNDISTURBED, patience)
    first = verdict(undisturbed, baseline)
    row: dict[str, Any] = {
        "verdict": first,
        "strike": strike,
        TORCHRUN: {"status": baseline.status, "seconds": round(baseline.seconds, 1)},
        UNDISTURBED: judged(undisturbed, baseline, first),
    }
    if baseline.status == 0 and undisturbed.status == 0:
        struck = run(name, STRUCK, strike, folder / STRUCK, patience)
        second = verdict(struck, baseline, strike=True)
        as_undisturbed = struck.status == 0 and struck.struck and not difference(struck.results, undisturbed.results)
        row |= {
            "verdict": worst([first, second]),
            STRUCK: judged(struck, baseline, second) | {"as_undisturbed": as_undisturbed},
        }
    return row


def judged(run: Run, baseline: Run, verdict: Verdict) -> dict[str, Any]:
    """Return what is reported of a run."""
    return {
        "verdict": verdict,
        "status": run.status,
        "seconds": round(run.seconds, 1),
        "why": reason(run, baseline, verdict),
    }


def figures(rows: dict[str, dict[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures in place, and those of torchrun."""
    counted = Counter(row["verdict"] for row in rows.values())
    struck = [row[STRUCK] for row in rows.values() if STRUCK in row]
    undisturbed = [row[UNDISTURBED] for row in rows.values()]
    own = {
        "cases": len(rows),
        **{one.value: counted[one] for one in Verdict},
        "undisturbed_right": sum(one["verdict"] == Verdict.RIGHT for one in undisturbed),
        "struck_right": sum(one["verdict"] == Verdict.RIGHT for one in struck),
        "struck_as_undisturbed": sum(one["as_undisturbed"] for one in struck),
        "undisturbed_s": median(one["seconds"] for one in undisturbed),
        "struck_s": median(one["seconds"] for one in struck),
    }
    peer = [row[TORCHRUN] for row in rows.values()]
    return own, {
        "failed": sum(one["status"] != 0 for one in peer),
        "undisturbed_s": median(one["seconds"] for one in peer),
    }


def median(seconds: Any) -> float | None:
    """Return the median; None of nothing."""
    values = list(seconds)
    return round(statistics.median(values), 1) if values else None


def line(name: str, row: dict[str, Any]) -> str:
    """Return the line of a script in the table."""
    struck = row.get(STRUCK, {"verdict": "-", "seconds": "-"})
    seconds = [row[TORCHRUN]["seconds"], row[UNDISTURBED]["seconds"], struck["seconds"]]
    words = [name, row[UNDISTURBED]["verdict"], struck["verdict"], *map(str, seconds)]
    return "{:22}{:16}{:16}{:>9}{:>13}{:>8}".format(*words)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the scripts, and print what came of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"scripts to run, without any all: {', '.join(scripts())}"
    )
    parser.add_argument("--strike", default="", metavar="RANK:ITERATION", help="kill this one in all scripts")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, metavar="S", help="after which a run hangs")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="where logs and results stay; a new folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.names) - set(scripts())):
        parser.error(f"no script {', '.join(unknown)}: there are {', '.join(scripts())}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows = {}
    with tempfile.TemporaryDirectory() as scratch:
        root = (options.keep or Path(scratch)).resolve()
        for name in options.names or scripts():
            strike = options.strike or STRIKES.get(name, USUAL_STRIKE)
            rows[name] = measure(name, strike, root / name, options.patience)
            say(line(name, rows[name]))
    own, peer = figures(rows)
    if options.json:
        print(as_json("inplace", own, {TORCHRUN: peer}, rows))
        return
    print("{:22}{:16}{:16}{:>9}{:>13}{:>8}".format("script", UNDISTURBED, STRUCK, TORCHRUN, UNDISTURBED, STRUCK))
    for name, row in rows.items():
        print(line(name, row))
    print(", ".join(f"{name} {value}" for name, value in own.items()))


if __name__ == "__main__":
    main()
