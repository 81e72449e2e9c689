"""The tasks of the paper's experiments."""

from msgspec import structs

from unicron.contracts.tasks import ModelSpec, TaskSpec
from unicron.costmodel import catalogue, formulas

BATCH = 1024
"""Sequences of a global batch; the paper names none."""

CASE_5 = (("1.3B", 2.0), ("1.3B", 1.7), ("1.3B", 1.4), ("7B", 1.1), ("7B", 0.8), ("13B", 0.5))
"""Model and weight of each task of case 5 of table 3, which figure 11 trains."""

ALL_RUN = (64, 32, 16, 8, 4, 4)
"""Workers of each when none of the six waits and all 128 GPUs work: what `python -m benchmarks.table3` finds."""


def gpt3(name: str, size: str, *, weight: float = 1.0, most: int = 128, batch: int = BATCH) -> TaskSpec:
    """Return the task of training a GPT-3 of the catalogue on A800, as sizes that Megatron can run allow it."""
    model = ModelSpec(**structs.asdict(catalogue.size(size)), batch=batch, accelerator="A800")
    flops = formulas.iteration_flops(model)
    return TaskSpec(
        name=name, command=["train"], weight=weight, max_workers=most, model=model, flops_per_iteration=flops
    )


def case_5(*, all_run: bool = True, batch: int = BATCH) -> list[TaskSpec]:
    """Return the six tasks of case 5.

    Args:
        all_run: limit each to the size it has when all of them run. Otherwise the objective of the paper gives all
            GPUs to the task with the highest weight, and the others wait.
        batch: sequences of a global batch.
    """
    return [
        gpt3(f"{number}-{size}", size, weight=weight, most=most if all_run else sum(ALL_RUN), batch=batch)
        for number, ((size, weight), most) in enumerate(zip(CASE_5, ALL_RUN, strict=True), start=1)
    ]
