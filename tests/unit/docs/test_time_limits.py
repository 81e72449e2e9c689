"""The page on time limits says what the table has from which all of them are made, in its order."""

import re
from pathlib import Path

import pytest

from unicron.contracts import time_limits

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "time-limits.md"
ROWS = {
    "answer of a worker": time_limits.ANSWER_S,
    "broken collective": time_limits.COLLECTIVE_HOLD_S,
    "stopped process": time_limits.STOPPED_S,
    "grace": time_limits.GRACE_S,
    "heartbeats": time_limits.HEARTBEATS_S,
    "lease": time_limits.LEASE_S,
    "sleep": time_limits.ASLEEP_S,
    "hang": time_limits.HANG_S,
    "regroup": time_limits.REGROUP_S,
    "leaving": time_limits.LEAVE_S,
    "states of nodes": time_limits.STATES_S,
    "start": time_limits.START_S,
    "idle": time_limits.IDLE_S,
    "window": time_limits.WINDOW_S,
    "trial": time_limits.TRIAL_S,
    "silence": time_limits.SILENCE_S,
    "between two iterations": time_limits.BETWEEN_S,
}


def shown():
    """Return the seconds of each row of the page, by how it begins."""
    section = PAGE.read_text()
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| ")][1:]
    return {name.strip(): float(re.match(r" ([\d.,]+) s", value)[1].replace(",", "")) for name, value in rows}


@pytest.mark.parametrize("name", ROWS)
def test_the_page_says_how_long_each_wait_is(name):
    [seconds] = [each for row, each in shown().items() if row.startswith(name)]
    assert seconds == ROWS[name]


def test_the_page_has_no_other_rows():
    assert len(shown()) == len(ROWS)


def test_nobody_is_given_up_at_one_place_who_is_waited_for_at_another():
    assert time_limits.GRACE_S < time_limits.HEARTBEATS_S < time_limits.WINDOW_S
    assert 3 * time_limits.PING_S < time_limits.HEARTBEATS_S, "its agent has to be connected again in time"
    assert time_limits.STOPPED_S < time_limits.ASLEEP_S < time_limits.HANG_S < time_limits.BETWEEN_S
