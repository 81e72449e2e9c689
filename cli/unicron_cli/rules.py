"""The commands `unicron rules`: what a line stands for, and whether a file of rules of one's own is one."""

from pathlib import Path
from typing import Annotated

import typer

from unicron.contracts.failures import Severity
from unicron.errors import InvalidInputError
from unicron.rules import Rules, Ruling, load
from unicron_cli.output import Json, done, print_json, say

app = typer.Typer(no_args_is_help=True)

Folder = Annotated[
    str,
    typer.Option("--rules", envvar="UNICRON_RULES", metavar="FOLDER", help="TOML files that are tried before ours."),
]

EXCEPTION = {
    Severity.SEV1: "the node is given up, and its tasks go on elsewhere",
    Severity.SEV2: "the worker is started again",
    Severity.SEV3: "the ranks form a new group, and try again; a process that ended by it is started again",
}
KERNEL = EXCEPTION | {Severity.SEV3: "nothing by itself; a failure on that node just then has it in its reason"}
OUTPUT = {Severity.SEV3: "nothing by itself; a failure of its task just then has it in its reason"}


@app.command("explain")
def explain(
    line: Annotated[str, typer.Argument(help="An exception, 'CLASS: MESSAGE', or a line of a log.")],
    rules: Folder = "",
    as_json: Json = False,
) -> None:
    """Show which rule a line falls under, how severe that is, and what is done about it."""
    found = load(rules)
    rulings = {
        "of a worker": _as_record(found.rule_for_exception(line), EXCEPTION),
        "of the kernel": _as_record(found.rule_for_hardware(line), KERNEL),
        "of a worker's output": _as_record(found.rule_for_output(line), OUTPUT),
    }
    if as_json:
        print_json(rulings)
        return
    for whose, each in rulings.items():
        if each is None:
            say(f"{whose}: says nothing")
        else:
            say(f"{whose}: {each['status']}, severity {each['severity']}: {each['cure']}\n  by {each['rule']}")


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A TOML file of rules.")], as_json: Json = False
) -> None:
    """Check a file of rules; name what is wrong with it."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{file}: {error}; name a TOML file") from error
    Rules(text, str(file), load())
    done(f"{file} is in order", as_json, file=str(file))


def _as_record(ruling: Ruling | None, cures: dict[Severity, str]) -> dict[str, object] | None:
    if ruling is None:
        return None
    verdict = ruling.verdict
    return {
        "status": verdict.status,
        "severity": int(verdict.severity),
        "cure": cures[verdict.severity],
        "rule": ruling.rule,
    }
