"""How often Slurm is asked. Pure."""

SHARE = 0.05
"""Of its time that one who asks has the controller busy, at most."""

LONGEST_S = 120.0


class Pace:
    """Asks less often the longer answers take, and after each failure: all who ask, together, ask what Slurm can bear.

    Args:
        least_s: seconds from one question to the next where answers are quick.
    """

    def __init__(self, least_s: float) -> None:
        self._least_s = self._pause_s = least_s

    def answered(self, took_s: float) -> None:
        """Take note of an answer that took so long."""
        self._pause_s = min(max(self._least_s, took_s / SHARE), LONGEST_S)

    def failed(self) -> None:
        """Take note that there was none."""
        self._pause_s = min(2 * self._pause_s, LONGEST_S)

    @property
    def pause_s(self) -> float:
        """Seconds until the next question."""
        return self._pause_s
