"""A task's configuration as a person compares it: a row an argument. Pure."""

import shlex
from collections.abc import Iterator, Sequence

from unicron.contracts.tasks import UNCOUNTED, TaskSpec
from unicron.healing import shown_shape


def configuration(spec: TaskSpec) -> list[tuple[str, str]]:
    """Return pairs of a name and a text. Of environment variables there are the names alone: values may be secrets."""
    options: dict[str, str] = {}
    for name, value in _options(spec.command):
        options[name] = f"{options[name]} {value}" if name in options else value
    layouts = [f"{size}: {layout.degrees}" for size, layout in spec.layouts.items()]
    rows = [
        ("command", shlex.join(spec.command)),
        *options.items(),
        ("folder", spec.workdir),
        ("commit", spec.commit),
        ("environment", " ".join(sorted(spec.env))),
        ("workers", f"{spec.min_workers} to {spec.max_workers}" + f", in multiples of {spec.unit}" * (spec.unit > 1)),
        ("replica", ", ".join(layouts) or shown_shape(spec, spec.max_workers).degrees),
        ("weight", f"{spec.weight:g}"),
        ("microbatches", str(spec.microbatches)),
        ("iterations", str(spec.iterations) if spec.iterations < UNCOUNTED else ""),
        ("healing", str(spec.heal)),
        ("checkpoints", spec.checkpoints),
    ]
    return [(name, text) for name, text in rows if text]


def _options(command: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the options of a command with their values: what stands behind one up to the next, or behind its `=`."""
    name, values = "", list[str]()
    for word in [*command, "--"]:
        if not word.startswith("-") or _is_number(word):
            values.append(word)
            continue
        if name:
            yield name, " ".join(values) or "yes"
        name, _, value = word.partition("=")
        values = [value] if value else []


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
