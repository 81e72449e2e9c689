"""What exceptions, lines of the kernel's log and events of GPUs say about their cause: `rules.toml` (paper, table 1).

The detector judges by them. Agents have the same ones, to pick out of a log the few lines that say something.
"""

import re
import tomllib
from importlib import resources

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
    default: _Row
    rule: list[_Rule] = []
    xid: list[_Xid] = []
    kernel: list[_Rule] = []


class Rules:
    """Ordered rules from a TOML text.

    Raises:
        InvalidInputError: the text is no valid rules file; the message names the entry.
    """

    def __init__(self, text: str, name: str = "rules.toml") -> None:
        try:
            file = msgspec.convert(tomllib.loads(text), _File)
        except (ValueError, RecursionError) as error:  # ValueError: of TOML and of msgspec
            raise InvalidInputError(f"{name}: {error}; mend that entry") from error
        self._default = file.default.verdict(name)
        self._rules = [(_pattern(rule, name, re.IGNORECASE), rule.verdict(name)) for rule in file.rule]
        self._kernel = [(_pattern(rule, name), rule.verdict(name)) for rule in file.kernel]
        self._xids = {code: xid.verdict(name) for xid in file.xid for code in xid.codes}

    def classify(self, exception: str, text: str) -> Verdict:
        """Return what an exception of class `exception` with the message `text` stands for."""
        full = f"{exception}: {text}"
        return self._of_xids(full) or _first(self._rules, full) or self._default

    def of_hardware(self, text: str) -> Verdict | None:
        """Return what a line of the kernel's log, or of what a GPU's driver told, stands for; None for nothing."""
        return self._of_xids(text) or _first(self._kernel, text)

    def telling(self, lines: str) -> list[str]:
        """Return those of some lines that stand for anything. Most logs have none in thousands."""
        if "Xid" not in lines and not _first(self._kernel, lines):
            return []
        return [line for line in lines.splitlines() if self.of_hardware(line)]

    def _of_xids(self, text: str) -> Verdict | None:
        codes = [self._xids[int(code)] for code in _XID.findall(text) if int(code) in self._xids]
        return min(codes, key=lambda verdict: verdict.severity, default=None)


def _first(rules: list[tuple[re.Pattern[str], Verdict]], text: str) -> Verdict | None:
    return next((verdict for pattern, verdict in rules if pattern.search(text)), None)


def _pattern(rule: _Rule, name: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    try:
        return re.compile(rule.match, flags)
    except re.error as error:
        raise InvalidInputError(
            f"{name}: rule {rule.status!r}: match {rule.match!r} is no regular expression: {error}"
        ) from error


def load() -> Rules:
    """Return the rules that come with Unicron."""
    return Rules(resources.files("unicron").joinpath("rules.toml").read_text(encoding="utf-8"))
