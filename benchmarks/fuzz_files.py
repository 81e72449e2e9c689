"""Does any file from outside make a reader do something else than take it, or refuse it in words?

`python -m benchmarks.fuzz_files [--seconds S] [--json]`; needs `pip install atheris`. libFuzzer changes a valid file of
each kind, and follows which lines of our readers, and of the parsers beneath them, each change reaches. What a reader
falls over is left in the folder that is named at the end.
"""

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from unicron_chaos import script
from unicron_simulator import files, parameters, traces
from unicron_straggler.analysis import reader
from unicron_straggler.analysis.trace import Meta

from benchmarks.output import as_json
from unicron import taskfile
from unicron.errors import UnicronError
from unicron.rules import Rules
from unicron.snapshots.storage.manifest import index_in, manifest_in
from unicron.taskfile.fields import BadValueError
from unicron.taskfile.model import read_table

SECONDS = 30.0
PACKAGES = [
    *("unicron", "unicron_chaos", "unicron_simulator", "unicron_straggler", "unicron_detector"),
    *("yaml", "csv", "tomllib", "json"),
]
"""Whose lines are followed."""

REFUSED = (UnicronError, BadValueError)
"""In words that a person can do something with."""

OURS = Path(__file__).parents[1]

TASK = b"""name: gpt
command: [python, train.py]
max_workers: 8
microbatches: 64
iterations: 10
env: {A: b}
layout: {tensor: 2}
throughput: {1: 1.0e12, 8: 6.0e12}
"""
TABLE = b"workers,flops\n1,1e12\n2,2e12\n"
FAULTS = b"- at: {task: gpt, iteration: 3}\n  fault: kill-worker\n  target: {task: gpt, rank: 1}\n"
FAILURES = b"time_s,node,kind,repair_s\n1,node-0,sev1,10\n2,node-1,sev2,\n"
CLUSTER = b"nodes: 4\ndays: 2\nfailures: failures.csv\ntasks: case5\ngpus_per_node: 8\ndetect_minutes: 3\n"
META = b"trial_name: x\ndp_size: 2\npp_size: 2\ntp_size: 1\nworld_size: 4\nrun_id: 3\n"
CHROME = b"""{"traceEvents":[
{"ph":"X","name":"forward-compute","ts":1.0,"dur":2.0,"pid":0,"args":{"rank":0,"step":1,"tp":0,"pp":0,"mb_id":0}},
{"ph":"X","name":"backward-compute","ts":4.0,"dur":2.0,"pid":0,"args":{"rank":0,"step":1,"tp":0,"pp":0,"mb_id":0}}]}"""
INDEX = b"""{"task":"a","iteration":1,"layout":{},"attempt":"x","place":0,
"pieces":[{"path":["a",1],"offset":0,"length":3,"checksum":"ab"}]}"""
MANIFEST = b"""{"version":1,"task":"a","iteration":1,"layout":{},"attempt":"x","written":1.0,"parts":[],"others":[]}"""


def _on_disk(read: Callable[[Path], Any]) -> Callable[[Path, bytes], Any]:
    def run(folder: Path, content: bytes) -> None:
        (folder / "failures.csv").write_bytes(FAILURES)
        path = folder / "given"
        path.write_bytes(content)
        read(path)

    return run


class Reader(NamedTuple):
    """One kind of file.

    Attributes:
        read: what reads it; gets a folder to write it to, and the content.
        valid: a content that is taken.
    """

    read: Callable[[Path, bytes], Any]
    valid: bytes


