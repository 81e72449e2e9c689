"""Plans for people: in tables, in words, as a curve; and the commands' refusals."""

import asyncio
import json
import sys

import pytest
from helpers.cli import printed
from helpers.planner import cluster, feed, lost, submitted
from msgspec.structs import replace
from typer.testing import CliRunner
from unicron_cli import plan as commands
from unicron_cli.main import app
from unicron_cli.planviews import ROWS, bar, curve_view, lookup_view, places, plan_view, thinned, what_if_view
from unicron_cli.plot import draw_curve

from unicron import codec
from unicron.client import Client
from unicron.contracts.answers import Curve, CurvePoint, PlanView, Reply, TableRow, Weighing
from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.queries import WhatIf
from unicron.contracts.tasks import SlotRef, TaskSpec
from unicron.errors import InvalidInputError, UnicronError
from unicron.observe.words.explain import changes, condition, explain, happened
from unicron.observe.words.units import span


def refs(node, *numbers):
    return [SlotRef(node=node, slot=number) for number in numbers]


SEVEN = [*refs("node-1", 0, 1, 2, 3), *refs("node-2", 0, 2, 3)]
SHARES = [
    TaskShare(task="gpt-a", slots=SEVEN, waf=6e14, before=9, waf_before=8e14),
    TaskShare(task="gpt-b", slots=refs("node-2", 1), waf=1.5e14, before=0, waf_before=0.0),
    TaskShare(task="gpt-c", slots=refs("node-2", 4), waf=1e14, before=1, waf_before=1e14),
    TaskShare(task="bert", reason="needs 2 workers; higher-weighted tasks use all 9 slots"),
]
TIMES = {"running_s": 1.2e6, "transition_s": 4.0, "lookup_s": 21e-6, "refresh_s": 2.1e-3}
PLAN = Plan(
    number=7, trigger="node_lost:node-3", workers=9, shares=SHARES, waf=8.5e14, reward=1e21, prepared=True, **TIMES
)
TABLE = [
    TableRow(event="node_lost:node-1", workers=5, changes={"gpt-a": 3}, reward=6e20, waf=6e14),
    TableRow(event="node_lost:node-2", workers=5, changes={"gpt-a": 3}, reward=6e20, waf=6e14),
    TableRow(event="node_joined", workers=13, changes={"gpt-a": 9, "bert": 2}, reward=2e21, waf=9e14),
    TableRow(event="task_finished:gpt-c", workers=9, changes={}, reward=9e20, waf=8e14),
]
VIEW = PlanView(
    plan=PLAN,
    runner_up=TableRow(
        event="node_lost:node-3", workers=9, changes={"gpt-a": 6, "gpt-b": 0, "bert": 2}, reward=9.8e20, waf=8.4e14
    ),
    table=TABLE,
    failures=3,
    failure_rate=1 / (86400 * 12 * 9),
    transitions={"failure": 2.5, "resize": 4.0},
)
CURVE = Curve(
    task="gpt-a",
    held=8,
    points=[
        CurvePoint(workers=4, flops=5e14, waf=1e15, source="table"),
        CurvePoint(workers=8, flops=8e14, waf=1.6e15, source="measured", spread=0.021),
        CurvePoint(workers=16, flops=1e15, waf=2e15, source="model", text="tp 8, pp 1, dp 2"),
    ],
)


def lines(view):
    return [" ".join(line.split()) for line in printed(view, 220).splitlines()]


def shown(view):
    return " ".join(lines(view))


# --- tables ----------------------------------------------------------------------------------------------------------


def test_a_plan_shows_who_has_what_against_before_and_its_figures():
    text = shown(plan_view(VIEW))
    assert "plan 7, after node_lost:node-3 from the lookup table in 21 us; making the table took 2.1 ms" in text
    assert "850 TFLOP/s expected on 9 slots, 840 TFLOP/s by the runner-up" in text
    assert "D_running 13.9 days, D_transition 4 s" in text
    assert "gpt-a 7 9 600 TFLOP/s -200 TFLOP/s (-25 %) node-1:0-3 node-2:0,2-3" in text
    assert "gpt-b 1 0 150 TFLOP/s +150 TFLOP/s node-2:1" in text
    assert "bert 0 0 0 FLOP/s 0 needs 2 workers; higher-weighted tasks use all 9 slots" in text
    assert "runner-up" not in shown(plan_view(PlanView(plan=PLAN)))
    assert "computed when it was needed" in shown(plan_view(PlanView(plan=Plan(number=1, trigger="t", workers=1))))


