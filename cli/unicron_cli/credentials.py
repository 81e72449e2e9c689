"""The commands `unicron credentials`: keys on the bus, and the rights of each."""

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from unicron_deploy.embedded import Cluster
from unicron_deploy.keys import FABRIC, Keyring
from unicron_deploy.rights import SUBSCRIBER, rights

from unicron.errors import InvalidInputError
from unicron_cli.output import CONTAINERS, FOLDER, Folder, Json, console, done, print_json

app = typer.Typer(no_args_is_help=True)

RELOAD = "have the server read its configuration again: nats-server --signal reload, or docker-compose kill -s HUP nats"

Name = Annotated[str, typer.Argument(metavar="NAME", help="A service, a node, fabric, operator, user or subscriber.")]
Node = Annotated[str, typer.Argument(metavar="NODE", help="Name of the node.")]


@app.command("list")
def list_keys(folder: Folder = FOLDER, as_json: Json = False) -> None:
    """List all keys, and the names that were shut out."""
    keyring = _keyring(folder)
    users, shut = keyring.users(), keyring.shut()
    if as_json:
        found = [{"name": name, "key": key, "file": str(keyring.file(name))} for name, key in users.items()]
        print_json({"users": found, "shut_out": shut})
        return
    table = Table("user", "public key", "may publish on", "file")
    for name, key in users.items():
        table.add_row(name, key, "\n".join(rights(name).publish), str(keyring.file(name)))
    for name in shut:
        table.add_row(name, "shut out", "", "")
    console().print(table)


@app.command("subscriber")
def subscriber(folder: Folder = FOLDER, as_json: Json = False) -> None:
    """Say where the key is with which a tool of yours may read all facts, and nothing else."""
    path = Keyring(CONTAINERS).path(SUBSCRIBER)
    if _has_keys(folder) or not path.exists():
        path = _keyring(folder).path(SUBSCRIBER)
    if not path.exists():
        _keyring(folder).ensure([])
        _reload(folder)
    text = (
        f"{path}\nUNICRON_NATS_NKEY={path} python examples/subscriber.py\n"
        "anybody with this file may read all facts and telemetry; its replies come to _INBOX.subscriber.>"
    )
    done(text, as_json, name=SUBSCRIBER, file=str(path))


@app.command("node")
def node(name: Node, folder: Folder = FOLDER, as_json: Json = False) -> None:
    """Give a node its keys, also one that was shut out.

    Copy the files there, and name them in UNICRON_NATS_NKEY and UNICRON_FABRIC_KEY.
    """
    keyring = _keyring(folder)
    path, fabric = keyring.admit(name), keyring.fabric(name)
    done(f"{path}\n{fabric}\n{_reload(folder)}", as_json, name=name, file=str(path), fabric=str(fabric))


@app.command("rotate")
def rotate(name: Name, folder: Folder = FOLDER, as_json: Json = False) -> None:
    """Replace a key: the old one opens nothing any more; a process that reads the new one from its file goes on.

    `fabric` stands for the key that opens nodes to one another: of that, the old one is taken for ten minutes more.
    """
    if name == FABRIC:
        files = [str(path) for path in _keyring(folder).rotate_fabric()]
        text = "\n".join((*files, "give each node its file within ten minutes; no restart is needed"))
        done(text, as_json, name=name, files=files)
        return
    path = _keyring(folder).rotate(name)
    done(f"{path}\n{_reload(folder)}", as_json, name=name, file=str(path))


@app.command("shut-out")
def shut_out(name: Node, folder: Folder = FOLDER, as_json: Json = False) -> None:
    """Take a node's key away and end its connection; `unicron credentials node` lets it in again.

    What it knows of the other nodes' common key is worth nothing either: they get another one.
    """
    files = [str(path) for path in _keyring(folder).shut_out(name)]
    text = "\n".join((f"{name} is shut out", *files, *(["give each of the other nodes its file now"] if files else [])))
    done(f"{text}\n{_reload(folder)}", as_json, name=name, files=files)


@app.command("forget")
def forget(name: Node, folder: Folder = FOLDER, as_json: Json = False) -> None:
    """Take a node's key away, and let another machine have its name; where it may know too much, shut it out first."""
    _keyring(folder).forget(name)
    done(f"{name} is forgotten\n{_reload(folder)}", as_json, name=name)


def _keyring(folder: Path) -> Keyring:
    """Return the keys of the cluster in `folder`.

    Raises:
        InvalidInputError: there are none; new ones would open nothing.
    """
    keys = folder.resolve() / "keys"
    if not _has_keys(folder):
        raise InvalidInputError(
            f"no cluster's keys in {keys}; name the folder of the cluster of `unicron up` or `unicron init` with --dir "
            "(one with --insecure needs none); containers keep theirs: docs/howto/keys.md says how to change one, and "
            "for the subscriber's: mkdir -p .unicron/containers && "
            'docker cp "$(docker-compose ps -aq keys)":/keys/subscriber .unicron/containers/'
        )
    return Keyring(keys)


def _has_keys(folder: Path) -> bool:
    return any((folder / "keys").glob("*/*.nk"))


def _reload(folder: Path) -> str:
    """Have the embedded server of `folder` look who is let in; return what was done, or what is left to do."""
    if (folder / "cluster.json").exists() and Cluster.load(folder).reload():
        return "the server has read the keys again"
    return RELOAD
