"""Time limits that contradict each other are refused at the start, with both names."""

import pytest
from unicron_agent.settings import AgentSettings
from unicron_detector.main import DetectorSettings

from unicron.errors import InvalidInputError


@pytest.mark.parametrize("value", [0.0, -1.0, 1.5, float("nan"), float("inf")])
def test_an_agent_beats_as_often_as_detectors_expect(value):
    with pytest.raises(InvalidInputError, match=r"^UNICRON_HEARTBEAT_S .*: give seconds above 0, 1 at most$"):
        AgentSettings(heartbeat_s=value)


@pytest.mark.parametrize("name", ["asleep_s", "hang_s", "between_s"])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_limit_is_a_duration(name, value):
    with pytest.raises(InvalidInputError, match=f"^UNICRON_{name.upper()} {value:g}: give a finite number of seconds"):
        AgentSettings(**{name: value})


def test_a_script_may_be_busy_for_longer_between_iterations_than_in_one():
    with pytest.raises(InvalidInputError) as refused:
        AgentSettings(hang_s=60.0, between_s=30.0)
    assert str(refused.value) == (
        "UNICRON_HANG_S 60 is longer than UNICRON_BETWEEN_S 30: a script would have less time between two iterations "
        "than in one; lower UNICRON_HANG_S or raise UNICRON_BETWEEN_S"
    )


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"grace_s": 10.0}, ("UNICRON_GRACE_S 10", "UNICRON_HEARTBEAT_TIMEOUT_S 3")),
        ({"window_s": 2.0}, ("UNICRON_HEARTBEAT_TIMEOUT_S 3", "UNICRON_WINDOW_S 2")),
    ],
)
def test_limits_of_the_detector_that_contradict_each_other_are_named_both(given, names):
    with pytest.raises(InvalidInputError) as refused:
        DetectorSettings(**given)
    assert all(name in str(refused.value) for name in names)