def test_without_flops_a_plan_shows_no_rates():
    share = TaskShare(task="gpt", slots=refs("node-1", 0, 1), waf=2.0, before=1, waf_before=1.0)
    view = PlanView(
        plan=Plan(number=1, trigger="t", workers=2, shares=[share], waf=2.0, reward=2e6),
        runner_up=TableRow(event="t", workers=2, changes={"gpt": 1}, reward=1e6),
        table=[TableRow(event="node_joined", workers=4, changes={"gpt": 4}, reward=4e6)],
    )
    for text in (shown(plan_view(view)), shown(lookup_view(view)), str(explain(view))):
        assert "FLOP/s expected" not in text
        assert " kFLOP" not in text
        assert " MFLOP" not in text
    assert "nothing is known of the tasks' FLOP/s on 2 slots" in shown(plan_view(view))
    words = dict(explain(view))
    assert "give flops_per_iteration, throughput or model" in words["effect"]
    assert words["runner-up"] == "gpt 1 (not 2): would earn 50 % less until the next failure"


def test_without_a_plan_there_is_a_sentence_with_the_cure():
    none = PlanView(plan=None)
    for view in (plan_view(none), lookup_view(none), what_if_view(none, None, "x")):
        assert lines(view) == ["no plan yet: submit a task with `unicron submit FILE`"]
    assert explain(none) == [("plan", "no plan yet: submit a task with `unicron submit FILE`")]


def test_the_lookup_table_joins_events_with_the_same_answer():
    found = lines(lookup_view(VIEW))
    assert found[0] == "what comes after plan 7: 4 events foreseen; making it took 2.1 ms"
    assert "node_lost: node-1, node-2 5 gpt-a 7 -> 3 600 TFLOP/s" in found
    assert "node_joined 13 gpt-a 7 -> 9, bert 0 -> 2 900 TFLOP/s" in found
    assert "task_finished:gpt-c 9 no task changes 800 TFLOP/s" in found


def test_a_long_lookup_table_stays_short():
    rows = [TableRow(event=f"node_lost:node-{number}", workers=5, changes={}, reward=1.0) for number in range(2000)]
    found = lines(lookup_view(PlanView(plan=PLAN, table=rows)))
    assert len(found) < 8
    assert any("node-5 and 1994 more" in line for line in found)


def test_what_if_shows_which_slots_change_hands():
    share = TaskShare(task="gpt-a", slots=[*refs("node-1", 0, 1, 2, 3), *refs("node-3", 0, 1)])
    now = Plan(number=6, trigger="t", workers=9, shares=[share])
    text = shown(what_if_view(VIEW, now, "node-3 is lost"))
    assert "if node-3 is lost: 9 healthy slots (only asked: nothing has changed)" in text
    assert "gpt-a 7 9 600 TFLOP/s -200 TFLOP/s (-25 %) node-2:0,2-3 node-3:0-1" in text
    assert "decision workers: gpt-a 9 -> 7" in text
    assert "what happened" not in text


def test_what_a_change_of_layout_costs_and_what_is_guessed_is_told_in_words():
    view = replace(VIEW, transitions={"resize": 4.0, "relayout": 12.0}, guessed={"mine": 5e9})
    guess = "nothing is known of the FLOP/s of mine: a worker there counts as 5 GFLOP/s, the least that one brings to"
    assert f"for 4 s when it is only resized, 12 s when its layout changes; {guess}" in dict(explain(view))["beliefs"]
    assert guess in shown(plan_view(view))


def test_slots_are_shortened_in_rank_order():
    assert places([*refs("b", 1, 0), *refs("a", 2, 3, 4, 7)]) == "b:1,0 a:2-4,7"
    assert places([ref for number in range(100) for ref in refs(f"n{number}", 0)]).endswith("n5:0 and 94 nodes more")


# --- words -----------------------------------------------------------------------------------------------------------


def test_a_plan_is_told_in_words():
    words = dict(explain(VIEW))
    assert words["what happened"] == "node node-3 was lost; 9 healthy slots can be used"
    assert words["decision"] == (
        "workers: gpt-a 9 -> 7, gpt-b 0 -> 1; gpt-c keeps 1. It lay ready in the lookup table (21 us)"
    )
    assert words["effect"] == (
        "gpt-a loses 200 TFLOP/s (25 %), gpt-b gains 150 TFLOP/s; "
        "in all a loss of 50 TFLOP/s (5.6 %), 850 TFLOP/s (weighted) expected"
    )
    assert words["runner-up"] == (
        "gpt-a 6 (not 7), gpt-b 0 (not 1), bert 2 (not 0): would earn 20 EFLOP (2 %) less until the next failure"
    )
    assert words["waiting"] == "bert needs 2 workers; higher-weighted tasks use all 9 slots"
    assert words["beliefs"] == (
        "one node failure every 12 days among 9 workers (3 seen; 0.0093 a worker and day); "
        "a task earns nothing for 2.5 s after it lost a worker, 4 s when it is only resized"
    )