_READERS: dict[str, tuple[Callable[[Path, bytes], Any], bytes]] = {
    "task": (_on_disk(taskfile.load), TASK),
    "throughput": (_on_disk(read_table), TABLE),
    "faults": (_on_disk(script.load), FAULTS),
    "failures": (_on_disk(lambda path: traces.load(path, ["node-0", "node-1"])), FAILURES),
    "cluster": (_on_disk(files.load_cluster), CLUSTER),
    "parameters": (_on_disk(parameters.load), (OURS / "simulator/unicron_simulator/parameters.toml").read_bytes()),
    "meta": (_on_disk(reader.read_meta), META),
    "chrome": (_on_disk(lambda path: reader.read_chrome(path, Meta("x", 1, 1))), CHROME),
    "parquet": (_on_disk(lambda path: reader.read_parquet(path, Meta("x", 1, 1))), b"PAR1" + bytes(40) + b"PAR1"),
    "index": (lambda _, content: index_in(content, "here"), INDEX),
    "manifest": (lambda _, content: manifest_in(content, "here"), MANIFEST),
    "rules": (
        lambda _, content: Rules(content.decode(errors="replace")),
        (OURS / "unicron/rules.toml").read_bytes(),
    ),
}
READERS = {kind: Reader(*each) for kind, each in _READERS.items()}


CHILD = """
import sys, atheris
with atheris.instrument_imports(include={packages!r}):
    from benchmarks.fuzz_files import fuzz
fuzz({kind!r}, {seconds!r}, {folder!r})
"""
"""What follows the lines that are reached must be there before they are imported."""


def fuzz(kind: str, seconds: float, folder: str) -> None:
    """Change files of one kind for some seconds, and end the process: with status 0 where the reader never fell."""
    import atheris  # noqa: PLC0415 few have it

    read, valid = READERS[kind]
    corpus = Path(folder, "corpus")
    corpus.mkdir()
    (corpus / "valid").write_bytes(valid)

    def once(content: bytes) -> None:
        with contextlib.suppress(*REFUSED):
            read(Path(folder), content)

    options = [f"-max_total_time={seconds:g}", f"-artifact_prefix={folder}/fallen-", "-max_len=20000"]
    atheris.Setup([kind, str(corpus), *options], once)
    atheris.Fuzz()


def run(kind: str, seconds: float, folder: Path) -> dict[str, Any]:
    """Return how many files were tried in a process of its own, how many lines that reached, and what it fell over."""
    folder.mkdir()
    child = CHILD.format(packages=PACKAGES, kind=kind, seconds=seconds, folder=str(folder))
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", child], capture_output=True, text=True, check=False)
    told = re.findall(r"^#(\d+)\s.*cov: (\d+)", ran.stderr, re.MULTILINE)
    tried, covered = map(int, told[-1]) if told else (0, 0)
    error = re.search(r"=== Uncaught Python exception: ===\n(.*)", ran.stderr)
    lost = "" if ran.returncode == 0 else (error[1] if error else ran.stderr[-300:])
    return {"tried": tried, "edges": covered, "fell": lost, "file": [str(each) for each in folder.glob("fallen-*")]}


def main() -> int:
    """Fuzz each kind; return 1 where a reader fell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="for each kind of file")
    given = parser.parse_args()
    if find_spec("atheris") is None:
        print("fuzz_files needs atheris, which is not installed: pip install atheris", file=sys.stderr)
        return 1
    root = Path(tempfile.mkdtemp(prefix="fuzz-files-"))
    rows = {}
    for kind in READERS:
        rows[kind] = run(kind, given.seconds, root / kind)
        if not given.json:
            print(
                f"{kind:12}{rows[kind]['tried']:9,} files {rows[kind]['edges']:6,} edges  {rows[kind]['fell']}",
                flush=True,
            )
    fallen = [kind for kind, row in rows.items() if row["fell"]]
    if given.json:
        figures = {
            "kinds": len(rows),
            "files": sum(row["tried"] for row in rows.values()),
            "readers_fallen": len(fallen),
        }
        print(as_json("fuzz_files", figures, details=rows))
    elif fallen:
        print(f"what they fell over is in {root}")
    return int(bool(fallen))


if __name__ == "__main__":
    sys.exit(main())
