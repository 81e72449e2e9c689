"""Copies pass between what training sends, and pass in the end whatever it does."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unicron.contracts.traffic import Forecast
from unicron.snapshots.gate import LEAST, MARGIN_S, MOST_ITERATIONS, RATES, Gate, Line
from unicron.train.worker.spans import LEARNT, IdleSpans

MB = 1_000_000
PIECE = 2 * MB
STEP_S = 0.0005


@dataclass
class Node:
    """One that trains, with the same idle and busy spans in each iteration, and sends copies; a model in small steps.

    Attributes:
        pattern: of an iteration: how long nothing is sent, and then how long something is.
        rate: bytes a second of copies.
        latency: seconds that each piece takes longer.
        late: pieces that were on their way when a collective began; what had to go is not among them.
    """

    pattern: list[tuple[float, float]]
    rate: float = 1e9
    latency: float = 0.0002
    now: float = 50.0
    late: set[tuple[float, int]] = field(default_factory=set)
    iteration: int = 0
    line: Line = field(default_factory=Line)
    forecast: Forecast = field(default_factory=Forecast)

    def __post_init__(self):
        self.spans = IdleSpans()
        self.under_way = []  # when each piece went, when it will be there, its size, and whether it had to go
        self.gate = None
        self.job = iter(self.steps())

    def steps(self):
        """Train; each yield is a small step of time, within which something is sent or nothing."""
        while True:
            for number, (idle_s, busy_s) in enumerate(self.pattern, 1):
                yield from self.for_(idle_s)
                self.spans.begin_busy(self.now)
                self.forecast = Forecast(0.0, self.spans.iteration_s)
                still = [(began, size, due) for began, ended, size, due in self.under_way if ended > self.now]
                self.late |= {(began, size) for began, size, due in still if not due}
                yield from self.for_(busy_s)
                if number == len(self.pattern):
                    self.spans.end_iteration(self.now)
                    self.iteration += 1
                self.forecast = Forecast(self.spans.begin_idle(self.now), self.spans.iteration_s)

    def for_(self, seconds):
        for _ in range(max(1, round(seconds / STEP_S))):
            self.now += STEP_S
            yield

    def step(self):
        next(self.job)
        while self.under_way and self.under_way[0][1] <= self.now:
            began, ended, size, _ = self.under_way.pop(0)
            self.line.on_its_way -= size
            self.line.arrived(size, ended - began)

    def train(self, iterations):
        until = self.iteration + iterations
        while self.iteration < until:
            self.step()

    def send(self, size, most_iterations):
        """Send a copy; return in how many iterations it was there."""
        began, left = self.iteration, size
        gate = Gate(self.line, size, PIECE, self.now)
        while left or self.under_way:
            assert self.iteration - began <= most_iterations, f"{left} of {size} bytes are left"
            self.step()
            room = self.line.fits(self.forecast.idle_until - self.now)
            while len(self.under_way) < 2 and (piece := gate.lets(self.forecast, self.now)):
                left -= piece
                due = not math.isinf(self.forecast.idle_until) and piece > room
                free = max(self.now, self.under_way[-1][1] - self.latency if self.under_way else 0.0)
                self.under_way.append((free, free + self.latency + piece / self.rate, piece, due))
                self.line.on_its_way += piece
                room -= piece
        assert left == 0
        return self.iteration - began


spans = st.lists(st.tuples(st.floats(0.004, 0.05), st.floats(0.001, 0.05)), min_size=1, max_size=4)


@example([(0.0078125, 0.0078125)] * 2, 14_046_001, 2e7)
@given(spans, st.integers(1, 20 * MB), st.floats(2e7, 2e9))
@settings(max_examples=60, deadline=None)
def test_nothing_is_on_its_way_when_a_collective_begins_and_every_copy_gets_there(pattern, size, rate):
    node = Node(pattern, rate)
    node.train(LEARNT + 2)
    node.send(MB, math.inf)  # the rate is learnt with it
    node.late = set()
    slow = size / rate / sum(idle_s + busy_s for idle_s, busy_s in pattern)  # iterations that the line takes by itself
    node.send(size, MOST_ITERATIONS + 2 + slow)
    assert not node.late


def test_a_span_of_the_usual_length_takes_as_much_as_arrives_in_it():
    node = Node([(0.020, 0.030)], rate=1e8)
    node.train(LEARNT + 2)
    node.send(MB, 4)
    assert node.send(10 * MB, 10) <= 8, "two megabytes a span, less what latency and the first look take"


def test_where_there_is_no_span_at_all_a_part_goes_in_each_iteration():
    node = Node([(0.0, 0.050)])
    node.train(LEARNT + 2)
    assert node.send(50 * MB, MOST_ITERATIONS + 1) >= MOST_ITERATIONS - 1
    assert not node.late, "all of it had to go"


def test_while_nothing_is_known_or_nothing_is_sent_all_of_it_goes_at_once():
    gate = Gate(Line(), 5 * MB, PIECE, 7.0)
    assert [gate.lets(Forecast(), 7.0) for _ in range(4)] == [PIECE, PIECE, MB, 0]


def test_in_the_first_iterations_nothing_goes_while_something_is_sent():
    gate = Gate(Line(), 5 * MB, PIECE, 7.0)
    assert gate.lets(Forecast(0.0, 0.0), 7.5) == 0
    assert gate.lets(Forecast(0.0, 0.0), 8.0) > 0, "unless that does not end"


def test_a_line_that_became_slow_is_noticed_after_a_few_pieces_and_one_that_became_fast_too():
    node = Node([(0.020, 0.010)], rate=1e9)
    node.train(LEARNT + 2)
    node.send(10 * MB, 5)
    node.rate, node.late = 5e7, set()
    node.send(MB * 10, MOST_ITERATIONS + 1)
    assert 0 < len(node.late) < RATES, "until the slow pieces are a quarter of those that count"
    node.late = set()
    node.send(MB * 10, MOST_ITERATIONS + 1)
    assert not node.late
    node.rate = 1e9
    node.send(10 * MB, MOST_ITERATIONS + 1)
    assert node.send(40 * MB, 5) <= 4


def test_one_hiccup_stops_nothing():
    line = Line()
    for _ in range(RATES):
        line.arrived(MB, 0.001)
    line.arrived(MB, 1.0)
    assert line.fits(MARGIN_S + 0.001) == pytest.approx(MB)


@given(st.integers(1, 10**9), st.floats(0.001, 1000.0))
def test_a_copy_that_never_finds_a_span_is_through_in_time(size, iteration_s):
    line, now = Line(), 3.0
    gate, left, busy = Gate(line, size, PIECE, now), size, Forecast(0.0, iteration_s)
    for _ in range(MOST_ITERATIONS + 1):
        while piece := gate.lets(busy, now):
            left -= piece
        now += min(iteration_s, 15.0) * 1.0001
    assert left == 0


def test_the_last_piece_may_be_small():
    gate = Gate(Line(), 100, PIECE, 0.0)
    assert gate.lets(Forecast(5.0, 1.0), 1.0) == 100
    assert LEAST > 100
