"""Pipelines of torch.distributed.pipelining over a fault: what a schedule and its stage remember is reset."""

from typing import Any
from weakref import WeakKeyDictionary


class PipelineRuns:
    """Which schedule last ran in which groups.

    A stage exchanges shapes with its neighbours once, before its first microbatch. A rank that has been replaced
    does so again, and would wait for ever for neighbours that do not: so all do, in groups that were formed anew.
    """

    def __init__(self) -> None:
        self._formed: WeakKeyDictionary[Any, int] = WeakKeyDictionary()

    def prepare(self, schedule: Any, formed: int) -> None:
        """Make a schedule ready to run in the groups formed in epoch `formed`."""
        if formed < 0 or self._formed.get(schedule, formed) == formed:
            self._formed.setdefault(schedule, formed)
            return
        self._formed[schedule] = formed
        stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]  # noqa: SLF001 no public way
        for name in ("stage_forward", "stage_backward", "stages_forward", "stages_backward"):
            if hasattr(schedule, f"_{name}_initialized"):
                setattr(schedule, f"_{name}_initialized", False)
        schedule._internal_losses.clear()  # noqa: SLF001
        for stage in stages:
            stage.clear_runtime_states()
            for book in ("bwd_cache", "backward_state", "dw_runner"):
                getattr(stage, book, {}).clear()
