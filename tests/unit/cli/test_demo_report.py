"""The demo's report of its faults: iterations reported late, twice, or truly done again."""

import pytest
from helpers.accounts import finished
from unicron_chaos.injection import Injection
from unicron_cli.report import fault_reports

from unicron.contracts.events import IterationFinished


def done(iteration: int, at: float, identity: str = "") -> IterationFinished:
    return finished(iteration, id=identity or f"{iteration}@{at}", at=at)


@pytest.mark.parametrize(
    ("told", "redone"),
    [
        pytest.param([done(7, 1.0), done(8, 2.0), done(9, 3.0)], 0, id="in order"),
        pytest.param([done(7, 1.0), done(9, 3.0), done(8, 2.0)], 0, id="held back while the bus was away"),
        pytest.param([done(7, 1.0), done(8, 2.0, "a"), done(8, 2.0, "a")], 0, id="delivered twice"),
        pytest.param([done(7, 1.0), done(8, 2.0), done(7, 3.0), done(8, 4.0)], 2, id="done again"),
        pytest.param([done(7, 0.1), done(7, 0.2), done(8, 3.0)], 0, id="done again before the fault"),
    ],
)
def test_an_iteration_is_redone_when_it_was_finished_before(told, redone):
    strike = Injection(at=0.5, fault="kill-worker", target="gpt:1", node="node-1", worker="gpt-1", text="")
    assert [report.iterations_redone for report in fault_reports([strike], [], told)] == [redone]
