"""Write the tables of settings in docs/operations.md from the classes themselves: `python docs/settings.py`."""

import importlib
import re
from pathlib import Path

import msgspec

from unicron.services import SERVICES
from unicron.settings import PREFIX, Settings

PAGE = Path(__file__).with_name("operations.md")
ROOMS = ("agent.settings", *(f"{name}.main" for name in sorted(SERVICES)))
BEGIN, END = "<!-- settings: made by docs/settings.py -->", "<!-- end of settings -->"


def meanings(kind: type[Settings]) -> dict[str, str]:
    """Return what the docstring of `kind` says of each of its own fields."""
    attributes = (kind.__doc__ or "").partition("Attributes:\n")[2]
    found: dict[str, str] = {}
    names: list[str] = []
    for line in attributes.splitlines():
        entry = re.match(r" {8}([a-z_, ]+): (.*)", line)
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


def page() -> str:
    """Return docs/operations.md with its tables made anew."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
