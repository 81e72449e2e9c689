"""`unicron straggler analyze` and `compare`, as a user types them."""

import json
import sys

import pytest
from helpers.cli import invoke
from helpers.traces import write_trace
from unicron_simulator.planting import SlowedWorker

from unicron.errors import InvalidInputError, UnicronError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with two runs of a job: before.parquet is healthy, after.parquet has a slow worker."""
    folder = tmp_path_factory.mktemp("traces")
    write_trace(folder, "before")
    write_trace(folder, "after", SlowedWorker(1, 1, 1.8))
    return folder


def run(*words):
    return invoke("straggler", *words)


def test_words_name_the_slow_worker_and_the_cure(folder):
    told = run("analyze", folder / "trace-after.parquet")
    assert "after: 6 steps, dp 3 x pp 2" in told
    assert "slowest ranks    4:" in told  # rank: stage 1 x 3 + dp rank 1
    assert "slow-worker (" in told
    assert "Drain the node of rank 4" in told


def test_json_has_the_studys_names_and_the_diagnosis(folder):
    meta = folder / "meta-before.yaml"
    found = json.loads(run("analyze", folder / "trace-after.parquet", "--meta", meta, "--json"))
    assert found["meta"]["trial_name"] == "before"
    assert found["top3pct_ranks"] == [4]
    assert found["S"] == pytest.approx(found["T_sim_mean"] / found["T_ideal_mean"])
    assert max(found["S_w_exact"], key=found["S_w_exact"].get) == "1,1"
    assert found["diagnoses"][0]["cause"] == "slow-worker"
    assert found["trustworthy"] is True
    assert found["problems"] == []


@pytest.mark.slow
def test_pictures_and_a_report_are_written(folder, tmp_path):
    run("analyze", folder / "trace-after.parquet", "--plot", tmp_path / "plots", "--html", tmp_path / "report.html")
    names = {path.suffix for path in (tmp_path / "plots").iterdir()}
    assert names == {".png", ".svg"}
    assert "<html" in (tmp_path / "report.html").read_text()


def test_what_changed_between_two_runs_is_told(folder):
    before, after = folder / "trace-before.parquet", folder / "trace-after.parquet"
    assert "New: slow-worker" in run("compare", before, after)
    found = json.loads(run("compare", before, after, "--json"))
    assert found["names"] == ["before", "after"]
    assert found["measures"]["slowdown"]["after"] > 1.3 > found["measures"]["slowdown"]["before"]
    assert run("compare", before, before, "--json") != run("compare", before, after, "--json")


def test_a_missing_meta_says_what_to_do(folder, tmp_path):
    with pytest.raises(InvalidInputError, match=r"nothing\.yaml: can't be read.*--meta"):
        run("analyze", tmp_path / "nothing.parquet")


def test_without_pyarrow_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UnicronError, match=r"needs pyarrow.*pip install '\.\[traces\]'"):
        run("analyze", folder / "trace-after.parquet")
