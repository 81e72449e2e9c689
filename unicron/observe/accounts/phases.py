"""The kinds of GPU time: each second of a slot is exactly one of these."""

from enum import StrEnum


class Phase(StrEnum):
    """The activity of a slot of a task, or what it waits for.

    The field's *goodput* is the share of `TRAINING`: of the slots' time (GPU time), or of the task's wall time
    (effective training time ratio; Kokolis et al., "Revisiting reliability in large-scale machine learning research
    clusters", 2024). Unicron (He et al., 2024) splits what a failure costs into C = C_detection + C_transition +
    C_sub-healthy; the decision is apart here, as is what of the transition is a wait for processes.
    """

    TRAINING = "training"
    """Its worker is in a membership that computes, and what it computes is new."""
    RECOMPUTED = "recomputed"
    """It computes what had been computed before: `Regrouped` names an earlier iteration, or microbatches of others."""
    DETECTION = "detection"
    """From the fault, by the first fact that shows it, to `FailureDetected` (C_detection)."""
    DECISION = "decision"
    """From `FailureDetected` to the first command or plan for the task."""
    TRANSITION = "transition"
    """From the order to form a membership to `Regrouped` (C_transition); states are handed over in it."""
    WAITING = "waiting"
    """All that can be ordered is, and no membership can be formed before more workers are ready."""
    SUB_HEALTHY = "sub_healthy"
    """The task computes without this slot, which failed; or it computes, but slower than usual (C_sub-healthy)."""
    CHECKPOINT = "checkpoint"
    """The task waits until it is known what lies in memory or on storage."""
    START_UP = "start_up"
    """A plan gave it the slot; until its first worker there computes."""
    IDLE = "idle"
    """Its worker is through, or no task has the slot."""


INTERRUPTED = {Phase.DECISION, Phase.TRANSITION, Phase.WAITING, Phase.CHECKPOINT}
"""The phases of a slot from a failure until its task computes again."""

ESTIMATES = (
    "detection, transition: who was not struck may have computed meanwhile and kept it, so these are upper bounds",
    "detection of a node that fell silent: only from when it was suspected, so a lower bound",
    "recomputed: how long an iteration takes is the mean between the journal's facts; all of a lost worker's count",
    "goodput: of a program that is run again nobody sees what it repeats, so it is an upper bound, shown with ≤",
    "sub_healthy: of a slowdown, the part beyond the usual time of an iteration, from when it was detected",
    "checkpoint: saves that training does not wait for cost nothing; reading states is part of transition",
)
"""Which of the figures are estimates, for a person."""
