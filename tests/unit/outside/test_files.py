"""Files that others give: whatever is in them, they are taken, or refused in words; nothing else comes of it."""

import itertools
import random
from pathlib import Path

import pytest
from helpers import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from unicron_chaos import script
from unicron_simulator.policies import files, parameters, traces
from unicron_straggler.analysis import reader
from unicron_straggler.analysis.trace import Meta

from unicron import taskfile
from unicron.errors import InvalidInputError, UnicronError
from unicron.files import read_text
from unicron.rules import Rules
from unicron.snapshots.storage.manifest import index_in, manifest_in
from unicron.taskfile.fields import BadValueError
from unicron.taskfile.model import read_table

REFUSED = (UnicronError, BadValueError)
"""In words that a person can do something with."""

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


def _on_disk(read):
    def run(folder, content):
        (folder / "failures.csv").write_bytes(FAILURES)
        path = folder / "given"
        path.write_bytes(content)
        read(path)

    return run


READERS = {
    "task": (_on_disk(taskfile.load), TASK),
    "throughput": (_on_disk(read_table), TABLE),
    "faults": (_on_disk(script.load), FAULTS),
    "failures": (_on_disk(lambda path: traces.load(path, ["node-0", "node-1"])), FAILURES),
    "cluster": (_on_disk(files.load_cluster), CLUSTER),
    "parameters": (
        _on_disk(parameters.load),
        (ROOT / "simulator/unicron_simulator/policies" / parameters.NAME).read_bytes(),
    ),
    "meta": (_on_disk(reader.read_meta), META),
    "chrome": (_on_disk(lambda path: reader.read_chrome(path, Meta("x", 1, 1))), CHROME),
    "parquet": (_on_disk(lambda path: reader.read_parquet(path, Meta("x", 1, 1))), b"PAR1" + bytes(40) + b"PAR1"),
    "index": (lambda _, content: index_in(content, "here"), INDEX),
    "manifest": (lambda _, content: manifest_in(content, "here"), MANIFEST),
    "rules": (
        lambda _, content: Rules(content.decode(errors="replace")),
        (ROOT / "unicron/rules.toml").read_bytes(),
    ),
}
"""By kind of file: what reads it, given a folder and the content; and a content that is taken."""

HOSTILE = [
    *(b"[", b"{", b"]", b"}", b": ", b"- ", b",", b"#", b'"', b"'", b"|\n", b"? ", b"=", b"=\n[[", b"\n"),
    *(b"&a ", b"*a", b"<<: *a", b"!!int ", b"!!python/object:os.system ", b"!!binary ", b"2024-13-45", b"190:20:30"),
    *(b"-1", b"0", b"1e400", b".nan", b".inf", b"NaN", b"Infinity", b"null", b"true", b"18446744073709551616"),
    *(b"0x" + b"f" * 5000, b"9" * 5000, b"[" * 3000, b"{a: " * 500, b"a" * 200_000),
    *(b"\x00", b"\x1b[2J", b"\xff", b"\xe2\x80\xae", b"../../../etc/passwd", b"/dev/zero"),
]


def changed(content, seed):
    """Return the content with a few things in it replaced, left out or put in."""
    chance = random.Random(seed)
    for _ in range(chance.choice((1, 1, 2, 4))):
        begin = chance.randrange(len(content) + 1)
        end = begin + chance.choice((0, 1, 4, 20))
        other = chance.randrange(len(content) + 1)
        new = chance.choice([chance.choice(HOSTILE), b"", bytes([chance.randrange(256)]), content[other : other + 30]])
        content = content[:begin] + new + content[end:]
    return content


@pytest.mark.parametrize("kind", READERS)
@pytest.mark.filterwarnings("ignore:Possible nested set")
def test_whatever_is_in_a_file_it_is_taken_or_refused_in_few_words(kind, tmp_path):
    read, content = READERS[kind]
    if kind not in {"parquet", "manifest"}:  # which no text makes whole
        read(tmp_path, content)

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @given(st.integers(0, 2**32))
    def any_of_them(seed):
        said = ""
        try:
            read(tmp_path, changed(content, seed))
        except REFUSED as error:
            said = str(error)
        assert len(said) < 20_000

    any_of_them()


@pytest.mark.parametrize(
    ("kind", "content", "says"),
    [
        ("task", b"max_workers: 0x" + b"f" * 5000, "5002 digits"),
        ("task", b"env: " + b"[" * 50 + b"]" * 50, "more than 20 lists"),
        ("task", b"a: &a [x, x, x, x, x, x, x, x, x]\n" + b"".join(
            b"%c: &%c [%s]\n" % (n, n, b", ".join([b"*%c" % (n - 1)] * 9)) for n in range(ord("b"), ord("h"))
        ), "100,000 values"),
        ("task", b"? [a]\n: b", "where the name of a field should"),
        ("task", b"a" * 1_100_000, "larger than 1 MB"),
        ("throughput", b"workers,flops\n2," + b"a" * 200_000, "not CSV"),
        ("cluster", CLUSTER.replace(b"tasks", b".nan"), "no field '.nan'"),
        ("parameters", b"a = " + b"[" * 3000, "recursion"),
        ("meta", b"a: " + b"[" * 3000, "can't be read as YAML"),
        ("chrome", b"[" * 100_000, "no chrome trace"),
        ("chrome", CHROME.replace(b'"pid":0', b'"pid":Infinity'), "no chrome trace"),
        ("chrome", CHROME.replace(b'"pid":0', b'"pid":70000'), "column dp_rank goes from 70000"),
        ("chrome", CHROME.replace(b'"step":1', b'"step":' + b"9" * 30), "column step"),
        ("index", b'{"pieces":' + b"[" * 100_000, "not what Unicron writes there"),
        ("manifest", b'{"version":1,"x":' + b"[" * 100_000, "not what Unicron writes there"),
        ("rules", b"a = " + b"9" * 5000, "mend that entry"),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_what_once_made_a_reader_fall_over_is_refused(kind, content, says, tmp_path):
    with pytest.raises(REFUSED) as caught:
        READERS[kind][0](tmp_path, content)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 20_000


def test_what_never_ends_is_not_read_to_its_end():
    with pytest.raises(InvalidInputError, match=r"/dev/zero: can't be read \(larger than 1 MB\); give a task"):
        read_text(Path("/dev/zero"), "give a task", 1024 * 1024)


def test_text_is_read_as_it_was_meant(tmp_path):
    (tmp_path / "a").write_bytes("\ufeffä\r\nb\rc".encode())
    assert read_text(tmp_path / "a", "") == "ä\nb\nc"
