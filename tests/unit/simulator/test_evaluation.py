"""The evaluation's goals hold on some seeds, and the page about it has its tables and pictures."""

import pytest

from benchmarks import evaluation, figures

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def eleven():
    return evaluation.figure_11(3)


def test_unicron_is_ahead_of_everybody_and_close_to_the_oracle(eleven):
    found = evaluation.flat({"figure_11": eleven, "figure_9": {}})
    assert found["trace_a_over_megatron"] >= 1.2
    assert found["trace_b_over_megatron_as_planned"] >= 1.9
    assert found["trace_a_share_of_oracle"] >= 0.995
    assert found["trace_b_share_of_oracle"] >= 0.98
    for name in ("trace_a", "trace_b"):
        for other in evaluation.OTHERS:
            assert 1 < found[f"{name}_over_{other}_least"] <= found[f"{name}_over_{other}"]
            assert found[f"{name}_over_{other}"] <= found[f"{name}_over_{other}_most"]


def test_circular_parameters_give_back_what_they_were_made_from():
    found = evaluation.circular(1)
    for other in evaluation.OTHERS[1:]:
        assert found["trace-a"][other].median == pytest.approx(evaluation.PAPER["trace-a"][other], rel=0.1)


def test_a_missing_node_costs_megatron_most_in_figure_3b():
    lost = figures.figure_3b(2)
    assert lost["oracle"].median < lost["unicron"].median < lost["varuna"].median < lost["megatron"].median


def test_the_page_has_its_tables_and_pictures():
    page = evaluation.PAGE.read_text()
    made = page.partition("<!-- made by benchmarks.evaluation -->")[2].partition("<!-- end -->")[0]
    for other in evaluation.OTHERS:
        for name in evaluation.TRACES:
            assert f"| {other} | {name} | {evaluation.PAPER[name][other]} x |" in made
    pictures = [*evaluation.TRACES, "figure-3b", "figure-9", "figure-10"]
    for name in (f"evaluation-{name}.svg" for name in pictures):
        assert f"]({name})" in page
        assert "</svg>" in (evaluation.DOCS / name).read_text()


def test_pictures_are_drawn_of_what_was_found(tmp_path):
    bars = figures.figure_9((16,), 1)
    figures.draw_9(bars, tmp_path / "9.svg")
    figures.draw_10(figures.figure_10(), tmp_path / "10.svg")
    figures.draw_3b({"unicron": figures.spread([0.03, 0.04]), "megatron": figures.spread([0.2])}, tmp_path / "3b.svg")
    for name, word in (("9", "oobleck"), ("10", "samples/s"), ("3b", "megatron")):
        assert word in (tmp_path / f"{name}.svg").read_text()
