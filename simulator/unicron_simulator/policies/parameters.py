"""The costs of each policy, from `parameters.toml` or a file like it."""

import tomllib
from importlib.resources import files
from pathlib import Path

import msgspec

from unicron.errors import InvalidInputError
from unicron.files import MB, read_text

NAME = "parameters.toml"


class Costs(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The effect of a policy on throughput, and the times of its recovery, in seconds.

    Attributes:
        basis: what the figures rest on.
        efficiency: throughput without failures as a part of Megatron's.
        shrinks: whether a task that lost workers goes on with fewer.
        source: where the figures are from.
        assumed: what no source says.
        detect: until a failure is known, by severity.
        detect_iterations: mean iterations that are waited for on top, by severity.
        recover: from there until the task computes anew, by severity; "resize" where it was whole.
    """

    basis: str
    efficiency: float
    shrinks: bool
    source: str
    assumed: str = ""
    detect: dict[str, float]
    detect_iterations: dict[str, float] = {}
    recover: dict[str, float]


class Circular(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Efficiencies that were worked out from figure 11 of the paper, by policy."""

    basis: str = "circular"
    source: str = ""
    efficiency: dict[str, float] = {}


class Phases(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The phases of one transition (figure 9).

    Attributes:
        communicators_s: to set communicators up, however few GPUs they join.
        communicator_s: more of it for each GPU.
        state_bytes: of parameters and optimizer, for each parameter of a model.
        storage_bandwidth: bytes/s at which all nodes together read a checkpoint.
        setup_s: to start all processes anew, environment and CUDA included.
        recompute_s: to compute again what was done since the last checkpoint.
        source: where each of these is from.
    """

    communicators_s: float
    communicator_s: float
    state_bytes: float
    storage_bandwidth: float
    setup_s: float
    recompute_s: float
    source: dict[str, str]


def phases() -> Phases:
    """Return the phases of the file that comes along."""
    return msgspec.convert(tomllib.loads((files(__package__) / NAME).read_text(encoding="utf-8"))["phases"], Phases)


def load(path: Path | None = None) -> tuple[dict[str, Costs], Circular]:
    """Return the costs by policy, and those that are circular.

    Args:
        path: of another file; None for the one that comes along.

    Raises:
        InvalidInputError: the file can't be read, or a field is missing, unknown or of the wrong type.
    """
    place = str(path or NAME)
    ours = (files(__package__) / NAME).read_text(encoding="utf-8")
    text = read_text(path, f"give a file such as the one that comes with the simulator, {NAME}", MB) if path else ours
    try:
        entries = tomllib.loads(text)
        entries.pop("phases", None)
        circular = msgspec.convert(entries.pop("circular", {}), Circular)
        found = {name: msgspec.convert(entry, Costs) for name, entry in entries.items()}
    except (ValueError, RecursionError) as error:  # ValueError: of TOML and of msgspec
        raise InvalidInputError(
            f"{place}: {error}; take the file that comes with the simulator as a pattern"
        ) from error
    for name, costs in found.items():
        if not 0 < costs.efficiency <= 1:
            raise InvalidInputError(f"{place}: {name}: efficiency {costs.efficiency}; give a number above 0, up to 1")
        for field in ("detect", "recover"):
            _check(f"{place}: {name}.{field}", getattr(costs, field), ("sev1", "sev2", "sev3"))
        _check(f"{place}: {name}.recover", costs.recover, ("resize",))
        _check(f"{place}: {name}.detect_iterations", costs.detect_iterations, ())
    return found, circular


def _check(where: str, times: dict[str, float], needed: tuple[str, ...]) -> None:
    for kind in needed:
        if kind not in times:
            raise InvalidInputError(f"{where} has no {kind}; give seconds")
    for kind, value in times.items():
        if not 0 <= value < float("inf"):
            raise InvalidInputError(f"{where}.{kind} {value}; give a number, 0 or more")
