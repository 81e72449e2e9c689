"""Texts as the programs that read our files spell them; each grammar has its own rules, and none is JSON's."""

import os
import re
from collections.abc import Mapping

from unicron.errors import InvalidInputError

_STEERING = re.compile(r'["\\\x00-\x1f\x7f\ud800-\udfff]')
_PLAIN = re.compile(r"[\w@%+=:,./\[\]-]*", re.ASCII)


def nats_string(text: str) -> str:
    r"""Return a text as nats-server's configuration has it: letters as they are, `\xHH` for a byte that steers."""
    return '"' + _STEERING.sub(_nats_bytes, text) + '"'


def _nats_bytes(found: re.Match[str]) -> str:
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(found[0]))


def nats_include(path: str) -> str:
    """Return a path behind `include` in nats-server's configuration, where nothing is escaped.

    Raises:
        InvalidInputError: it has both kinds of quotes, which can't be written there.
    """
    if "'" in path and '"' in path:
        raise InvalidInputError(f"{path!r}: nats-server can't include a path with both ' and \"; rename a folder of it")
    return f"'{path}'" if '"' in path else f'"{path}"'


def environment_file(values: Mapping[str, str]) -> str:
    """Return the lines of a file of variables, that systemd, Docker Compose and a shell read alike.

    Raises:
        InvalidInputError: they would read a value in different ways.
    """
    for name, value in values.items():
        if not _PLAIN.fullmatch(value):
            raise InvalidInputError(f"{name}={value!r}: use ASCII letters, digits and any of @%+=:,./[]_- in its place")
    return "".join(f"{name}={value}\n" for name, value in values.items())
