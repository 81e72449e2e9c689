"""The output of `unicron goodput`, of a journal made by hand and of a recorded one."""

import csv
import io
import json

import pytest
import typer
from helpers.accounts import FAILED, account, began, exited, failure, killed, slowed, start
from helpers.cli import printed
from replay import replayer
from unicron_cli.goodput import ROWS, dearest, span_s, to_csv, view, view_of
from unicron_cli.output import to_json

from unicron.contracts import events
from unicron.contracts.tasks import TaskState
from unicron.observe.accounts.goodput import Goodput
from unicron.observe.accounts.phases import Phase


@pytest.fixture(scope="module")
def demo():
    accounts = Goodput()
    for message in replayer.read("demo"):
        accounts.handle(message)
    return accounts


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("1.5h", 5400), ("7d", 604800), ("3w", 1814400)])
def test_a_span_is_read(text, seconds):
    assert span_s(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-7d", "7 d", "7y", "nan", "1e9d", "7d\n"])
def test_what_is_no_span_is_refused(text):
    with pytest.raises(typer.BadParameter, match="such as 36h or 7d"):
        span_s(text)


def test_a_table_tells_a_person_what_went_where(demo):
    lines = printed(view(demo.report())).splitlines()
    assert lines[0].split()[:7] == ["TASK", "FAILURES", "GPU", "TIME", "GOODPUT", "TRAINED", "TRAINING"]
    assert "CHECKPOINT" not in lines[0], "phases that nobody had are left out"
    [gpt_b] = [line.split() for line in lines if line.startswith("gpt-b")]
    assert gpt_b[1:8] == ["3", "5.35", "minutes", "61", "%", "69", "%"]
    assert any(line.startswith("task_hang ") for line in lines)
    assert "over 109 s; all phases add up to 10.5 minutes of GPU time, wall time x slots are 10.5 minutes" in lines
    assert "node-3 cost 13.5 s of GPU time, more than any other node" in lines
    assert any(line.startswith("estimated: recomputed") for line in lines)


def test_long_times_are_told_in_hours_and_the_dearest_only():
    lines = began()
    for number in range(ROWS + 1):
        name, node = f"x{number}", f"m{number:02}"
        lines.append((30, "grown", start(name, node, 0)))
        at = 100 + number
        lines.append((at, name, exited(name, node, 0, iteration=-1), failure(name, node, slot=0)))
    lines.append((200, exited("w4", "n2", 1, iteration=3), failure()))
    text = printed(view(account(lines).report(200 + 3600)))
    assert "n2 cost 4 hours of GPU time, more than any other node" in text
    assert f"only the {ROWS} dearest causes and nodes are shown; --csv has all" in text


def test_csv_and_json_have_all(demo):
    rows = list(csv.DictReader(io.StringIO(to_csv(demo.report().records()))))
    assert {row["scope"] for row in rows} == {"task", "cause", "node"}
    [gpt_b] = [row for row in rows if row["name"] == "gpt-b"]
    phases = sum(float(gpt_b[f"{phase}_s"]) for phase in Phase)
    assert phases == pytest.approx(float(gpt_b["whole_s"])) == pytest.approx(float(gpt_b["total_s"]))
    found = json.loads(to_json(demo.report()))
    assert [row["name"] for row in found["tasks"]] == ["", "gpt-a", "gpt-b"]
    assert found["tasks"][2]["seconds"]["detection"] == pytest.approx(float(gpt_b["detection_s"]))
    assert len(rows) == sum(len(found[scope]) for scope in ("tasks", "causes", "nodes"))


def test_an_empty_journal_is_an_empty_table():
    report = Goodput().report(1000.0)
    assert report.tasks == []
    assert to_csv(report.records()) == ""
    assert "wall time x slots are 0 s" in printed(view(report))


def test_each_failure_is_told_with_what_it_cost_the_dearest_first(demo):
    costs = dearest(demo.costs(), since=0.0)
    text = printed(view_of(costs))
    heads, *lines = text.splitlines()
    assert heads.split() == ["FAILURE", "NODE", "TASKS", "AT", "HEALED", "IN", "COST", "CHAIN", "MOST", "OF", "IT"]
    assert [line.split()[0] for line in lines[:5]] == [cost.what for cost in costs]
    assert [cost.whole_s for cost in costs] == sorted((cost.whole_s for cost in costs), reverse=True)
    [hang] = [line for line in lines if line.startswith("task_hang ")]
    assert "node-3" in hang
    assert "2.31 s" in hang, "from its last progress to its recovery"
    assert hang.split()[-4:] == ["1281f615277c-125", "detection", "3.59", "s"]
    assert "failures and slowdowns: 5" in text


@pytest.mark.parametrize(("width", "lines"), [(120, 1), (80, 2)])
def test_ids_and_names_stay_in_one_piece_and_a_failure_on_its_line(demo, width, lines):
    costs = dearest(demo.costs(), since=0.0)
    text = printed(view_of(costs), width=width)
    assert all(cost.chain in text and f"{cost.what} " in text for cost in costs)
    assert "…" not in text
    assert len(text.splitlines()) <= 3 + lines * len(costs)


def test_healed_in_is_told_of_what_was_healed_alone():
    broken = [(124, FAILED, events.TaskBroken(task="gpt", reason="x"))]
    ended = [(125, FAILED, events.TaskStateChanged(task="gpt", state=TaskState.FAILED))]
    failed = account([*began(), *killed()[:2], *broken, *ended])
    [text] = [line for line in printed(view_of(failed.costs(200))).splitlines() if line.startswith("exited_abn")]
    assert " failed " in text
    for end in (slowed()[1:], ended):
        slow = account([*began(), slowed()[0], *end]).costs(200)
        [text] = [line for line in printed(view_of(slow)).splitlines() if line.startswith("slowdown")]
        assert f" slow for {slow[-1].recovered_at - 61:.3g} s " in text


def test_failures_as_csv_and_json_have_all_phases_and_times(demo):
    costs = dearest(demo.costs(), since=0.0)
    rows = list(csv.DictReader(io.StringIO(to_csv([each.record() for each in costs]))))
    for row, cost in zip(rows, json.loads(to_json(costs)), strict=True):
        assert sum(float(row[f"{phase}_s"]) for phase in Phase) == pytest.approx(float(row["whole_s"]))
        assert float(row["whole_s"]) == pytest.approx(cost["whole_s"])
        assert float(row["begun"]) <= float(row["detected_at"])
        assert [course["task"] for course in cost["courses"]] == row["tasks"].split()
        assert bool(cost["spans"]) is (cost["whole_s"] > 0)
    assert to_csv([]) == ""


def test_only_failures_of_a_task_and_of_the_time_are_told():
    accounts = account([*began(), *killed()], since=160.0)
    assert [each.chain for each in dearest(accounts.costs(200), since=100.0)] == [FAILED]
    assert dearest(accounts.costs(200), since=160.0) == [], "all that it cost was before"
    assert dearest(accounts.costs(200), since=100.0, task="bert") == []
    assert "not yet" in printed(view_of(dearest(accounts.costs(200), since=100.0)))
