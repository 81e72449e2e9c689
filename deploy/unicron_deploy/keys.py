"""The keys of a cluster: one for each user of the bus, in a folder of its own that can be given to that one alone.

A user is let in while its key is there. `NAME/NAME.nk` is its seed, `NAME/shut-out` says that it gets none by itself,
and `server/accounts.conf`, without secrets, is what the NATS server includes. `NODE/fabric.key` is the same for all
nodes, and nobody else's: it opens them to one another. Where the servers speak TLS each folder holds the authority's
`ca.pem`, and that of the server and those of nodes a certificate, `tls.pem` and `tls.key`. `console/tokens` has a line
for each person who may give orders on the console's page: a name and a token.
"""

import argparse
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import nkeys

from unicron import proofs
from unicron.bus import access
from unicron.errors import InvalidInputError, UnicronError
from unicron.files import read_secret, write_secret
from unicron.services import CONSOLE, NAMED
from unicron_deploy import rights
from unicron_deploy.certificates import Authority

SERVER = "server"
"""Folder of what the server needs; no node can be called so."""

AUTHORITY = "ca"
"""Folder of the certificate authority, which nobody but the keys' owner needs; no node can be called so either."""

ROUTE = "route"
"""As what the servers of a cluster know one another."""


FABRIC = "fabric"
"""Stands for the nodes' common key, where a user could be named."""

OVERLAP_S = 600.0
"""How long nodes take the fabric key before as well: until all of them have the new one."""


