"""All commands of the pages are run, on one cluster."""

import contextlib
import json
import os
import subprocess
import sys
import textwrap

import pytest
from helpers import plain_scripts
from helpers.cli import invoke
from helpers.pages import PAGES, typed
from helpers.ports import free_port
from helpers.stored import save_trained
from helpers.traces import write_trace
from helpers.training import SMALL
from helpers.waiting import block_until
from unicron_deploy.embedded import Cluster

pytestmark = pytest.mark.slow

TASK = """
name: {name}
command: [python, small.py]
max_workers: 3
microbatches: 6
iterations: 1000000
checkpoints: {storage}
"""

FAULTS = "- {at: {task: gpt, iteration: 0}, fault: raise, target: {task: gpt, rank: 0}}\n"

STANDS_FOR = {"TASK": "gpt", "FILE": "faults.yaml", "--minutes 2": "--minutes 0", "/shared": "shared"}
"""What is typed where a page has a name for it, or a time; an ID is that of a failure."""

ENDLESS = {"--follow", "--watch"}
"""What goes on until Ctrl-C is shown to do so where the command line is tested."""


@pytest.fixture
def reader(tmp_path, monkeypatch):
    """Be where a reader is: with the files that the pages speak of, and a cluster that `unicron up` started there."""
    for name in [name for name in os.environ if name.startswith("UNICRON_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shared" / "checkpoints").mkdir(parents=True)
    (tmp_path / "own").mkdir()
    texts = {"small.py": textwrap.dedent(SMALL), "train.py": plain_scripts.EPOCHS, "faults.yaml": FAULTS}
    tasks = {
        file: TASK.format(name=name, storage=tmp_path / "own")
        for name, file in (("gpt", "task.yaml"), ("bert", "bert.yaml"))
    }
    for name, text in (texts | tasks).items():
        (tmp_path / name).write_text(text)
    ports = ["--port", free_port(), "--console-port", free_port()]
    try:
        monkeypatch.setenv("UNICRON_NATS_URL", json.loads(invoke("up", "--slots", 1, *ports, "--json"))["url"])
        invoke("submit", "task.yaml")
        for iteration in (100, 200):
            save_trained(tmp_path / "shared" / "checkpoints", iteration)
        for name in ("AR", "before", "after"):
            write_trace(tmp_path, name)
        yield
    finally:
        with contextlib.suppress(Exception):
            Cluster.load(tmp_path / ".unicron").stop()


def await_its_turn(words):
    """Wait until what came before has been obeyed: the task is on all nodes, or, for another to begin, gone."""

    def reached():
        status = json.loads(invoke("status", "--json"))
        up = [node for node in status["nodes"] if node["state"] == "up"]
        if not status["tasks"]:
            return True
        [view] = status["tasks"]
        settled = view["paused"] or (view["state"] == "running" and len(view["members"]) == len(up))
        return settled and words[0] != "submit" and not (words[0] == "logs" and len(up) < 2)

    block_until(reached)


def failures():
    """Return the ids of all failures so far."""
    events = map(json.loads, invoke("events", "--json", "-n", 10000).splitlines())
    return [event["id"] for event in events if event["type"] == "FailureDetected"]


def carry_out(words, monkeypatch):
    match words:
        case ["unicron", *rest] if not ENDLESS & set(rest):
            await_its_turn(rest)
            before = failures() if rest[0] == "chaos" or "ID" in rest else []
            invoke(*[before[0] if word == "ID" else word for word in rest])
            if rest[0] == "chaos" and rest[1] != "storm":
                block_until(lambda: len(failures()) > len(before))
        case ["unicron", *_]:
            pass
        case ["python", *rest]:
            subprocess.run([sys.executable, *rest], check=True)
        case ["export", assigned]:
            monkeypatch.setenv(*assigned.split("=", 1))
        case _:
            raise AssertionError("nothing here runs that: mark the block, and say why")


def test_what_is_to_be_typed_does_what_it_should(reader, monkeypatch):
    lines = [line for page in PAGES for line in typed(page) if not line.why_not]
    wrong = []
    for line in lines:
        for words in line.commands(STANDS_FOR):
            try:
                carry_out(words, monkeypatch)
            except Exception as error:  # noqa: BLE001 - whatever is wrong, name the line
                wrong.append(f"{line.where}: {line.text}: {error}")
    assert not wrong, "\n".join(wrong)
    assert len(lines) > 50
