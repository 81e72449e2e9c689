"""Pictures, report and comparison."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from helpers.cli import printed
from unicron_simulator import synthetic
from unicron_simulator.planting import Shape, SlowedWorker
from unicron_straggler.analysis import compare, pictures, report
from unicron_straggler.analysis.diagnosis import diagnose
from unicron_straggler.analysis.measures import analyze
from unicron_straggler.analysis.trace import Meta, TraceProblem

from unicron.errors import InvalidInputError

pytestmark = pytest.mark.slow

SHAPE = Shape(dp=4, pp=2, microbatches=4, steps=30)


def run(name, *plants):
    trace = synthetic.make(SHAPE, 1, plants, name)
    analysis = analyze(trace)
    return trace, analysis, diagnose(analysis)


@pytest.fixture(scope="module")
def slow():
    return run("slow <b>", SlowedWorker(3, 1, 1.5))


@pytest.fixture(scope="module")
def sound():
    return run("sound")


@pytest.mark.slow
def test_all_pictures_are_written_and_say_who_is_slow(slow, tmp_path):
    trace, analysis, _ = slow
    names = {path.name for path in pictures.draw(trace, analysis, tmp_path / "new")}
    assert names == {f"{name}.{suffix}" for name in ("workers", "steps", "timeline") for suffix in ("svg", "png")}
    text = (tmp_path / "new" / "workers.svg").read_text()
    assert f"{analysis.worker_exact[3, 1]:.2f}" in text
    assert "data-parallel rank 3 (the slowest)" in (tmp_path / "new" / "timeline.svg").read_text()
    assert (tmp_path / "new" / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_the_same_analysis_gives_the_same_picture(slow, tmp_path):
    trace, analysis, _ = slow
    for file in ("one.svg", "two.svg"):
        _, figure = next(pictures.figures(trace, analysis))
        figure.savefig(tmp_path / file, metadata={"Date": None})
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_of_many_steps_a_bounded_number_is_drawn_the_slowest_among_them(slow):
    _, analysis, _ = slow
    chosen = pictures.choose_steps(analysis)
    assert len(chosen) <= pictures.MOST_STEPS < SHAPE.steps
    assert int(analysis.step_slowdown.argmax()) in chosen


def test_ideal_bars_end_with_the_ideal_step_and_traced_ones_with_the_traced(slow):
    trace, analysis, _ = slow
    for bars, seconds in (
        (pictures.ideal_bars(analysis), analysis.step_ideal_s),
        (pictures.traced_bars(trace, 0, 3), analysis.step_traced_s[0]),
    ):
        ends = [start + length for stages in bars.values() for spans in stages for start, length in spans]
        assert max(ends) == pytest.approx(seconds, rel=0.01)
        assert [len(spans) for spans in bars["forward"]] == [SHAPE.microbatches] * SHAPE.pp


@pytest.mark.slow
def test_a_file_where_the_folder_should_be_is_told(slow, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInputError, match="file: pictures can't be written there"):
        pictures.draw(*slow[:2], tmp_path / "file")
    with pytest.raises(InvalidInputError, match="the report can't be written there"):
        report.write(*slow, tmp_path / "missing" / "report.html")


class Links(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found, self.open = [], []

    def handle_starttag(self, tag, attributes):
        self.found += [value for name, value in attributes if name in {"src", "href"}]
        if tag not in {"meta", "img", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(slow, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    report.write(*slow, path)
    return path.read_text()


@pytest.mark.slow
def test_the_report_needs_nothing_from_outside(page):
    links = Links()
    links.feed(page)
    assert links.open == []
    assert len(links.found) == 3
    assert all(link.startswith("data:image/svg+xml;base64,") for link in links.found)
    assert not re.search(r"@import|url\(|<script|<link", page)


def test_the_report_tells_cause_cure_and_measures(slow, page):
    assert "Stragglers of slow &lt;b&gt;" in page
    assert f"<b>{slow[1].slowdown:.3f} times</b>" in page
    assert "slow-worker" in page
    assert "Drain the node of rank 7" in page
    assert "<p>None.</p>" in page


@pytest.mark.slow
def test_the_report_tells_problems_and_doubt(slow):
    trace, analysis, diagnoses = slow
    problem = TraceProblem("missing-ranks", "rank 3 is not there", 12, stands=False)
    text = report.page(trace, replace(analysis, problems=(problem,)), diagnoses)
    assert "Not to be trusted: see the problems" in text
    assert "rank 3 is not there" in text


def test_runs_are_compared(slow, sound):
    found = compare.compare(slow[1:], sound[1:])
    assert found.sentences[0].startswith("The slowdown fell from 1.")
    assert any(sentence.startswith("Gone: slow-worker") for sentence in found.sentences)
    assert any(sentence.startswith("Worker 3,1 is faster") for sentence in found.sentences)
    assert found.workers["3,1"].difference < -0.2
    assert found.causes["slow-worker"].after is None
    json.dumps(found.as_json(), allow_nan=False)
    back = compare.compare(sound[1:], slow[1:])
    assert any(sentence.startswith("New: slow-worker") for sentence in back.sentences)


def test_a_run_compared_with_itself_has_not_changed(slow):
    found = compare.compare(slow[1:], slow[1:])
    assert [sentence.partition(":")[0] for sentence in found.sentences] == ["The slowdown is as before"]


def test_jobs_of_different_sizes_are_compared_by_coordinates(slow):
    trace = synthetic.make(Shape(2, 1, 4, 3), name="small")
    small = analyze(replace(trace, meta=Meta("small", 2, 1)))
    found = compare.compare(slow[1:], (small, diagnose(small)))
    assert found.workers["3,1"].after is None
    json.dumps(found.as_json(), allow_nan=False)


def test_the_comparison_is_a_table_for_people(slow, sound):
    text = printed(compare.view(compare.compare(slow[1:], sound[1:])), 120)
    assert "Gone: slow-worker" in text
    assert re.search(r"slowdown +│ 1\.\d+ +│ 1\.\d+ +│ -\d+\.\d %", text)
