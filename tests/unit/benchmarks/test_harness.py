"""A benchmark is called by the options that it declares, and ends with one line for programs, or tables for people."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT

from benchmarks.harness import stats
from benchmarks.harness.cluster import Scene, whole_s
from benchmarks.harness.command import Result, as_text
from unicron.contracts.events import Regrouped

MODULE = '''
"""What it measures."""
from benchmarks.harness.command import main, option
from benchmarks.harness.command import Result

async def measure(options, folder):
    assert list(folder.iterdir()) == []
    print("in between")
    return Result({"twice_s": 2 * options.seconds}, {"other": {"twice_s": 1.0}}, status=options.status)

if __name__ == "__main__":
    main(measure, option("--seconds", default=1.5), option("--status", default=0))
'''


def run(folder, *words):
    (folder / "example.py").write_text(MODULE)
    command = [sys.executable, "-m", "example", *words]
    environment = {"PYTHONPATH": f"{folder}:{':'.join(sys.path)}", "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_the_last_line_is_one_object_and_the_exit_status_is_the_results(tmp_path):
    ended = run(tmp_path, "--seconds", "2", "--status", "3", "--json")
    found = json.loads(ended.stdout.splitlines()[-1])
    assert ended.returncode == 3, ended.stderr
    assert found.keys() == {"benchmark", "machine", "commit", "figures", "baselines", "details"}
    assert (found["benchmark"], found["figures"]) == ("example", {"twice_s": 4.0})
    assert found["baselines"] == {"other": {"twice_s": 1.0}}


def test_an_option_that_is_none_is_refused_with_its_name(tmp_path):
    ended = run(tmp_path, "--second", "two")
    assert ended.returncode == 2
    assert "invalid float value: 'two'" in ended.stderr


def test_people_get_figures_beside_baselines_and_tables_of_the_details():
    table = {"row 1": {"a": 1.25, "b": "x"}, "row 2": {"a": 2}}
    text = as_text(Result({"own_s": 1.5}, {"peer": {"own_s": 2.5, "more": 1}}, {"cases": table, "seed": 1}))
    lines = [line.split() for line in text.splitlines()]
    assert lines[:3] == [["figure", "measured", "peer"], ["own_s", "1.5", "2.5"], ["more", "1"]]
    assert lines[4:] == [["cases", "a", "b"], ["row", "1", "1.25", "x"], ["row", "2", "2"]]


@pytest.mark.parametrize(("values", "wanted"), [([1, 2, 9], (2, 9)), ([1, None], (None, None)), ([], (None, None))])
def test_a_value_that_is_missing_leaves_no_median(values, wanted):
    assert (stats.median(values), stats.worst(values)) == wanted


def test_percentiles_are_named_by_their_unit():
    seconds = [0.001 * number for number in range(1, 101)]
    assert stats.percentiles("store", seconds) == {"store_p50_ms": 50.5, "store_p99_ms": 100.0}
    assert stats.percentiles("store", [], "s") == {"store_p50_s": None, "store_p99_s": None}


async def entries(*messages):
    for position, message in enumerate(messages):
        yield position, message


class Journal:
    def __init__(self, *messages):
        self.follow = lambda filters: entries(*messages)


def regrouped(task, epoch, at, world_size=2):
    told = {"node": "node-1", "slot": 0, "worker": "w", "rank": 0, "iteration": 1}
    return Regrouped(task=task, epoch=epoch, world_size=world_size, at=at, **told)


@pytest.mark.asyncio
async def test_a_scene_tells_tasks_and_times_apart():
    first, other, later = regrouped("a", 0, 1.0), regrouped("b", 0, 2.0), regrouped("a", 1, 3.0)
    scene = Scene(None, Journal(first, other, later))
    await scene.follow(())
    assert scene.said(Regrouped) == [first, other, later]
    assert scene.said(Regrouped, "a") == [first, later]
    assert scene.said(Regrouped, "a", since=1.0) == [later]


def test_whole_is_when_the_last_rank_of_all_has_joined():
    facts = [regrouped("a", 0, 9.0), regrouped("b", 0, 9.0), regrouped("a", 1, 12.0, 1)]
    assert whole_s(facts, 10.0, 2) is None
    facts += [regrouped("a", 2, 13.0), regrouped("c", 2, 13.5)]
    assert whole_s(facts, 10.0, 2) == 3.5
