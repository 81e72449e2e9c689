"""Write the tables of settings, faults and metrics in docs/reference from the code: `python docs/settings.py`."""

import importlib
import re
from pathlib import Path

import msgspec

from unicron.contracts.faults import FAULTS
from unicron.metric_definitions import FAMILIES
from unicron.services import CONSOLE, NAMED
from unicron.settings import PREFIX, Settings

REFERENCE = Path(__file__).with_name("reference")
ROOMS = ("agent.settings", *(f"{name}.main" for name in sorted((*NAMED, CONSOLE))))


def meanings(kind: type[Settings]) -> dict[str, str]:
    """Return what the docstring of `kind` says of each of its own fields."""
    attributes = (kind.__doc__ or "").partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    names: list[str] = []
    for line in attributes.splitlines():
        entry = re.match(r" {8}([a-z_][a-z_, ]*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            found |= dict.fromkeys(names, entry[2])
        elif line.startswith(" " * 12):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found


def table(kind: type[Settings], title: str) -> str:
    """Return the Markdown table of the fields that `kind` adds to `Settings`, or of `Settings` itself."""
    inherited = set() if kind is Settings else {field.name for field in msgspec.structs.fields(Settings)}
    own = [field for field in msgspec.structs.fields(kind) if field.name not in inherited]
    texts = meanings(kind)
    if missing := [field.name for field in own if field.name not in texts]:
        raise SystemExit(f"{kind.__module__}.{kind.__name__}: say under Attributes what {', '.join(missing)} mean")
    rows = [f"### {title}", "", "| environment variable | flag | default | meaning |", "|---|---|---|---|"]
    for field in own:
        default = f"`{field.default}`" if field.default != "" else "empty"
        flag = f"--{field.name.replace('_', '-')}"
        rows.append(f"| `{PREFIX}{field.name.upper()}` | `{flag}` | {default} | {texts[field.name]} |")
    return "\n".join(rows)


def tables() -> str:
    """Return the tables of all processes: what they share, then what each one adds."""
    parts, shared = [table(Settings, "Every process")], Settings.__struct_fields__
    for name in ROOMS:
        module = importlib.import_module(f"unicron_{name}")
        parts += [
            table(kind, f"The {name.partition('.')[0]}, besides")
            for kind in vars(module).values()
            if isinstance(kind, type) and issubclass(kind, Settings) and kind.__struct_fields__ != shared
        ]
    return "\n\n".join(parts)


def faults() -> str:
    """Return the Markdown table of the faults that can be injected."""
    rows = ["| fault | hits | value | default | what it does |", "|---|---|---|---|---|"]
    for kind in FAULTS.values():
        value = f"{kind.value.name}: {kind.value.allowed}" if kind.value else ""
        default = "" if kind.value is None else "required" if kind.value.default is None else kind.value.default
        rows.append(f"| `{kind.name}` | {' or '.join(kind.targets)} | {value} | {default} | {kind.text} |")
    return "\n".join(rows)


def metrics() -> str:
    """Return the Markdown table of the metrics that processes export."""
    rows = ["| metric | kind | labels | exported by | what it is |", "|---|---|---|---|---|"]
    for each in FAMILIES.values():
        labels = ", ".join(each.labels)
        rows.append(f"| `{each.name}` | {each.kind} | {labels} | {each.teller} | {each.text} |")
    return "\n".join(rows)


PAGES = {"settings": tables, "faults": faults, "metrics": metrics}
"""Pages of docs/reference, and what makes the table of each."""


def page(name: str) -> str:
    """Return a page with its table made anew."""
    begin, end = f"<!-- {name}: made by docs/settings.py -->", f"<!-- end of {name} -->"
    before, _, rest = _path(name).read_text(encoding="utf-8").partition(begin)
    return f"{before}{begin}\n\n{PAGES[name]()}\n\n{end}{rest.partition(end)[2]}"


def _path(name: str) -> Path:
    return REFERENCE / f"{name}.md"


if __name__ == "__main__":
    for each in PAGES:
        _path(each).write_text(page(each), encoding="utf-8")
