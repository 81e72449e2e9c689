"""The closed-form model of T(t, x) held against published measurements.

It reads `$UNICRON_DATA/throughput` (default: ../shared/data beside the repository). Four questions, each asked of every
model ("group") in vtrain_multi.csv:

1. How far off are iteration times, when one measurement anchors the group? The anchor is the group's first row; the
   median and the range over every other choice of anchor stand beside it.
2. How much slower than the best measured configuration is the one that the model would choose?
3. How far off are times when all measurements together scale the model (the median of what they are of it), and by
   how much does that rise when any one of them is spoilt by half or double?
4. How do both change when the constants are fitted on other groups ("held out") or on this one too?

"Held out" is said of constants. The terms of the model were chosen with all three groups in view; megatron_sc21.csv
(hardware FLOPs) and megatron_seqpar_mlsys23.csv (other recompute, interleaving) had no part in any fit.

All these systems are taken to have trained in float16, in which gradients are summed as 2 bytes. vTrain's simulator
counts so; the Megatron papers say mixed precision, and their code sums what it trains in. Megatron sums float32 only
with bfloat16, which is what the planner reckons with.
"""

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from benchmarks.harness.command import Figures, Options, Result, main
from unicron.contracts.tasks import ModelSpec
from unicron.costmodel import catalogue, costs, formulas, planning
from unicron.costmodel.catalogue import Accelerator
from unicron.costmodel.costs import Array, Constants, LayoutArrays

DATA = Path(os.environ.get("UNICRON_DATA") or Path(__file__).parents[2] / "shared/data") / "throughput"

FITTED_ON = "3.6"
"""The group that `costs.FITTED` comes from: the widest sweep (tensor 1 to 16, microbatch 2 to 64), chosen for that."""

A100 = catalogue.accelerator("A100")
FLOAT16_BYTES = 2

SELENE = msgspec.structs.replace(A100, node_bandwidth=200e9)
"""The machine of both Megatron papers: DGX A100 with eight ports of 200 Gb/s."""


class Measurements(NamedTuple):
    """Measured configurations of one model; `names` say what to call them."""

    model: ModelSpec
    gpu: Accelerator
    on: LayoutArrays
    seconds: Array
    names: list[str]


Row = dict[str, str]

# --- reading ----------------------------------------------------------------------------------------------------------


