"""Idle spans of a node's network: two numbers in memory that a worker shares with its agent.

A message to the agent for each collective would cost the worker more than some collectives take.
"""

import math
import struct
from typing import NamedTuple

_FORECAST = struct.Struct("<dd")


class Forecast(NamedTuple):
    """The forecast of a worker.

    Attributes:
        idle_until: monotonic seconds of the node before which it sends nothing, by what it has done so far. Past: it
            sends, or may begin at any moment; infinite: it has nobody to send to, or nothing is known yet.
        iteration_s: how long an iteration takes; 0: not known yet.
    """

    idle_until: float = math.inf
    iteration_s: float = 0.0

    def encode(self) -> bytes:
        """Return it as it is shared."""
        return _FORECAST.pack(*self)


def decode_forecast(data: bytes) -> Forecast:
    """Return what was shared; where a worker has only just begun, or is none of ours, nothing is known."""
    return Forecast(*_FORECAST.unpack(data)) if len(data) == _FORECAST.size else Forecast()


def forecast_name(slot: int | str) -> str:
    """Return the name of the file in the node's memory that the worker in a slot shares."""
    return f"slot-{slot}.forecast"
