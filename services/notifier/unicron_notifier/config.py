"""The file of rules and channels (TOML): read, checked as a whole, and refused with the place and the cure."""

from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from unicron import subjects
from unicron.errors import InvalidInputError
from unicron.files import convert, read_toml
from unicron_notifier.channels import KINDS, Channel, Heartbeat, Secrets, secrets
from unicron_notifier.rules import Routing, Rule

K = TypeVar("K")

CURE = "give the path of a TOML file of rules and channels (docs/howto/notify.md)"
KNOWN = ("channel", "rule", "heartbeat", "link")


class Reached(NamedTuple):
    """A channel with what it needs to be reached."""

    given: Channel
    secrets: Secrets


class Config(NamedTuple):
    """The content of the file.

    Attributes:
        routing: what the core needs of it.
        channels: by name.
        heartbeat: the URL that is called as long as all is well; None for none.
    """

    routing: Routing
    channels: dict[str, Reached]
    heartbeat: tuple[Heartbeat, Secrets] | None


NOTHING = Config(Routing(), {}, None)


def load(path: str) -> Config:
    """Return what a file says; of no file at all, nothing.

    Raises:
        InvalidInputError: it can't be used; names the file, the place in it, and the cure, and shows no secret.
    """
    if not path:
        return NOTHING
    file = Path(path)
    plain = read_toml(file, CURE)
    try:
        return _read(plain, file.absolute().parent)
    except InvalidInputError as error:
        raise InvalidInputError(f"{file}: {error}") from error


def _read(plain: dict[str, Any], folder: Path) -> Config:
    if unknown := sorted(set(plain) - set(KNOWN)):
        raise InvalidInputError(f"{unknown[0]}: there is no such table or key; there are {', '.join(KNOWN)}")
    channels = {name: _channel(name, each, folder) for name, each in _table(plain, "channel").items()}
    rules = {name: _rule(name, each, channels) for name, each in _table(plain, "rule").items()}
    if channels and not rules:
        raise InvalidInputError("there is no [rule.NAME], so nobody would be notified: write one")
    heartbeat = None
    if "heartbeat" in plain:
        given = convert("heartbeat", plain["heartbeat"], Heartbeat)
        heartbeat = given, _secrets("heartbeat", given, folder)
    routing = Routing(rules=rules, channels=tuple(channels), link=_link(plain.get("link", "")))
    return Config(routing, channels, heartbeat)


def _table(plain: dict[str, Any], name: str) -> dict[str, Any]:
    found = plain.get(name, {})
    if not isinstance(found, dict):
        raise InvalidInputError(f"{name}: write a table for each, as [{name}.NAME]")
    for each in found:
        try:
            subjects.token(each, f"{name} name")
        except InvalidInputError as error:
            raise InvalidInputError(f"[{name}.{each}]: {error}") from error
    return found


def _channel(name: str, plain: Any, folder: Path) -> Reached:
    where = f"channel.{name}"
    kind = plain.get("kind") if isinstance(plain, dict) else None
    if kind not in KINDS:
        raise InvalidInputError(f"[{where}] kind {kind!r}: use one of {', '.join(KINDS)}")
    given = convert(where, plain, Channel)
    return Reached(given, _secrets(where, given, folder))


def _rule(name: str, plain: Any, channels: Collection[str]) -> Rule:
    rule: Rule = convert(f"rule.{name}", plain, Rule)
    for field, named in (("channels", rule.channels), ("escalate.channels", rule.escalate and rule.escalate.channels)):
        if missing := sorted(set(named or ()) - set(channels)):
            known = ", ".join(channels) or "none"
            raise InvalidInputError(f"[rule.{name}] {field}: there is no channel {missing[0]!r}; there are: {known}")
    return rule


def _secrets(where: str, given: Any, folder: Path) -> Secrets:
    try:
        return secrets(given, folder)
    except InvalidInputError as error:
        raise InvalidInputError(f"[{where}] {error}") from error


def _link(link: Any) -> str:
    if link == "":
        return ""
    try:
        sound = isinstance(link, str) and urlsplit(link).scheme in {"http", "https"} and urlsplit(link).hostname
    except ValueError:
        sound = None
    if not sound or not link.isascii() or not link.isprintable() or " " in link:
        raise InvalidInputError(
            f"link {link!r}: give what the console's address begins with, as https://unicron.example"
        )
    return str(link)