def rows_of(name: str) -> list[Row]:
    """Return the rows of a file of the data folder."""
    with (DATA / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def group_of(rows: Sequence[Row], gpu: Accelerator, seconds: Sequence[float], **how: Any) -> Measurements:
    """Return rows of one model and batch as a group; `how` says what of `LayoutArrays` the rows leave open."""
    first = rows[0]
    named = {"hidden": "hidden", "heads": "heads", "sequence": "seq", "layers": "layers", "batch": "global_batch"}
    shape: dict[str, Any] = {name: int(first[column]) for name, column in named.items()}
    model = ModelSpec(**shape, vocabulary=51_200)
    sizes = np.array(how.pop("microbatch", None) or [int(row["micro_batch"]) for row in rows])
    tensor, pipeline, data = (np.array([int(row[name]) for row in rows]) for name in ("tp", "pp", "dp"))
    kinds = np.full(len(rows), how.pop("recompute", formulas.FULL))
    open_ = {"distributed": np.array(False), "summed_bytes": FLOAT16_BYTES, **how}
    names = ["/".join(map(str, each)) for each in zip(tensor, pipeline, data, sizes, strict=True)]
    on = LayoutArrays(tensor, pipeline, data, sizes, kinds, **open_)
    return Measurements(model, gpu, on, np.array(seconds), names)


def vtrain() -> dict[str, Measurements]:
    """Return the measured rows of vTrain (Megatron-DeepSpeed, full recompute) by model."""
    rows = rows_of("vtrain_multi.csv")
    found = {}
    for name in dict.fromkeys(row["model_params_b"] for row in rows):
        own = [row for row in rows if row["model_params_b"] == name]
        found[name] = group_of(own, A100, [float(row["iter_ms"]) / 1e3 for row in own])
    return found


def sc21() -> dict[str, list[Measurements]]:
    """Return both tables of Narayanan et al.; each row is a group of its own, as each has its own model or batch.

    Table 1 does not say the microbatch: the model's best is taken. Neither says the interleaving: none is assumed.
    """
    found: dict[str, list[Measurements]] = {}
    known = {row["model_params_b"]: row for row in rows_of("megatron_sc21.csv") if row["layers"]}
    known["174.6"] = {"layers": "96", "hidden": "12288", "heads": "96"}
    for row in rows_of("megatron_sc21.csv"):
        if "ZeRO" in row["source"]:
            continue  # another way of training
        whole = {**row, **{name: known[row["model_params_b"]][name] for name in ("layers", "hidden", "heads")}}
        sizes = [int(row["micro_batch"])] if row["micro_batch"] else list(planning.MICROBATCHES)
        probe = group_of([whole] * len(sizes), SELENE, [1.0] * len(sizes), microbatch=sizes)
        fits = (probe.model.batch // probe.on.data) % probe.on.microbatch == 0
        fits &= costs.memory_bytes(probe.model, probe.on) <= SELENE.memory_bytes
        best = int(np.where(fits, predicted(probe), np.inf).argmin())
        flops = formulas.iteration_flops(probe.model, formulas.FULL)  # the published rate counts recompute
        seconds = flops / (float(row["tflops_per_gpu"]) * 1e12 * int(row["gpus"]))
        table = "sc21 table 1" if "Table 1" in row["source"] else "sc21 table 2"
        found.setdefault(table, []).append(group_of([whole], SELENE, [seconds], microbatch=[sizes[best]]))
    return found


def seqpar() -> dict[str, list[Measurements]]:
    """Return table 5 of Korthikanti et al., by kind of recompute; each row is a group of its own."""
    found: dict[str, list[Measurements]] = {}
    for row in rows_of("megatron_seqpar_mlsys23.csv"):
        kind = formulas.FULL if row["mode"] == "full_recompute" else formulas.SELECTIVE
        given = group_of([row], SELENE, [float(row["iter_s"])], recompute=kind, chunks=int(row["interleave"]))
        found.setdefault(f"seqpar {formulas.RECOMPUTE[kind]}", []).append(given)
    return found


# --- fitting ----------------------------------------------------------------------------------------------------------


def predicted(group: Measurements, constants: Constants = costs.FITTED) -> Array:
    """Return the seconds that the model says."""
    return costs.iteration_s(group.model, group.gpu, group.on, constants)


def fitted(groups: Sequence[Measurements]) -> Constants:
    """Fit the constants: the least sum of absolute relative errors, each group counting as one.

    Time is linear in 1/efficiency, touches and overhead, so this is a linear programme; it is solved by weighting
    least squares anew until nothing moves. Absolute errors, because a few rows are off by half for reasons of their
    own. Below 2 %, the noise of a measurement, errors count as squares.
    """
    parts, rests, weights = [], [], []
    for group in groups:
        rest = predicted(group, Constants(np.inf, 0, 0))
        units = [predicted(group, unit) - rest for unit in (Constants(1, 0, 0), Constants(np.inf, 1, 0))]
        units.append(predicted(group, Constants(np.inf, 0, 1e-3)) - rest)
        parts.append(np.stack(units, axis=1) / group.seconds[:, None])
        rests.append(1 - rest / group.seconds)
        weights.append(np.full(len(group.seconds), 1 / len(group.seconds)))
    matrix, wanted, given = np.concatenate(parts), np.concatenate(rests), np.concatenate(weights)
    weight = given
    for _ in range(300):
        scale = np.sqrt(weight)
        found = np.linalg.lstsq(matrix * scale[:, None], wanted * scale, rcond=None)[0]
        weight = given / np.maximum(np.abs(matrix @ found - wanted), 0.02)
    return Constants(1 / found[0], found[1], found[2] * 1e-3)


# --- judging ----------------------------------------------------------------------------------------------------------


def judged(group: Measurements, constants: Constants) -> Figures:
    """Return how good the model is on a group; errors in percent of the measured seconds."""
    said, seconds = predicted(group, constants), group.seconds
    rows = range(len(said))
    errors = [100 * np.abs(np.delete(said * seconds[at] / said[at] / seconds - 1, at)) for at in rows]
    means = [float(each.mean()) for each in errors]
    rises = []
    for row in rows:
        for factor in (0.5, 2.0):
            spoilt = scaled_errors(seconds, said, np.where(np.arange(len(said)) == row, factor, 1.0))
            rises.append(np.delete(spoilt, row).mean() - np.delete(scaled_errors(seconds, said), row).mean())
    chosen, best = int(said.argmin()), int(seconds.argmin())
    found = {
        "mape_percent": means[0],
        "median_percent": np.median(errors[0]),
        "worst_percent": errors[0].max(),
        "mape_median_anchor_percent": np.median(means),
        "mape_best_anchor_percent": min(means),
        "mape_worst_anchor_percent": max(means),
        "mape_no_anchor_percent": 100 * np.abs(said / seconds - 1).mean(),
        "mape_robust_percent": scaled_errors(seconds, said).mean(),
        "spoilt_row_rise_points": max(rises),
        "slowdown_percent": 100 * (seconds[chosen] / seconds[best] - 1),
    }
    names = {"rows": len(said), "chosen": group.names[chosen], "best": group.names[best]}
    return names | {name: round(float(value), 2) for name, value in found.items()}


def scaled_errors(seconds: Array, said: Array, spoil: Array | float = 1.0) -> Array:
    """Return the errors in percent where all measurements together scale the model, each spoilt by a factor."""
    factor = planning.scale(seconds * spoil / said)
    return 100 * np.abs(said * factor / seconds - 1)


def checked(groups: Sequence[Measurements]) -> Figures:
    """Return errors on rows that have different models: anchored on the first, and without an anchor."""
    ratios = np.array([float(predicted(group)[0] / group.seconds[0]) for group in groups])
    anchored = np.abs(ratios[1:] / ratios[0] - 1)
    found = {"mape": anchored.mean(), "worst": anchored.max(), "mape_no_anchor": np.abs(ratios - 1).mean()}
    return {"rows": len(groups), **{f"{name}_percent": round(100 * float(each), 2) for name, each in found.items()}}


def readable(constants: Constants) -> dict[str, float]:
    """Return the constants for people."""
    return {
        "matmul_efficiency": round(float(constants.matmul_efficiency), 3),
        "touches": round(float(constants.touches), 2),
        "layer_overhead_ms": round(1e3 * float(constants.layer_overhead_s), 2),
    }


def measure(_: Options, __: Path) -> Result:
    """Return all figures; the tables are of errors, and of what the model chooses beside the best."""
    if not DATA.is_dir():
        raise SystemExit(f"no folder {DATA}; set UNICRON_DATA to the folder that holds 'throughput'")
    groups = vtrain()
    shipped = {name: {"fitted": name == FITTED_ON, **judged(one, costs.FITTED)} for name, one in groups.items()}
    apart = {}
    for name, group in groups.items():
        constants = fitted([other for other_name, other in groups.items() if other_name != name])
        apart[name] = {**readable(constants), **judged(group, constants)}
    held = [one for one in shipped.values() if not one["fitted"]]
    worst = {
        "anchored_mape_percent": (shipped.values(), "mape_percent"),
        "worst_choice_slowdown_percent": (shipped.values(), "slowdown_percent"),
        "held_out_mape_percent": (held, "mape_percent"),
        "held_out_slowdown_percent": (held, "slowdown_percent"),
        "robust_mape_percent": (shipped.values(), "mape_robust_percent"),
        "spoilt_row_rise_points": (shipped.values(), "spoilt_row_rise_points"),
        "leave_one_out_mape_percent": (apart.values(), "mape_percent"),
    }
    figures = {name: max(one[what] for one in some) for name, (some, what) in worst.items()}
    known = {"shipped": readable(costs.FITTED), "fitted_again": readable(fitted([groups[FITTED_ON]]))}
    others = {name: checked(each) for name, each in (sc21() | seqpar()).items()}
    details = {"groups": shipped, "leave_one_group_out": apart, "other_systems": others, "constants": known}
    return Result(figures, details=details)


if __name__ == "__main__":
    main(measure)
