"""Makes the list in docs/testing.md: what each module of tests shows, what runs it, and what is left out and why."""

from collections import defaultdict

from helpers import ROOT

PAGE = ROOT / "docs" / "testing.md"
BEGIN = "<!-- the list: `make docs/testing.md` -->"
HEAD = ["| module | what it shows | quick | test | all | real |", "|---|---|---|---|---|---|"]


def table(items):
    """Return a row for each module of tests: how many of its tests (parametrised ones are one) each command runs."""
    modules = defaultdict(list)
    for item in items:
        modules[str(item.path.relative_to(ROOT))].append(item)
    return {name: _row(name, modules[name]) for name in sorted(modules)}


def _row(name, items):
    marks = [{mark.name for mark in item.iter_markers()} for item in items]
    whys = sorted({mark.args[0] for item in items for mark in item.iter_markers("exhaustive")})
    shows = (items[0].module.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    shows += "".join(f" Only in test-all: {why}." for why in whys)
    left_out = ({"real", "slow", "exhaustive"}, {"exhaustive"}, set())
    counts = [_count(items, marks, lambda each, without=without: not each & without) for without in left_out]
    counts.append(_count(items, marks, lambda each: "real" in each))
    return f"| {' | '.join([name.removeprefix('tests/'), shows, *counts])} |"


def _count(items, marks, runs):
    names = {item.originalname for item, each in zip(items, marks, strict=True) if runs(each)}
    return str(len(names) or "")


def page(items):
    """Return the page with its list made anew."""
    before, _, _ = PAGE.read_text().partition(BEGIN)
    return "\n".join([before + BEGIN, "", *HEAD, *table(items).values(), ""])
