"""The names that may give orders, and their tokens, from a file."""

import hmac
import stat
from pathlib import Path

from unicron.errors import InvalidInputError

SHORTEST = 20
"""Characters of a token: what is shorter can be guessed."""

MOST_BYTES = 1 << 20


class Tokens:
    """Tokens by name; none: nobody may order anything.

    Raises:
        InvalidInputError: the file can't be used; names the line, never a token.
    """

    def __init__(self, path: str = "") -> None:
        self._tokens: dict[str, bytes] = {}
        if not path:
            return
        try:
            file = Path(path)
            if file.stat().st_mode & (stat.S_IRWXO | stat.S_IWGRP):
                raise InvalidInputError(f"{path}: others may read or change it; chmod 600 {path}")
            text = file.read_bytes()[:MOST_BYTES].decode()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(f"{path}: can't be read: {error}") from error
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip() and not line.startswith("#"):
                self._add(f"{path}:{number}", line.split())

    def _add(self, where: str, words: list[str]) -> None:
        if len(words) != 2:
            raise InvalidInputError(f"{where}: expected a name and a token, with a blank between")
        name, token = words
        if len(token) < SHORTEST:
            raise InvalidInputError(
                f"{where}: the token of {name} is shorter than {SHORTEST} characters; make one anew"
            )
        if name in self._tokens:
            raise InvalidInputError(f"{where}: {name} has a token already; give each person one")
        self._tokens[name] = token.encode()

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def name(self, token: str) -> str:
        """Return whose token it is, empty where it is nobody's; how long that takes says nothing about the tokens."""
        given, found = token.encode(errors="replace"), ""
        for name, own in self._tokens.items():
            if hmac.compare_digest(own, given):
                found = name
        return found
