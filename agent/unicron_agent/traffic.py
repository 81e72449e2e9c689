"""Decides when a copy of a state may be sent: while this node's workers leave the network idle."""

import asyncio
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from unicron.contracts.traffic import Forecast, decode_forecast, forecast_name
from unicron.snapshots.gate import Gate, Line

LOOKS = 100
"""How often in an iteration a copy that waits looks whether the network is idle."""

SHORTEST_S, LONGEST_S = 0.0005, 0.005
"""Between two looks."""


class NodeTraffic:
    """Reads this node's workers' forecasts, and counts the copies that are under way.

    Args:
        folder: the node's memory.
        slots: returns the slots whose workers may send to other nodes.
    """

    def __init__(self, folder: Path, slots: Callable[[], Iterable[int]] = tuple) -> None:
        self.line = Line()
        self._folder, self._slots = folder, slots

    def forecast(self) -> Forecast:
        """Return the forecast of all workers together."""
        forecasts = [self._forecast_of(slot) for slot in self._slots()] or [Forecast()]
        return Forecast(min(each.idle_until for each in forecasts), max(each.iteration_s for each in forecasts))

    def _forecast_of(self, slot: int) -> Forecast:
        try:
            return decode_forecast((self._folder / forecast_name(slot)).read_bytes())
        except FileNotFoundError:
            return Forecast()

    async def next_piece_size(self, gate: Gate) -> int:
        """Wait until a piece may be sent; return its size."""
        clock = asyncio.get_running_loop()
        while not (size := gate.lets(forecast := self.forecast(), clock.time())):
            await asyncio.sleep(_pause(forecast))
        return size

    async def wait_until_idle(self, gate: Gate) -> float:
        """Wait while workers send, as long as an incoming copy may wait; return the seconds waited."""
        clock = asyncio.get_running_loop()
        began = clock.time()
        while gate.holds(forecast := self.forecast(), clock.time()):
            await asyncio.sleep(_pause(forecast))
        return clock.time() - began


def _pause(forecast: Forecast) -> float:
    if math.isinf(forecast.idle_until):
        return SHORTEST_S
    return min(max(forecast.iteration_s / LOOKS, SHORTEST_S), LONGEST_S)
