"""How many mistakes the tests notice: `make mutants`, or `python -m tests.mutants --seed 1 --count 80 --jobs 2`.

Draws mutants of the code that decides and tries each in a copy of the tree, first against the tests of its room, then
against 20 storms. It is killed when one fails. One that lives shows a decision that could be lost without notice.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.mutants.making import Mutant, drawn

ROOT = Path(__file__).parents[2]
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", ".tools", ".*_cache", ".hypothesis", ".unicron", "shared")
SOURCES = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["dev-mode-dirs"]


@dataclass(frozen=True)
class Room:
    """Code and what is to notice its mistakes: paths and options for pytest, the quickest first."""

    code: list[str]
    tests: list[str]


def service(name: str) -> Room:
    return Room([f"services/{name}/unicron_{name}"], [f"tests/unit/{name}", "tests/contract/test_commit.py"])


SHELL = [f"tests/contract/test_{name}.py" for name in ("commit", "ledger", "service")]
AGENT = (
    "core hardware/amd hardware/counters hardware/hardware hardware/slots life_signs lines metrics snapshots/snapshots "
    "stimuli workers/flight workers/reports workers/timings workers/watch workers/workers"
)
ROOMS = {
    "detector": service("detector"),
    "planner": service("planner"),
    "transition": service("transition"),
    "registry": service("registry"),
    "agent": Room([f"agent/unicron_agent/{name}.py" for name in AGENT.split()], ["tests/unit/agent"]),
    "train": Room(
        [f"unicron/train/worker/{name}.py" for name in ("iteration", "regrouping", "redistribute", "exchange")]
        + ["unicron/train/snapshots/gathering.py"],
        ["tests/unit/train"],
    ),
    "snapshots": Room(["unicron/snapshots/placement.py"], ["tests/unit/snapshots"]),
    "shell": Room(
        ["unicron/service/service.py", "unicron/service/commit_store.py"],
        # with the bus in memory only: the other one is no decision of these two
        ["tests/unit/service", *SHELL, "-k", "not nats and not server"],
    ),
}
LEFT_OUT = {"__init__", "__main__", "main", "settings", "switches", "statistics"}  # shells, tried with real processes
LEFT_OUT |= {"kernels", "lookup"}  # compiled, which takes longer than their tests

STORM = "tests/chaos/test_storms.py::test_nothing_that_must_not_be_happens_in_a_storm"
STORMS = [f"{STORM}[0]", f"{STORM}_with_liars[0]"]

CPU_S = 90
"""Seconds of a processor, after which tests that took up to 25 are taken to be in an endless loop."""

TEST_S = 120
"""Seconds after which a test is taken to wait for what does not come."""

OUTCOMES = {0: "passed", 2: "unusable", 4: "unusable", -signal.SIGXCPU: "limit", -signal.SIGKILL: "limit"}
"""Outcomes of tests by the status of pytest; 2 and 4 are those of code that can not be imported."""


def files_of(room: Room) -> list[str]:
    found = [
        path for each in room.code for path in ([ROOT / each] if each.endswith(".py") else (ROOT / each).rglob("*.py"))
    ]
    return sorted(str(path.relative_to(ROOT)) for path in found if path.suffix == ".py" and path.stem not in LEFT_OUT)


def outcome(python: str, tree: Path, tests: list[str]) -> str:
    """Return what becomes of these tests in that tree: passed, failed, limit, or unusable where none could run."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(tree / each) for each in SOURCES),
        "PYTHONDONTWRITEBYTECODE": "1",  # a mutant's would be taken for the next one's, which is as long and as old
    }
    pytest = [python, "-m", "pytest", "-qx", "--no-header", "-p", "no:cacheprovider", "-o", f"timeout={TEST_S}", *tests]
    running = subprocess.Popen(
        ["/bin/sh", "-c", 'ulimit -t "$0" && exec "$@"', str(CPU_S), *pytest],
        cwd=tree,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        status = running.wait(10 * CPU_S)
    except subprocess.TimeoutExpired:
        return "limit"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)  # it may have left processes behind
        running.wait()
    return OUTCOMES.get(status, "failed")


def tried(python: str, trees: queue.Queue, mutant: Mutant, room: Room) -> str:
    """Return who killed a mutant, if anybody."""
    tree = trees.get()
    file = tree / mutant.file
    before, stat = file.read_bytes(), file.stat()
    try:
        file.write_text(mutant.code)
        for who, tests in (("tests", room.tests), ("storms", STORMS)):
            ended = outcome(python, tree, tests)
            if ended != "passed":
                return {"failed": who, "limit": "limit"}.get(ended, ended)
        return "survived"
    finally:
        file.write_bytes(before)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # what was compiled of it is good again
        trees.put(tree)


def report(seed: int, verdicts: list[tuple[Mutant, str, str]]) -> dict:
    """Return the shares as data; mutants with which no test could even begin count nowhere."""
    told = collections.defaultdict(collections.Counter)
    for _, room, verdict in verdicts:
        told[room][verdict] += 1
        told["all"][verdict] += 1
    rooms = {}
    for room, counts in told.items():
        usable = counts.total() - counts["unusable"]
        killed = usable - counts["survived"]
        rooms[room] = {"killed": killed, "of": usable, "share": round(killed / max(usable, 1), 3), **counts}
    mutants = [
        {"file": each.file, "line": each.line, "kind": each.kind, "room": room, "verdict": verdict, "diff": each.diff}
        for each, room, verdict in verdicts
    ]
    return {"seed": seed, "rooms": rooms, "mutants": mutants}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seed", type=int, default=1, help="draws other mutants")
    parser.add_argument("--count", type=int, default=80)
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at a time, each in a tree of its own")
    parser.add_argument("--json", type=Path, help="writes the shares and all mutants there")
    parser.add_argument("--python", default=str(ROOT / ".venv/bin/python"), help="runs the tests")
    given = parser.parse_args()
    room_of = {file: name for name, room in ROOMS.items() for file in files_of(room)}
    mutants = drawn(ROOT, list(room_of), given.seed, given.count)
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        concurrent.futures.ThreadPoolExecutor(given.jobs) as pool,
    ):
        trees = queue.Queue()
        for number in range(given.jobs):
            trees.put(Path(shutil.copytree(ROOT, Path(folder, str(number)), symlinks=True, ignore=NOT_COPIED)))
        needed = [*(ROOMS[name].tests for name in sorted({room_of[each.file] for each in mutants})), STORMS]
        for tests, ended in zip(needed, pool.map(partial(outcome, given.python, trees.queue[0]), needed), strict=True):
            if ended != "passed":
                sys.exit(f"these must pass before there are mutants: pytest {' '.join(tests)}")
        futures = {pool.submit(tried, given.python, trees, each, ROOMS[room_of[each.file]]): each for each in mutants}
        verdicts = []
        for done in concurrent.futures.as_completed(futures):
            mutant = futures[done]
            verdicts.append((mutant, room_of[mutant.file], done.result()))
            print(
                f"{len(verdicts):3}/{len(mutants)} {done.result():8} {mutant.file}:{mutant.line} {mutant.kind}",
                flush=True,
            )
    for mutant, _, verdict in verdicts:
        if verdict == "survived":
            print(f"\n{mutant.file}:{mutant.line}\n{mutant.diff}")
    told = report(given.seed, verdicts)
    print()
    for room, counts in told["rooms"].items():
        print(f"{room:12} {counts}")
    if given.json:
        given.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
