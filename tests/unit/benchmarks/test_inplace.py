"""The outcome of a script that was healed in place is judged rightly, and its results are compared bit by bit."""

import re

import pytest
import torch

from benchmarks import inplace, inplace_made
from benchmarks.inplace_scripts import named
from benchmarks.inplace_scripts.made import KINDS, SIZES, made
from benchmarks.inplace_scripts.verdicts import Run, Verdict, difference, reason, verdict, worst
from benchmarks.inplace_scripts.warm import Ran

RIGHT, REFUSED, NOT_MEASURED, ENDED, HUNG, WRONG = Verdict
RESULTS = {0: {"weight": torch.ones(2)}, 1: {"weight": torch.ones(2)}}
OTHERS = {0: {"weight": torch.ones(2)}, 1: {"weight": torch.ones(2) + 1e-7}}
TORCHRUN, FAILS, HANGS = Run(0, RESULTS), Run(1, {1: {}}), Run(None)
REFUSAL = "unicron.errors.InvalidInputError: leave register_comm_hook out\nunicron: plain failed: it ended with 1\n"


@pytest.mark.parametrize(
    ("run", "wanted"),
    [
        (Run(0, RESULTS), RIGHT),
        (Run(0, OTHERS), WRONG),
        (Run(0, {0: RESULTS[0]}), WRONG),
        (Run(0, {}), WRONG),
        (Run(1, {}, REFUSAL), REFUSED),
        (Run(1, {}, "ValueError: what the script says\n"), ENDED),
        (Run(1, {0: RESULTS[0]}, REFUSAL), ENDED),
        (Run(1, {}, REFUSAL, struck=True), ENDED),
        (Run(None, RESULTS), HUNG),
    ],
)
def test_what_ends_well_is_right_only_with_all_results_and_what_does_not_has_to_say_why(run, wanted):
    assert verdict(run, TORCHRUN) == wanted


def test_a_rank_that_was_not_struck_shows_nothing():
    assert verdict(Run(0, RESULTS), TORCHRUN, strike=True) == NOT_MEASURED
    assert verdict(Run(0, RESULTS, struck=True), TORCHRUN, strike=True) == RIGHT
    assert verdict(Run(1, {}, REFUSAL), TORCHRUN, strike=True) == REFUSED


def test_a_script_that_fails_by_itself_is_to_fail():
    assert [verdict(run, FAILS) for run in (Run(1), Run(0, {1: {}}), HANGS)] == [RIGHT, WRONG, HUNG]
    assert verdict(TORCHRUN, HANGS) == NOT_MEASURED


def test_a_script_is_as_good_as_the_worse_of_its_runs():
    assert worst([RIGHT, REFUSED]) == REFUSED
    assert worst([WRONG, RIGHT]) == worst([HUNG, WRONG]) == WRONG


def test_the_reason_is_a_line_of_the_log_or_what_differs():
    assert reason(Run(1, {}, REFUSAL), TORCHRUN, REFUSED) == "InvalidInputError: leave register_comm_hook out"
    assert reason(Run(1, {}, REFUSAL), TORCHRUN, ENDED) == "unicron: plain failed: it ended with 1"
    assert reason(Run(0, OTHERS), TORCHRUN, WRONG) == "1.weight differs by 1.2e-07"
    assert reason(Run(0, {1: {}}), FAILS, WRONG) == "status 0 instead of 1"
    assert reason(TORCHRUN, TORCHRUN, RIGHT) == ""


NAN = float("nan")


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ({"a": [torch.tensor(0.5), (1, NAN)]}, {"a": [torch.tensor(0.5), (1, NAN)]}, ""),
        ({0: torch.tensor([NAN])}, {0: torch.tensor([NAN])}, ""),
        ({0: torch.tensor(0.0)}, {0: torch.tensor(-0.0)}, "0 differs by 0"),
        (
            {0: torch.zeros(2)},
            {0: torch.zeros(1).double()},
            "0 is torch.float32 of [2] instead of torch.float64 of [1]",
        ),
        ({0: torch.zeros(1)}, {0: None}, "0 is of type Tensor instead of NoneType"),
        ({"a": 1}, {"a": 1, "b": 2}, "b is missing"),
        ({"a": [1, 2]}, {"a": [1]}, "a.1 is too much"),
        ({"a": [1, 2]}, {"a": [1, 3]}, "a.1 is 2 instead of 3"),
    ],
)
def test_results_are_compared_bit_by_bit(one, other, wanted):
    assert difference(one, other) == wanted