def test_a_runner_up_that_earns_as_much_is_called_as_good():
    equal = PlanView(plan=PLAN, runner_up=TableRow(event="", workers=9, changes={"gpt-a": 6}, reward=1e21))
    assert "as good" in dict(explain(equal))["runner-up"]


def test_cost_and_error_are_told_of_a_plan_that_takes_workers_and_of_one_that_was_not_made():
    taken = Weighing(changes={"gpt-a": 8, "gpt-b": 0}, gain=3e20, cost=2e18, error=5e19)
    left = Weighing(changes={"gpt-c": 0, "bert": 1}, gain=2.4e18, cost=1e18, error=5e19)
    words = dict(explain(replace(VIEW, taken=taken, held_back=left)))
    assert words["taken"] == (
        "against gpt-a 8 (not 7), gpt-b 0 (not 1), which leaves running tasks more, it earns 300 EFLOP (29 %) more "
        "until the next failure: more than its cost, 2 EFLOP (0.2 %) while tasks are reconfigured, and the error of "
        "the estimates, 50 EFLOP (4.9 %), together"
    )
    assert words["held back"] == (
        "gpt-c 0 (not 1), bert 1 (not 0), which takes workers from running tasks, would earn 2.4 EFLOP (0.24 %) more "
        "until the next failure: not more than its cost, 1 EFLOP (0.098 %) while tasks are reconfigured, and the error "
        "of the estimates, 50 EFLOP (4.9 %), together"
    )
    assert not {"taken", "held back"} & dict(explain(VIEW)).keys()


def test_many_tasks_are_counted_and_not_listed():
    rates = {"waf": 2e12, "before": 0, "waf_before": 0}
    shares = [TaskShare(task=f"t{number}", slots=refs("n", number), **rates) for number in range(40)]
    shares += [TaskShare(task=f"w{number}", reason="needs 9 workers") for number in range(40)]
    words = dict(explain(PlanView(plan=Plan(number=1, trigger="t", workers=40, shares=shares, waf=8e13))))
    assert "and 32 tasks more" in words["decision"]
    assert "32 tasks more together gains 64 TFLOP/s" in words["effect"]
    assert "32 tasks more" in words["waiting"]
    assert max(map(len, words.values())) < 400


@pytest.mark.parametrize(
    ("trigger", "words"),
    [
        ("node_joined:n1", "node n1 joined"),
        ("node_joined:n1,n2", "nodes n1 and n2 joined"),
        ("node_joined:n1,n2,n3,n4 and 12 more", "nodes n1 and n2 and n3 and n4 and 12 more joined"),
        ("node_drained:n1", "node n1 was taken out of use"),
        ("task_submitted:gpt", "task gpt was submitted"),
        ("something:new", "something:new"),
        ("node_joined", "node_joined"),
    ],
)
def test_triggers_are_told_in_words_where_they_are_known(trigger, words):
    assert happened(Plan(number=1, trigger=trigger, workers=4)) == words


def test_conditions_durations_and_changes_read_well():
    query = WhatIf(lose=["n1", "n2"], join=2, finish=["a"], submit=TaskSpec(name="b", command=["x"]))
    assert condition(query) == "n1 and n2 are lost, 2 nodes of the usual size join, a finishes, b is submitted"
    assert condition(WhatIf(lose=["n1"], join=1)) == "n1 is lost, 1 node of the usual size joins"
    spans = {0: "0 s", 2e-5: "20 us", 0.0213: "21.3 ms", 5: "5 s", 600: "10 minutes", 7200: "2 hours", 1e6: "11.6 days"}
    assert {seconds: span(seconds) for seconds in spans} == spans
    assert changes({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 1}) == "b 2 -> 3, c 0 -> 1"


# --- curves ----------------------------------------------------------------------------------------------------------


def test_a_curve_shows_bars_sources_and_the_held_size():
    found = lines(curve_view(CURVE))
    assert found[0] == "gpt-a: T(t, x) at 3 feasible sizes, holds 8 ▶"
    assert f"4 500 TFLOP/s {'█' * 12} 1 PFLOP/s 125 TFLOP/s {'█' * 12} table" in found
    assert any(line.startswith("▶ 8 800 TFLOP/s") and line.endswith("measured ±2.1 %") for line in found)
    assert f"16 1 PFLOP/s {'█' * 24} 2 PFLOP/s 62.5 TFLOP/s ██████ model tp 8, pp 1, dp 2" in found


def test_a_long_curve_keeps_its_ends_and_what_is_held_or_measured():
    points = [CurvePoint(workers=x, flops=x, waf=x, source="linear") for x in range(1, 500)]
    points[250] = CurvePoint(workers=251, flops=1, waf=1, source="measured")
    curve = Curve(task="a", held=123, points=points)
    kept = [point.workers for point in thinned(curve)]
    assert {1, 499, 123, 251} <= set(kept)
    assert ROWS <= len(kept) <= ROWS + 2
    assert kept == sorted(kept)
    text = shown(curve_view(curve))
    assert f"{len(kept)} of them are shown; --json has all" in text
    assert "nothing is known of its FLOP/s" in text
    assert "FLOP/s 1" not in text