class Keyring:
    """The keys in `folder`; whoever changes them has the server read its configuration again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.accounts = folder / SERVER / "accounts.conf"
        self.routes = folder / SERVER / "routes.conf"
        self.tokens = folder / CONSOLE / "tokens"
        self.authority = Authority(folder / AUTHORITY)

    def path(self, name: str) -> Path:
        """Return where the seed of the user `name` is, or would be."""
        return self.folder / name / f"{name}.nk"

    def fabric(self, node: str) -> Path:
        """Return where the fabric key of a node is, or would be."""
        return self.folder / node / "fabric.key"

    def users(self) -> dict[str, str]:
        """Return the public key of each user that has a key.

        Raises:
            InvalidInputError: a file is no seed, or others may read it.
        """
        found = sorted(path.stem for path in self.folder.glob("*/*.nk"))
        return {name: access.public_key(self.path(name)) for name in found}

    def shut(self) -> list[str]:
        """Return who was shut out."""
        return sorted(path.parent.name for path in self.folder.glob("*/shut-out"))

    def ensure(self, nodes: Iterable[str]) -> None:
        """Make the keys that are missing, for all services, people and `nodes`; who is shut out stays so.

        Raises:
            InvalidInputError: a node can't be called so, or a key that is there can't be used.
        """
        if not self.authority.exists and (foreign := sorted(self.folder.glob("*/ca.pem"))):
            raise InvalidInputError(
                f"{foreign[0]} is of another cluster, whose servers speak TLS, as that in containers: remove "
                f"{self.folder}, so that keys of this one are made, or begin it in another folder (--dir)"
            )
        wanted = [*rights.PEOPLE, *NAMED, *(_node(name) for name in nodes)]
        fabric = self._fabric()
        for name in wanted:
            if not self.path(name).exists() and name not in self.shut():
                self._make(name)
        if not self.tokens.exists() and CONSOLE not in self.shut():
            write_secret(self.tokens, f"{rights.OPERATOR} {secrets.token_urlsafe(24)}\n".encode())
        self._spread(fabric)
        if self.authority.exists:
            self._certify()
        self.write()

    def certify(self, names: Iterable[str]) -> None:
        """Make the authority, where there is none, and all certificates that are missing or half through their life.

        Args:
            names: host names and addresses by which the servers are reached.

        Raises:
            InvalidInputError: the authority's files can't be used.
        """
        self.authority.ensure()
        self.authority.certify(self.accounts.parent, names)
        self._certify()

    def _certify(self) -> None:
        nodes = self._nodes()
        for name in self.users():
            if name in nodes:
                self.authority.certify(self.folder / name, [name])
            else:
                (self.folder / name / "ca.pem").write_bytes(self.authority.certificate.read_bytes())

    def route(self, addresses: Iterable[str]) -> None:
        """Write how the servers of a cluster find and know one another, with a secret that only they have.

        Args:
            addresses: HOST:PORT where each listens for the others.
        """
        text = self.routes.read_text() if self.routes.exists() else ""
        found = re.search(r'password: "(\w+)"', text)
        secret = found[1] if found else secrets.token_hex(32)
        urls = ", ".join(f'"nats-route://{ROUTE}:{secret}@{address}"' for address in addresses)
        self.routes.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        who = f'authorization {{ user: {ROUTE}, password: "{secret}", timeout: 5 }}'
        write_secret(self.routes, f"name: unicron\n{who}\nroutes: [{urls}]\n".encode())

    def admit(self, node: str) -> Path:
        """Give a node a key, where it has none, and let it in again if it was shut out; return the path of its seed."""
        path, fabric = self.path(_node(node)), self._fabric()
        if not path.exists():
            self._make(node)
        (path.parent / "shut-out").unlink(missing_ok=True)
        self._spread(fabric)
        if self.authority.exists:
            self._certify()
        self.write()
        return path

    def rotate(self, name: str) -> Path:
        """Replace the key of a user, so that the old one opens nothing any more; return the path of the seed.

        Raises:
            InvalidInputError: there is no such user.
        """
        self._known(name)
        self._make(name)
        self.write()
        return self.path(name)

    def rotate_fabric(self) -> list[Path]:
        """Replace the key of all nodes, who take the old one for `OVERLAP_S` more; return the paths of its files.

        Raises:
            InvalidInputError: there are no nodes, or the key that is there can't be used.
        """
        old, now = self._fabric(), time.time()
        found = self._spread(proofs.as_file(proofs.new_key(), proofs.keys_in(old, now)[0], now + OVERLAP_S))
        if not found:
            raise InvalidInputError(f"no node has a key in {self.folder}; give one with `unicron credentials node`")
        return found

    def shut_out(self, name: str) -> list[Path]:
        """Take the key of a user away; where that is a node, the others get another fabric key, and take no old one.

        Returns:
            The paths of the others' fabric keys, if these are new.

        Raises:
            InvalidInputError: there is no such user.
        """
        self._known(name)
        nodes = self._nodes()  # who is cut off here can do it again: the key of the user goes last
        others = self._spread(proofs.as_file(proofs.new_key()), {*nodes} - {name}) if name in nodes else []
        self.fabric(name).unlink(missing_ok=True)
        (self.path(name).parent / "shut-out").touch()
        self.path(name).unlink()
        self.write()
        return others

    def write(self) -> None:
        """Write what the server includes."""
        self.accounts.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.accounts.with_suffix(".new")
        scratch.write_text(rights.accounts(self.users()))
        scratch.replace(self.accounts)

    def _nodes(self) -> list[str]:
        return [name for name in self.users() if name not in (*rights.PEOPLE, *NAMED)]

    def _fabric(self) -> bytes:
        """Return what stands in the newest file of a fabric key, or what is to stand there where no node has one."""
        files = sorted(self.folder.glob("*/fabric.key"), key=lambda path: path.stat().st_mtime_ns)
        return read_secret(files[-1]) + b"\n" if files else proofs.as_file(proofs.new_key())

    def _spread(self, content: bytes, nodes: Iterable[str] | None = None) -> list[Path]:
        """Give these nodes, or all, this fabric key; return the paths of its files."""
        files = [self.fabric(name) for name in sorted(self._nodes() if nodes is None else nodes)]
        for path in files:
            if not path.exists() or path.read_bytes() != content:
                write_secret(path, content)
        return files

    def _known(self, name: str) -> None:
        if not self.path(name).exists():
            names = ", ".join(self.users()) or "nobody"
            raise InvalidInputError(f"{name!r} has no key in {self.folder}; who has one: {names}")

    def _make(self, name: str) -> None:
        path = self.path(name)
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.parent.mkdir(exist_ok=True)
        path.parent.chmod(0o700)
        write_secret(path, nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER) + b"\n")


def _give(folder: Path, owner: int) -> None:
    """Give a folder with all in it to a user, unless it is theirs: then they may be at work in it."""
    if folder.stat().st_uid != owner:
        for path in [*folder.rglob("*"), folder]:  # the folder last: nothing was forgotten if it is theirs
            shutil.chown(path, owner)


def _node(name: str) -> str:
    if name in {SERVER, FABRIC, AUTHORITY}:
        raise InvalidInputError(
            f"node {name!r}: that stands for something else among the keys; call the node otherwise"
        )
    return rights.node(name)


def _change(keyring: Keyring, options: argparse.Namespace) -> None:
    if options.rotate == FABRIC:
        keyring.rotate_fabric()
    elif options.rotate:
        keyring.rotate(options.rotate)
    elif options.admit:
        keyring.admit(options.admit)
    elif options.shut_out:
        keyring.shut_out(options.shut_out)
    else:
        keyring.ensure(options.nodes)
        if options.servers:
            keyring.route(options.servers.split(","))
        if options.tls:
            keyring.certify(options.tls.split(","))


def main() -> int:
    """Make the keys that are missing, or change one, and write the server's file; return the exit status."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--dir", type=Path, required=True, help="folder of the keys")
    parser.add_argument("--owner", type=int, help="user id that is to own them")
    parser.add_argument("--give", metavar="FOLDER", type=Path, help="give it, and all in it, to that user too, once")
    parser.add_argument("--rotate", metavar="NAME", help=f"replace this user's key; {FABRIC}: that of all nodes")
    parser.add_argument("--admit", metavar="NODE", help="give this node a key, also one that was shut out")
    parser.add_argument("--servers", metavar="HOST:PORT,...", help="where each NATS server listens for the others")
    parser.add_argument("--tls", metavar="NAME,...", help="names and addresses by which the NATS servers are reached")
    parser.add_argument("--shut-out", metavar="NODE", help="take this user's key away")
    parser.add_argument("nodes", nargs="*", metavar="NODE", help="who is to have a key, unless shut out")
    options = parser.parse_args()
    try:
        _change(Keyring(options.dir), options)
    except UnicronError as error:
        sys.stderr.write(f"keys: {error}\n")
        return 1
    if options.owner is not None:
        for path in options.dir.rglob("*"):
            shutil.chown(path, options.owner)
        for path in sorted(options.give.glob("*")) if options.give else []:
            _give(path, options.owner)
    return 0


if __name__ == "__main__":
    sys.exit(main())
