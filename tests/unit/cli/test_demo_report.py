"""What the demo reports of its faults: the same iterations told late, twice, or truly done again."""

import pytest
from unicron_chaos.strikes import Strike
from unicron_cli.report import fault_reports

from unicron.contracts.events import IterationFinished


def finished(iteration: int, at: float, identity: str = "") -> IterationFinished:
    return IterationFinished(
        id=identity or f"{iteration}@{at}",
        at=at,
        node="node-1",
        slot=0,
        task="gpt",
        worker="gpt-0",
        epoch=1,
        iteration=iteration,
        world_size=2,
        seconds=0.1,
        loss=1.0,
    )


@pytest.mark.parametrize(
    ("told", "redone"),
    [
        pytest.param([finished(7, 1.0), finished(8, 2.0), finished(9, 3.0)], 0, id="in order"),
        pytest.param([finished(7, 1.0), finished(9, 3.0), finished(8, 2.0)], 0, id="held back while the bus was away"),
        pytest.param([finished(7, 1.0), finished(8, 2.0, "a"), finished(8, 2.0, "a")], 0, id="delivered twice"),
        pytest.param([finished(7, 1.0), finished(8, 2.0), finished(7, 3.0), finished(8, 4.0)], 2, id="done again"),
        pytest.param([finished(7, 0.1), finished(7, 0.2), finished(8, 3.0)], 0, id="done again before the fault"),
    ],
)
def test_an_iteration_is_redone_when_it_was_finished_before(told, redone):
    strike = Strike(at=0.5, fault="kill-worker", target="gpt:1", node="node-1", worker="gpt-1", text="")
    assert [report.iterations_redone for report in fault_reports([strike], [], told)] == [redone]
