"""When iterations of a task are slow: the pure window, without faust."""

import pytest
from unicron_detector import window
from unicron_detector.window import RECENT, SERIES, WINDOW, Windows

from unicron.contracts.events import IterationFinished


class Run:
    """A task that finishes iterations."""

    def __init__(self, task="gpt", world_size=4, windows=None):
        self.task, self.world_size = task, world_size
        self.windows = windows or Windows()
        self.iteration = 0

    def go(self, seconds, times=1):
        """Finish iterations; return what was said about them."""
        said = []
        for _ in range(times):
            finished = IterationFinished(
                node="n1",
                slot=0,
                task=self.task,
                worker="w",
                epoch=0,
                iteration=self.iteration,
                world_size=self.world_size,
                seconds=seconds,
                loss=1.0,
            )
            self.iteration += 1
            slow = self.windows.observe(finished)
            said += [slow] if slow else []
        return said


@pytest.fixture
def run():
    run = Run()
    assert run.go(1.0, WINDOW) == []
    return run


def test_steady_iterations_are_not_slow(run):
    assert run.go(1.0, 500) == []


def test_iterations_within_the_band_are_not_slow(run):
    assert run.go(1.08, 500) == []


def test_slow_iterations_are_told_once(run):
    (slow,) = run.go(1.3, 15)
    assert (slow.task, slow.world_size) == ("gpt", 4)
    assert slow.mean_s == pytest.approx(1.0)
    assert slow.recent_s > window.BAND * slow.mean_s


def test_what_stays_slow_becomes_the_usual(run):
    assert len(run.go(1.3, 400)) == 1
    assert len(run.go(1.7, 20)) == 1


def test_each_excursion_is_told(run):
    assert len(run.go(1.5, 10)) == 1
    assert run.go(1.0, 200) == []
    assert len(run.go(1.5, 10)) == 1


def test_one_iteration_with_a_failure_in_it_is_no_trend(run):
    assert run.go(30.0) == []
    assert run.go(1.0, 200) == []


def test_one_iteration_with_a_failure_in_it_does_not_hide_a_trend(run):
    run.go(30.0)
    run.go(1.0, 20)
    assert len(run.go(1.3, 10)) == 1


def test_nothing_is_said_before_there_is_a_past():
    run = Run()
    assert run.go(1.0, RECENT - 1) == []
    assert run.go(5.0, RECENT) == []


def test_faster_is_not_slow(run):
    assert run.go(0.2, 200) == []


def test_world_sizes_are_apart(run):
    other = Run(world_size=2, windows=run.windows)
    other.iteration = run.iteration
    assert other.go(2.0, 100) == []
    assert run.go(1.0, 100) == []
    assert len(other.go(3.0, 20)) == 1


def test_tasks_are_apart(run):
    other = Run(task="bert", windows=run.windows)
    assert other.go(9.0, 100) == []


def test_a_task_under_a_name_used_before_starts_afresh(run):
    again = Run(windows=run.windows)
    assert again.go(3.0, 200) == []


def test_the_sums_are_those_of_what_is_held(run):
    for step in range(500):
        run.go(1.0 + 0.001 * (step % 7))
    (series,) = run.windows._series.values()
    assert len(series.past) == WINDOW
    assert len(series.recent) == RECENT
    assert series.past_sum == pytest.approx(sum(series.past))
    assert series.recent_sum == pytest.approx(sum(series.recent))


def test_series_are_bounded():
    windows = Windows()
    for number in range(SERIES + 50):
        Run(task=f"t{number}", windows=windows).go(1.0, 2)
    assert len(windows._series) == SERIES
