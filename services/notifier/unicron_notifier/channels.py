"""Channels as the file has them: where they lead, and where their secrets are."""

import os
import re
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, NamedTuple, get_args
from urllib.parse import SplitResult, urlsplit

import msgspec
from msgspec import Meta

from unicron.errors import InvalidInputError
from unicron.files import read_secret

PAGERDUTY_URL = "https://events.pagerduty.com/v2/enqueue"
MOST_PORT = 65535
_ADDRESS = re.compile(r"[^\s@<>\x00-\x1f\x7f\"(),:;\\\[\]]+@[A-Za-z0-9.-]+")

Limit = Annotated[float, Meta(gt=0, le=60)]
Port = Annotated[int, Meta(ge=1, le=MOST_PORT)]


class _Common(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """The options that all channels have.

    Attributes:
        timeout_s: for one attempt.
        give_up_s: after which a notice is given up.
    """

    timeout_s: Limit = 10.0
    give_up_s: Annotated[float, Meta(gt=0, le=86400)] = 900.0


class _Web(_Common, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """A channel that is reached by HTTP.

    Attributes:
        url: of it, where that is no secret.
        url_file, url_env: where it is: a file of its owner's alone, or a variable.
        token_file, token_env: likewise of what is sent as `Authorization: Bearer`.
        ca: certificates that sign the server's, where the system does not know them.
    """

    url: str = ""
    url_file: str = ""
    url_env: str = ""
    token_file: str = ""
    token_env: str = ""
    ca: str = ""


class Json(_Web, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="json"):
    """All fields of a notice."""


class Slack(_Web, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="slack"):
    """An incoming webhook of Slack."""


class Teams(_Web, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="teams"):
    """A workflow of Microsoft Teams."""


class PagerDuty(_Web, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="pagerduty"):
    """A service of PagerDuty.

    Attributes:
        key_file, key_env: where its integration key is.
    """

    url: str = PAGERDUTY_URL
    key_file: str = ""
    key_env: str = ""


class Alertmanager(_Web, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="alertmanager"):
    """An Alertmanager, by its address."""


class Mail(_Common, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="mail"):
    """A server of mail.

    Attributes:
        sender: address; in the file `from`.
        to: addresses.
        host, port: of the server.
        starttls: whether it encrypts; without, no password is given.
        user: as whom it is logged in to, empty for nobody.
        password_file, password_env: where the password is.
        ca: certificates that sign the server's, where the system does not know them.
    """

    host: str
    sender: str = msgspec.field(name="from")
    to: Annotated[list[str], Meta(min_length=1, max_length=100)]
    port: Port = 587
    starttls: bool = True
    user: str = ""
    password_file: str = ""
    password_env: str = ""
    ca: str = ""


class ProgramChannel(_Common, kw_only=True, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="command"):
    """A program that gets a notice as JSON on its standard input.

    Attributes:
        command: its absolute path, and its arguments.
    """

    command: Annotated[list[str], Meta(min_length=1)]


class Heartbeat(_Web, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A URL that is called as long as all is well, and that pages where the calls end.

    Attributes:
        every_s: seconds between two calls.
    """

    every_s: Annotated[float, Meta(ge=0.1, le=86400)] = 60.0


Web = Json | Slack | Teams | PagerDuty | Alertmanager
Channel = Web | Mail | ProgramChannel
KINDS = tuple(str(kind.__struct_config__.tag) for kind in get_args(Channel))
"""As the file calls them."""


class Secrets(NamedTuple):
    """The parts of a channel that must not be shown.

    Attributes:
        url: with whatever stands in it.
        token: empty where there is none.
        key: of PagerDuty, or a password; empty where there is none.
    """

    url: str = ""
    token: str = ""
    key: str = ""

    def __repr__(self) -> str:
        return "Secrets()"


def secrets(given: _Common, folder: Path) -> Secrets:
    """Return the secrets of a channel; paths of files begin at `folder`.

    Raises:
        InvalidInputError: something is missing, can't be read, or can't be used; names the field, and shows no secret.
    """
    if isinstance(given, Mail):
        _check_mail(given)
        password = _secret(given, "password", folder)
        if bool(password) != bool(given.user):
            raise InvalidInputError("user and password_file (or password_env) belong together: give both or neither")
        return Secrets(key=password)
    if isinstance(given, ProgramChannel):
        if not Path(given.command[0]).is_absolute() or not os.access(given.command[0], os.X_OK):
            raise InvalidInputError(
                f"command {given.command[0]!r}: give the absolute path of a program that can be run"
            )
        return Secrets()
    if not isinstance(given, _Web):
        raise TypeError(given)
    return _web_secrets(given, folder)


def _web_secrets(given: _Web, folder: Path) -> Secrets:
    hidden = bool(given.url_file or given.url_env)
    if hidden and isinstance(given, PagerDuty) and given.url == PAGERDUTY_URL:
        given = msgspec.structs.replace(given, url="")
    url = _secret(given, "url", folder) or given.url
    if hidden and given.url:
        raise InvalidInputError("url and url_file (or url_env) are both given: leave one of them out")
    if not url:
        raise InvalidInputError("there is no url: give url, or url_file or url_env where it is a secret")
    field = "url" if not hidden else "url_file" if given.url_file else "url_env"
    parts = _parts(url, field)
    if isinstance(given, Slack | Teams) and not hidden:
        raise InvalidInputError("url: all who have it may write there, so it is a secret: put it in a file (url_file)")
    if not hidden and (parts.username or parts.password or parts.query):
        raise InvalidInputError("url: it holds a password or a query, which may be secret: put it in a file (url_file)")
    token = _secret(given, "token", folder)
    key = _secret(given, "key", folder) if isinstance(given, PagerDuty) else ""
    if isinstance(given, PagerDuty) and not key:
        raise InvalidInputError("there is no integration key: give key_file or key_env")
    if (token or key or isinstance(given, Slack | Teams)) and parts.scheme != "https" and not _loopback(parts.hostname):
        raise InvalidInputError(f"{field}: a secret goes over https only, or to this machine itself")
    _check_ca(given.ca)
    if isinstance(given, Alertmanager) and not parts.path.rstrip("/").endswith("/api/v2/alerts"):
        url = f"{url.rstrip('/')}/api/v2/alerts"
    return Secrets(url, token, key)


def _secret(given: _Common, what: str, folder: Path) -> str:
    """Return a secret from its file or its variable; empty where neither is named."""
    path, variable = getattr(given, f"{what}_file", ""), getattr(given, f"{what}_env", "")
    if path and variable:
        raise InvalidInputError(f"{what}_file and {what}_env are both given: leave one of them out")
    if variable:
        found, where = os.environ.get(variable, "").strip(), f"{what}_env: the variable {variable}"
    elif path:
        try:
            found = read_secret(folder / path, "name a file with the secret").decode()
        except (InvalidInputError, ValueError) as error:
            why = "it is no text" if isinstance(error, ValueError) else str(error)
            raise InvalidInputError(f"{what}_file: {why}") from None
        where = f"{what}_file: {folder / path}"
    else:
        return ""
    if not found or not found.isprintable() or " " in found:
        raise InvalidInputError(f"{where} is empty, or more than one line or word: it must hold the {what} alone")
    return found


def _parts(url: str, field: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        sound = parts.scheme in {"http", "https"} and parts.hostname and (parts.port is None or parts.port)
    except ValueError:
        sound = False
    if not sound or not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidInputError(f"{field}: it is no address that begins with https:// or http://, and names a host")
    return parts


def _loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ip_address(host or "").is_loopback
    except ValueError:
        return False


def _check_mail(given: Mail) -> None:
    for field, addresses in (("from", [given.sender]), ("to", given.to)):
        for address in addresses:
            if not _ADDRESS.fullmatch(address):
                raise InvalidInputError(f"{field} {address!r}: give a bare address, such as oncall@example.org")
    if not given.host or not given.host.isprintable() or " " in given.host:
        raise InvalidInputError(f"host {given.host!r}: give the name of the mail server")
    if given.user and not given.starttls:
        raise InvalidInputError("starttls: without it the password would be seen on the way; leave `starttls` out")
    _check_ca(given.ca)


def _check_ca(path: str) -> None:
    if path and not Path(path).is_file():
        raise InvalidInputError(f"ca: no file at {path!r}; give the absolute path of certificates (PEM)")