def test_bars_are_drawn_to_an_eighth():
    assert [bar(value, 8, 1) for value in (0, 1, 4, 8)] == ["", "▏", "▌", "█"]
    assert (bar(1, 0, 8), bar(3, 4, 4), bar(1, 3, 2)) == ("", "███", "▋")


@pytest.mark.slow
def test_a_curve_is_drawn_as_png_and_svg(tmp_path):
    draw_curve(CURVE, tmp_path / "a.png")
    draw_curve(CURVE, tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "a.svg").read_text()
    assert "<svg" in text
    draw_curve(CURVE, tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() == text, "the same curve gives the same file"
    draw_curve(Curve(task="a", held=0, points=CURVE.points), tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text() != text, "the held size is marked"


def test_what_can_not_be_drawn_is_refused_with_the_cure(tmp_path, monkeypatch):
    (tmp_path / "taken.png").mkdir()
    for curve, name, why in (
        (CURVE, "a.pdf", r"has to end in \.png or \.svg"),
        (CURVE, "none/a.png", "there is no folder"),
        (CURVE, "taken.png", r"taken\.png: can't be written"),
        (Curve(task="a", held=0, points=[]), "a.png", "no size is feasible"),
    ):
        with pytest.raises(InvalidInputError, match=why):
            draw_curve(curve, tmp_path / name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UnicronError, match=r"pip install '\.\[plot\]'"):
        draw_curve(CURVE, tmp_path / "a.png")


# --- commands --------------------------------------------------------------------------------------------------------


class Direct(Client):
    """A client that hands its questions to a real planner without a bus between them; `asked` are the questions."""

    def __init__(self, planner):
        self.planner, self.asked = planner, []

    async def _ask(self, owner, query):
        assert owner == "planner"
        self.asked.append(codec.decode_query(codec.encode(query)))
        reply = codec.decode(codec.encode(self.planner.answer(query)[0]), Reply)
        if reply.error:
            raise InvalidInputError(reply.error)
        return reply


@pytest.fixture
def client(monkeypatch):
    """Three nodes of two slots, two tasks on them; then node n3 was lost."""
    planner = cluster(submitted("a"), submitted("b", weight=2.0))
    feed(planner, lost("n3"))
    client = Direct(planner)
    monkeypatch.setattr(commands, "with_client", lambda nats, job: asyncio.run(job(client)))
    return client


def run(*words, code=0):
    done = CliRunner().invoke(app, ["plan", *words])
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize("words", [["show"], ["explain"], ["what-if", "--lose", "n1"], ["table"], ["curve", "b"]])
def test_every_command_speaks_to_people_and_to_programs(client, words):
    text = run(*words)
    assert "b" in text
    assert "GFLOP" in text
    found = json.loads(run(*words, "--json"))
    assert found
    assert "b" in json.dumps(found)


def test_what_if_shows_both_plans_and_changes_nothing(client):
    before = json.loads(run("show", "--json"))
    found = json.loads(run("what-if", "--lose", "n1", "--json"))
    assert found["in_force"] == before["plan"]
    assert found["plan"]["workers"] == 2
    assert "decision" in found["words"]
    assert "if n1 is lost: 2 healthy slots (only asked: nothing has changed)" in run("what-if", "--lose", "n1")
    assert json.loads(run("show", "--json")) == before


def test_what_if_asks_for_all_that_was_given(client, tmp_path):
    file = tmp_path / "task.yaml"
    file.write_text("name: new\ncommand: [python, t.py]\n")
    words = ["--lose", "n1", "--lose", "n2", "--join", "3", "--finish", "a", "--finish", "b", "--submit", str(file)]
    found = json.loads(run("what-if", *words, "--json"))
    [asked] = (query for query in client.asked if isinstance(query, WhatIf))
    assert (asked.lose, asked.join, asked.finish, asked.submit.name) == (["n1", "n2"], 3, ["a", "b"], "new")
    assert [share["task"] for share in found["plan"]["shares"]] == ["new"]
    assert found["plan"]["workers"] == 6


def test_a_curve_goes_to_the_terminal_and_into_the_file(client, tmp_path):
    assert "▶" in run("curve", "b", "--plot", str(tmp_path / "a.svg"))
    assert (tmp_path / "a.svg").exists()


def test_a_wrong_file_is_refused_before_the_planner_is_asked(client):
    done = CliRunner().invoke(app, ["plan", "curve", "b", "--plot", "a.pdf"])
    assert isinstance(done.exception, InvalidInputError)
    assert not client.asked
