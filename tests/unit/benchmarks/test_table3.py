"""The table of policies: Unicron's plan is the best there is, and each number is what it says."""

import itertools

import numpy as np
import pytest

from benchmarks.table3 import (
    ALL_RUN,
    CASES,
    OTHERS,
    PLAN,
    RISING,
    Share,
    contenders,
    draw,
    known,
    planned,
    ratios,
    report,
    waf,
)


@pytest.fixture(scope="module")
def rows():
    return report()


def test_the_five_cases_are_those_of_the_paper():
    assert [len(models) for models, _ in CASES] == [6] * 5
    assert CASES[4] == (("1.3B", "1.3B", "1.3B", "7B", "7B", "13B"), (2.0, 1.7, 1.4, 1.1, 0.8, 0.5))
    assert CASES[2] == (("7B",) * 6, RISING)


def test_no_policy_beats_the_plan_in_any_case(rows):
    for row in rows:
        assert set(row["ratio"]) == set(row["ratio_all_run"]) == {"equally", "weighted", "sized"}
        assert min(row["ratio"].values()) >= 1 - 1e-9
        assert min(row["ratio_all_run"].values()) >= 1 - 1e-9
        assert row["waf_pflops"][PLAN] >= row["waf_pflops"][ALL_RUN]
        assert all(sum(sizes) <= 128 for sizes in row["workers"].values())
        assert all(min(row["workers"][name]) > 0 for name in (ALL_RUN, *OTHERS))
    assert max(min(row["ratio_all_run"].values()) for row in rows) > 1.1


def test_the_plan_of_a_small_case_is_the_best_of_all_assignments():
    tasks = contenders(("1.3B", "7B", "13B"), (2.0, 0.5, 1.0))
    for all_run in (False, True):
        found = planned(tasks, 32, all_run=all_run)
        options = [[int(size) for size in task.demand.sizes if size or not all_run] for task in tasks]
        every = (sizes for sizes in itertools.product(*options) if sum(sizes) <= 32)
        names = [task.demand.name for task in tasks]
        assert waf(tasks, found) == pytest.approx(max(waf(tasks, dict(zip(names, one, strict=True))) for one in every))
    with pytest.raises(ValueError, match="not all of 3 tasks can run on 2 workers"):
        planned(tasks, 2, all_run=True)


def test_waf_is_weight_times_the_model_and_never_falls_with_more_workers():
    sizes, flops, _ = known("7B")
    (task,) = contenders(("7B",), (1.5,))
    at = int(np.flatnonzero(sizes == 16)[0])
    assert waf([task], {"1:7B": 16}) == pytest.approx(1.5 * flops[at])
    assert waf([task], {"1:7B": 0}) == 0
    assert (np.diff(task.waf) >= 0).all()


@pytest.mark.slow
def test_the_table_is_drawn(rows, tmp_path):
    draw(rows, tmp_path / "table.svg")
    text = (tmp_path / "table.svg").read_text()
    draw(rows, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == text
    assert "<svg" in text


def test_ratios_are_taken_to_the_plan_that_is_asked_for(rows):
    found = {name: Share({}, value) for name, value in rows[1]["waf_pflops"].items()}
    assert ratios(found) == pytest.approx(rows[1]["ratio"])
    assert ratios(found, ALL_RUN) == pytest.approx(rows[1]["ratio_all_run"])
