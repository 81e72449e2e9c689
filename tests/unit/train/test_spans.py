"""Forecasts of training's own communication, from the last iterations."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unicron.contracts.traffic import Forecast, decode_forecast, forecast_name
from unicron.train.worker.spans import LEARNT, REMEMBERED, IdleSpans
from unicron.train.worker.traffic import Traffic

BUSY_S = 0.25


class Training:
    """Iterations with given idle spans before each collective; the last span of one reaches into the next."""

    def __init__(self):
        self.spans, self.now, self.expected = IdleSpans(), 100.0, math.inf

    def iterate(self, lengths):
        """Return for each span how long it was expected to be."""
        found = []
        for number, length in enumerate(lengths):
            self.now += length
            found.append(self.expected)
            self.spans.begin_busy(self.now)
            self.now += BUSY_S
            if number == len(lengths) - 1:
                self.spans.end_iteration(self.now)
            self.expected = self.spans.begin_idle(self.now) - self.now
        return found


lengths = st.floats(0.01, 10.0).map(lambda each: round(each, 3))
rows = st.integers(1, 6).map(lambda spans: st.lists(lengths, min_size=spans, max_size=spans))


@given(rows.flatmap(lambda row: st.lists(row, min_size=3 * REMEMBERED, max_size=20)))
def test_of_each_span_its_shortest_of_the_last_iterations_is_expected(done):
    training = Training()
    found = [training.iterate(each) for each in done]
    assert all(math.isinf(each) for row in found[: LEARNT + 1] for each in row), "nothing is known in the first ones"
    for number in range(LEARNT + REMEMBERED, len(done)):
        before = done[number - REMEMBERED : number]
        assert found[number] == pytest.approx([min(row[span] for row in before) for span in range(len(done[0]))])


def test_a_span_that_was_never_there_before_is_left_alone():
    training = Training()
    for _ in range(6):
        training.iterate([1.0, 2.0])
    assert training.iterate([1.0, 2.0, 3.0]) == pytest.approx([1.0, 2.0, 0.0])


def test_an_iteration_is_as_long_as_the_last_one():
    training = Training()
    training.iterate([1.0, 2.0])
    assert training.spans.iteration_s == 0.0
    training.iterate([3.0, 4.0])
    assert training.spans.iteration_s == 7.0 + 2 * BUSY_S


def forecast(path):
    return decode_forecast(path.read_bytes())


def test_an_agent_reads_what_a_worker_has_under_way(tmp_path):
    path = tmp_path / forecast_name(3)
    traffic = Traffic(path)
    assert forecast(path) == Forecast(), "nothing is known"
    traffic.begin()
    traffic.begin()
    traffic.end()
    assert forecast(path) == Forecast(0.0, 0.0), "one of two has not arrived"
    traffic.end()
    assert math.isinf(forecast(path).idle_until)
    for _ in range(LEARNT + 1):
        traffic.begin()
        traffic.end()
        traffic.end_iteration()
    traffic.begin()
    traffic.end()
    assert 0 < forecast(path).idle_until < math.inf
    assert forecast(path).iteration_s > 0
    traffic.reset()
    assert forecast(path) == Forecast(), "whoever comes next is another"


def test_what_nobody_waits_for_is_over_with_its_iteration(tmp_path):
    path = tmp_path / forecast_name(0)
    traffic = Traffic(path)
    traffic.begin()
    traffic.begin()
    assert forecast(path).idle_until == 0.0
    traffic.end_iteration()
    assert math.isinf(forecast(path).idle_until)


def test_what_was_given_up_before_a_membership_ended_counts_no_more(tmp_path):
    path = tmp_path / forecast_name(0)
    traffic = Traffic(path)
    traffic.begin()
    traffic.reset()
    traffic.end()
    traffic.begin()
    assert forecast(path).idle_until == 0.0


def test_what_a_worker_has_only_begun_to_write_says_nothing():
    assert decode_forecast(b"") == Forecast()