def test_scripts_count_by_the_worse_verdict_and_seconds_are_medians():
    def row(first, second, as_undisturbed, seconds):
        runs = {"torchrun": {"status": 0, "seconds": 3.0}, "undisturbed": {"verdict": first, "seconds": seconds}}
        struck = {"verdict": second, "seconds": 2 * seconds, "as_undisturbed": as_undisturbed}
        return {"verdict": worst([first, second]), **runs, "struck": struck}

    refused = {"verdict": REFUSED, "torchrun": {"status": 0, "seconds": 3.0}}
    rows = {"a": row(RIGHT, RIGHT, True, 5.0), "b": row(WRONG, WRONG, True, 7.0)}
    rows["c"] = refused | {"undisturbed": {"verdict": REFUSED, "seconds": 9.0}}
    own, peer = inplace.figures(rows)
    assert (own["cases"], own[RIGHT], own[REFUSED], own[WRONG]) == (3, 1, 1, 1)
    assert (own["undisturbed_right"], own["struck_right"], own["struck_as_undisturbed"]) == (1, 1, 2)
    assert (own["undisturbed_s"], own["struck_s"]) == (7.0, 12.0)
    assert peer == {"failed": 0, "undisturbed_s": 3.0}


def test_each_named_script_is_python_in_which_ranks_train_and_are_struck():
    for name in named.CASES:
        text = named.text(name)
        compile(text, name, "exec")
        assert text.index("strike(rank, iteration)") < text.rindex("keep(rank, model=")


def test_scripts_that_are_made_up_are_python_and_the_same_each_time():
    for number in range(200):
        text, chosen = made(3, number, (2, 3))
        compile(text, "made.py", "exec")
        assert (text, chosen) == made(3, number, (2, 3))
        assert "strike(rank" in text
        assert not re.search(r"\$|(?<! )@(?:samples|size|batches|epochs|total|source|loss|skip)\b", text)


def test_parts_that_do_not_go_together_are_not_drawn_together():
    for number in range(500):
        _, chosen = made(4, number)
        for kind, name in chosen.items():
            part = KINDS.get(kind, {}).get(name, {})
            assert all(chosen[other] in names for other, names in part.get("only", {}).items())
            assert all(chosen[other] not in names for other, names in part.get("without", {}).items())


def test_each_part_names_parts_that_there_are():
    kinds = KINDS | {"size": SIZES}
    for choices in KINDS.values():
        for part in choices.values():
            for kind, names in (part.get("only", {}) | part.get("without", {})).items():
                assert set(names) <= set(kinds[kind])


REFUSED_RUN = Ran("failed", "rank 0 is not healed in place: pipelines are not known; take heal: restart")


@pytest.mark.parametrize(
    ("ran", "left", "strike", "wanted"),
    [
        (Ran("finished"), {}, "", "healed"),
        (Ran("finished"), {"struck": "7", "begun": "0 1 1", "begun-before": "0 1"}, "1:5", "healed"),
        (Ran("finished"), {"struck": "7", "begun": "0 1 1 0", "begun-before": "0 1"}, "1:5", "began_again"),
        (Ran("finished"), {"struck": "7", "begun": "0 1 0", "begun-before": "0 1"}, "1:5:raise", "began_again"),
        (Ran("finished"), {}, "1:5", "not_measured"),
        (Ran("hung"), {}, "", "hung"),
        (Ran("failed", "it ended with 1"), {}, "", "ended"),
        (Ran("failed", "it ended with 1", "can't be carried to another process as it is: `x`"), {}, "", "ended"),
        (REFUSED_RUN, {}, "", "refused"),
        (REFUSED_RUN, {"struck": "7"}, "1:5", "ended"),
    ],
)
def test_a_run_in_place_is_judged_by_who_began_again(tmp_path, ran, left, strike, wanted):
    results = {rank: {"net": torch.zeros(2)} for rank in range(2)}
    for rank, one in results.items():
        torch.save({"pid": rank, "results": one}, tmp_path / f"result-{rank}.pt")
    for name, text in left.items():
        (tmp_path / name).write_text(text)
    assert inplace_made.judged(ran, tmp_path, results, strike)[0] == wanted
    if ran.finished:
        others = {rank: {"net": torch.ones(2)} for rank in range(2)}
        assert inplace_made.judged(ran, tmp_path, others, strike)[0] == "wrong_silently"


def test_made_up_scripts_are_counted_by_verdict_and_by_the_moment_of_the_strike():
    def row(verdict, moment, **more):
        return {"verdict": verdict, "moment": moment, "why": "", "seconds": 2.0, "calm": "healed", **more}

    rows = [row("healed", "head", calm_drills=[""]), row("ended", "amid", calm="ended"), row("ended", "between")]
    rows += [row("began_again", "behind", why="a file is not carried"), row("not_measured", "head")]
    found = inplace_made.figures(rows)
    assert (found["cases"], found["healed"], found["ended"], found["calm_ended"]) == (5, 1, 2, 1)
    assert (found["said"], found["proven"], found["outside_healed"], found["script_s"]) == (1, 1, 0.333, 2.0)
    assert inplace_made.moments(rows)["head"] | {"healed": 1, "not_measured": 1} == inplace_made.moments(rows)["head"]
