"""Writes a set-up for production into an empty folder: keys, certificates, and what each host gets of them."""

from pathlib import Path

from unicron.addresses import Address
from unicron.errors import InvalidInputError
from unicron.files import write_secret
from unicron_deploy.keys import Keyring
from unicron_deploy.production.hosts import ROUTES, Hosts
from unicron_deploy.production.layout import keys, texts

PUBLIC = 0o644


def write(folder: Path, hosts: Hosts) -> None:
    """Write all files of a set-up; every one that may hold a secret is its owner's alone.

    Raises:
        InvalidInputError: the folder is there and not empty, or is none.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInputError(f"{folder}: something is there already; give a folder that is empty, or a new name")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    keyring = Keyring(folder / "keys")
    keyring.ensure(hosts.members)
    keyring.route(str(Address(server, ROUTES)) for server in hosts.servers)
    keyring.certify(hosts.servers)
    for path, text in texts(hosts).items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(PUBLIC)
    for path, name in keys(hosts).items():
        place = folder / path
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o700)
        for source in sorted(each for each in (keyring.folder / name).iterdir() if each.suffix != ".lock"):
            write_secret(place / source.name, source.read_bytes())
