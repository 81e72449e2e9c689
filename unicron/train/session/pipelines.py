"""Schedules over a fault: what those of torch.distributed.pipelining and their stages remember is reset."""

from typing import Any
from weakref import WeakKeyDictionary


class PipelineRuns:
    """Remembers which schedule last ran in which groups.

    A stage exchanges shapes with its neighbours once, before its first microbatch. A rank that has been replaced
    does so again, and would wait for ever for neighbours that do not: so all do, in groups that were formed anew.
    """

    def __init__(self) -> None:
        self._formed: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def prepare(self, schedule: Any, formed: int) -> None:
        """Make a schedule ready to run in the groups formed in epoch `formed`; -1 where they are noise."""
        last, self._formed[schedule] = self._formed.get(schedule), formed
        if formed < 0 or last == formed:
            return
        if hasattr(schedule, "formed_anew"):
            schedule.formed_anew()
        elif last is not None:
            _reset(schedule)


def _reset(schedule: Any) -> None:
    """Have a schedule of torch.distributed.pipelining begin as if it had never run."""
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]  # noqa: SLF001 no public way
    for name in ("stage_forward", "stage_backward", "stages_forward", "stages_backward"):
        if hasattr(schedule, f"_{name}_initialized"):
            setattr(schedule, f"_{name}_initialized", False)
    schedule._internal_losses.clear()  # noqa: SLF001
    for stage in stages:
        stage.clear_runtime_states()
        for book in ("bwd_cache", "backward_state", "dw_runner"):
            getattr(stage, book, {}).clear()
