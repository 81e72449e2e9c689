"""`unicron convert`: what would bring a script of DistributedDataParallel to a Session."""

from pathlib import Path
from typing import Annotated

import typer

from unicron.errors import InvalidInputError
from unicron_cli.output import Json, print_json, say


def convert(
    script: Annotated[Path, typer.Argument(metavar="SCRIPT", help="A Python file that trains under torchrun.")],
    ranks: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="How many it was started with, where that decides on a global batch."),
    ] = 1,
    as_json: Json = False,
) -> None:
    """Show as a diff how a script of DistributedDataParallel gets a Session; it is left as it is.

    What is to be looked at is told beside. `unicron convert train.py | patch -p0 train.py` changes it.
    """
    import unicron_convert  # noqa: PLC0415

    try:
        text = script.read_bytes().decode()
        done = unicron_convert.convert(text, ranks)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{script}: {error}; name a Python file in UTF-8") from error
    except (SyntaxError, ValueError) as error:
        raise InvalidInputError(f"{script}:{getattr(error, 'lineno', 0)}: {error}: this is no Python") from error
    except unicron_convert.UnusualError as error:
        _tell(script, as_json, "", [(error.line, str(error))])
        raise typer.Exit(1) from error
    _tell(script, as_json, unicron_convert.difference(text, done.text, str(script)), done.remarks)


def _tell(script: Path, as_json: bool, diff: str, remarks: list[tuple[int, str]]) -> None:
    if as_json:
        told = [{"line": line, "text": text} for line, text in remarks]
        print_json({"ok": bool(diff), "file": str(script), "diff": diff, "remarks": told})
        return
    for line, text in remarks:
        say(f"{script}:{line}: {text}" if line else f"{script}: {text}", err=True)
    if not diff:
        say(f"{script} was not converted: its training loop is not of the usual shape", err=True)
    typer.echo(diff, nl=False)  # as it is: it is for patch
