"""The commands `unicron token`: join tokens, with which machines that no one has named become nodes."""

import re
import ssl
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from unicron.bus import access
from unicron.client import Client
from unicron.contracts.enrolment import LONGEST_S, MOST_USES, TokenView
from unicron.contracts.queries import CreateToken
from unicron.errors import InvalidInputError
from unicron.files import read_text, write_secret
from unicron.jointoken import JoinToken
from unicron.printable import shown
from unicron_cli.output import FOLDER, Json, Nats, done, print_view, settings, with_client

app = typer.Typer(no_args_is_help=True)

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
STDOUT = "-"


@app.command("create")
def create(
    pool: Annotated[str, typer.Option(metavar="POOL", help="Pool that its nodes belong to.")],
    uses: Annotated[int, typer.Option(min=1, max=MOST_USES, help="Nodes that it lets in.")] = 1,
    ttl: Annotated[str, typer.Option(metavar="TIME", help="For how long it does, as 90s, 30m, 1h or 7d.")] = "1h",
    machine: Annotated[
        str, typer.Option(metavar="ID", help="The only machine that may use it: its UNICRON_MACHINE.")
    ] = "",
    out: Annotated[
        str,
        typer.Option(metavar="FILE", help="Where the token goes; - for standard output.", show_default="a new file"),
    ] = "",
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Make a join token, and say in which file it is, which is its owner's alone."""
    token = made(nats)
    order = CreateToken(
        token=token.id, digest=token.digest, pool=pool, uses=uses, seconds=seconds(ttl), machine=machine
    )
    path = Path(out or FOLDER / "tokens" / f"{token.id}.token")
    if out != STDOUT and path.exists():
        raise InvalidInputError(f"{path} is there already; name another file, or remove it")
    text = with_client(nats, lambda client: client.create_token(order))
    if out == STDOUT:
        typer.echo(token.line(), nl=False)
        return
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_secret(path, token.line().encode())
    done(f"{path}\n{text}", as_json, file=str(path), token=token.id)


@app.command("list")
def list_tokens(nats: Nats = None, as_json: Json = False) -> None:
    """List all join tokens, the nodes that joined by them, and those that are over."""
    found = with_client(nats, Client.tokens)
    print_view({"tokens": found}, lambda: _table(found), as_json)


@app.command("revoke")
def revoke(
    token: Annotated[str, typer.Argument(metavar="ID", help="Of the token, as `list` shows it.")],
    nats: Nats = None,
    as_json: Json = False,
) -> None:
    """Have a join token let nobody in any more; nodes that came by it stay."""
    done(with_client(nats, lambda client: client.revoke_token(token)), as_json, token=token)


def made(nats: str | None) -> JoinToken:
    """Return a new token of the cluster whose key the settings name.

    Raises:
        InvalidInputError: that cluster has no authority, so its servers could not prove to be the right ones.
    """
    path = access.ca_path(settings(nats))
    if not path:
        raise InvalidInputError(
            "no ca.pem beside the operator's key: this cluster speaks no TLS, so nobody can join it safely; start it "
            "with `unicron up --host ADDRESS`"
        )
    try:
        return JoinToken.new(ssl.PEM_cert_to_DER_cert(read_text(Path(path), "give the authority's certificate")))
    except ValueError as error:
        raise InvalidInputError(f"{path}: no certificate in PEM: {error}") from error


def seconds(text: str) -> float:
    """Return how long a text such as 90s, 30m, 1h or 7d stands for.

    Raises:
        InvalidInputError: it is none, or too long.
    """
    found = re.fullmatch(r"(\d{1,9})([smhd]?)", text.strip())
    value = int(found[1]) * UNITS[found[2] or "s"] if found else 0
    if not 1 <= value <= LONGEST_S:
        raise InvalidInputError(
            f"--ttl {shown(text)}: give a time as 90s, 30m, 1h or 7d, {LONGEST_S / 86400:g} days at most"
        )
    return float(value)


def _table(found: list[TokenView]) -> Table:
    table = Table("token", "pool", "state", "until (UTC)", "uses", "nodes", "for machine", "made by")
    for token in found:
        until = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(token.expires))
        uses, names = f"{len(token.used)} of {token.uses}", ", ".join(use.node for use in token.used)
        table.add_row(token.token, token.pool, token.state, until, uses, names, token.machine, token.by)
    return table
