"""What exceptions, lines of the kernel's log and events of GPUs say about their cause: `rules.toml` (paper, table 1).

The detector judges by them. Agents have the same ones, to pick out of a log the few lines that say something.
"""

import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import msgspec

from unicron.contracts.base import Record
from unicron.contracts.failures import FailureStatus, Severity
from unicron.errors import InvalidInputError

_XID = re.compile(r"\bXid\b\s*(?:\([^)]*\))?\s*:?\s*(\d{1,3})\b")


class Verdict(Record, kw_only=True, frozen=True):
    """A row of table 1: an error status and its severity."""

    status: FailureStatus
    severity: Severity


class _Row(Record, kw_only=True, frozen=True, forbid_unknown_fields=True):
    status: str
    severity: Severity

    def verdict(self, name: str) -> Verdict:
        status = FailureStatus(self.status)
        if status is FailureStatus.UNKNOWN:
            known = ", ".join(each for each in FailureStatus if each is not FailureStatus.UNKNOWN)
            raise InvalidInputError(f"{name}: there is no status {self.status!r}; use one of {known}")
        return Verdict(status=status, severity=self.severity)


class _Rule(_Row, kw_only=True, frozen=True, forbid_unknown_fields=True):
    match: str


class _Xid(_Row, kw_only=True, frozen=True, forbid_unknown_fields=True):
    codes: list[int]


class _File(Record, kw_only=True, frozen=True, forbid_unknown_fields=True):
    default: _Row | None = None
    rule: list[_Rule] = []
    xid: list[_Xid] = []
    kernel: list[_Rule] = []


class Ruling(NamedTuple):
    """What a rule says, and which one it is.

    Attributes:
        verdict: what it says.
        rule: the file that it stands in, and what it looks for there.
    """

    verdict: Verdict
    rule: str


class Rules:
    """Ordered rules from a TOML text.

    Args:
        text: the TOML.
        name: of its file, for messages.
        otherwise: rules that are tried where none of these says anything.

    Attributes:
        default: what counts where no rule matches an exception.

    Raises:
        InvalidInputError: the text is no valid rules file; the message names the entry.
    """

    def __init__(self, text: str, name: str = "rules.toml", otherwise: "Rules | None" = None) -> None:
        try:
            file = msgspec.convert(tomllib.loads(text), _File)
        except (ValueError, RecursionError) as error:  # ValueError: of TOML and of msgspec
            raise InvalidInputError(f"{name}: {error}; mend that entry") from error
        if file.default is not None:
            self.default = Ruling(file.default.verdict(name), f"{name}: default")
        elif otherwise is not None:
            self.default = otherwise.default
        else:
            raise InvalidInputError(f"{name}: there is no default: say what it is that no rule matches")
        self._otherwise = otherwise
        self._rules = [_ruling(rule, name, "rule", re.IGNORECASE) for rule in file.rule]
        self._kernel = [_ruling(rule, name, "kernel") for rule in file.kernel]
        self._xids = {code: Ruling(xid.verdict(name), f"{name}: xid {code}") for xid in file.xid for code in xid.codes}

    def classify(self, exception: str, text: str) -> Verdict:
        """Return what an exception of class `exception` with the message `text` stands for."""
        return self.of_exception(f"{exception}: {text}").verdict

    def of_exception(self, text: str) -> Ruling:
        """Return the rule for an exception, "CLASS: MESSAGE"."""
        return self.matching(text) or self.default

    def matching(self, text: str) -> Ruling | None:
        """Return the rule that matches an exception, None where none does."""
        found = self._of_xids(text) or _first(self._rules, text)
        return found or (self._otherwise.matching(text) if self._otherwise else None)

    def of_hardware(self, text: str) -> Ruling | None:
        """Return the rule for a line of the kernel's log, or what a GPU's driver told; None where it says nothing."""
        found = self._of_xids(text) or _first(self._kernel, text)
        return found or (self._otherwise.of_hardware(text) if self._otherwise else None)

    def telling(self, lines: str) -> list[str]:
        """Return those of some lines that stand for anything. Most logs have none in thousands."""
        if "Xid" not in lines and not self.of_hardware(lines):
            return []
        return [line for line in lines.splitlines() if self.of_hardware(line)]

    def _of_xids(self, text: str) -> Ruling | None:
        codes = [self._xids[int(code)] for code in _XID.findall(text) if int(code) in self._xids]
        return min(codes, key=lambda ruling: ruling.verdict.severity, default=None)


def _first(rules: list[tuple[re.Pattern[str], Ruling]], text: str) -> Ruling | None:
    return next((ruling for pattern, ruling in rules if pattern.search(text)), None)


def _ruling(rule: _Rule, name: str, kind: str, flags: re.RegexFlag = re.NOFLAG) -> tuple[re.Pattern[str], Ruling]:
    try:
        return re.compile(rule.match, flags), Ruling(rule.verdict(name), f"{name}: {kind} {rule.match!r}")
    except re.error as error:
        raise InvalidInputError(
            f"{name}: {kind} {rule.status!r}: match {rule.match!r} is no regular expression: {error}"
        ) from error


def load(folder: str = "") -> Rules:
    """Return the rules that come with Unicron, behind those of the TOML files in a folder, by name, if there is one.

    Raises:
        InvalidInputError: the folder, or a file in it, can't be read or is none; says why.
    """
    found = Rules(resources.files("unicron").joinpath("rules.toml").read_text(encoding="utf-8"))
    if not folder:
        return found
    try:
        own = sorted(path for path in Path(folder).iterdir() if path.suffix == ".toml")
        for path in reversed(own):
            found = Rules(path.read_text(encoding="utf-8"), str(path), found)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"rules in {folder}: {error}; name a folder of TOML files with --rules") from error
    return found
