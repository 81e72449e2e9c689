"""What exceptions, lines of logs and events of GPUs mean: `rules.toml` (paper, table 1).

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

LONGEST_LINE = 1000
"""Characters of a line of a log that are searched and reported: a pattern may take the square of them."""

OF_NETWORKS = {
    FailureStatus.CONNECTION_REFUSED,
    FailureStatus.CONNECTION_RESET,
    FailureStatus.OTHER_NETWORK_ERROR,
}

_XID = re.compile(r"\bXid\s*\((?:PCI:)?[0-9a-fA-F:.]+\)\s*:?\s*(\d{1,3})\b")
"""The Xid of a driver's own message; behind that it may name an earlier one."""


class ErrorVerdict(Record, kw_only=True, frozen=True):
    """A row of table 1: an error status and its severity.

    Attributes:
        echo: by its nature it follows from another's failure, if there was one just before.
        gpu: the severity, where the device that is named is the GPU of a slot; None: the same.
        outside: a server that is none of the cluster's refuses, or does not answer: it may later.
    """

    status: FailureStatus
    severity: Severity
    echo: bool = False
    gpu: Severity | None = None
    outside: bool = False


class _Row(Record, kw_only=True, frozen=True, forbid_unknown_fields=True):
    status: str
    severity: Severity

    def verdict(self, name: str) -> ErrorVerdict:
        return ErrorVerdict(status=_status(self.status, name), severity=self.severity)


class _Kernel(_Row, kw_only=True, frozen=True, forbid_unknown_fields=True):
    match: str
    gpu: Severity | None = None

    def verdict(self, name: str) -> ErrorVerdict:
        return ErrorVerdict(status=_status(self.status, name), severity=self.severity, gpu=self.gpu)


class _Rule(_Row, kw_only=True, frozen=True, forbid_unknown_fields=True):
    match: str
    echo: bool = False

    def verdict(self, name: str) -> ErrorVerdict:
        return ErrorVerdict(status=_status(self.status, name), severity=self.severity, echo=self.echo)


class _Worker(Record, kw_only=True, frozen=True, forbid_unknown_fields=True):
    status: str
    match: str

    def verdict(self, name: str) -> ErrorVerdict:
        return ErrorVerdict(status=_status(self.status, name), severity=Severity.SEV3)


class _Xid(_Row, kw_only=True, frozen=True, forbid_unknown_fields=True):
    codes: list[int]
    unless: str = ""
    echo: bool = False

    def verdict(self, name: str) -> ErrorVerdict:
        return ErrorVerdict(status=_status(self.status, name), severity=self.severity, echo=self.echo)


class _RulesFile(Record, kw_only=True, frozen=True, forbid_unknown_fields=True):
    default: _Row | None = None
    outside: str = ""
    rule: list[_Rule] = []
    xid: list[_Xid] = []
    kernel: list[_Kernel] = []
    worker: list[_Worker] = []


class Ruling(NamedTuple):
    """The verdict of a rule, and its name.

    Attributes:
        verdict: what it says.
        rule: the file that it stands in, and what it looks for there.
    """

    verdict: ErrorVerdict
    rule: str


class Rules:
    """Ordered rules from a TOML text.

    Args:
        text: the TOML.
        name: of its file, for messages.
        otherwise: rules that are tried where none of these says anything.

    Attributes:
        default: what counts where no rule matches an exception.
        worker: the rules for what workers write, in the order in which they are tried.

    Raises:
        InvalidInputError: the text is no valid rules file; the message names the entry.
    """

    def __init__(self, text: str, name: str = "rules.toml", otherwise: "Rules | None" = None) -> None:
        try:
            file = msgspec.convert(tomllib.loads(text), _RulesFile)
        except (ValueError, RecursionError) as error:  # ValueError: of TOML and of msgspec
            raise InvalidInputError(f"{name}: {error}; mend that entry") from error
        if file.default is not None:
            self.default = Ruling(file.default.verdict(name), f"{name}: default")
        elif otherwise is not None:
            self.default = otherwise.default
        else:
            raise InvalidInputError(f"{name}: there is no default: say what it is that no rule matches")
        self._otherwise = otherwise
        self._outside = _pattern(file.outside or "(?!)", name, "outside", "", re.IGNORECASE)
        self._rules = [_ruling(rule, name, "rule", re.IGNORECASE) for rule in file.rule]
        self._kernel = [_ruling(rule, name, "kernel", re.MULTILINE) for rule in file.kernel]
        self.worker = [_ruling(rule, name, "worker", re.MULTILINE) for rule in file.worker]
        self.worker += otherwise.worker if otherwise else []
        self._xids = {
            code: (
                _pattern(xid.unless or "(?!)", name, "xid", xid.status),
                Ruling(xid.verdict(name), f"{name}: xid {code}"),
            )
            for xid in file.xid
            for code in xid.codes
        }

    def classify(self, exception: str, text: str) -> ErrorVerdict:
        """Return what an exception of class `exception` with the message `text` stands for."""
        what = f"{exception}: {text}"
        verdict = self.rule_for_exception(what).verdict
        outside = verdict.status in OF_NETWORKS and self.is_outside(what)
        return msgspec.structs.replace(verdict, outside=outside) if outside else verdict

    def is_outside(self, text: str) -> bool:
        """Return whether an exception of the network is about a server that is none of the cluster's."""
        return bool(self._outside.search(text)) or (self._otherwise is not None and self._otherwise.is_outside(text))

    def rule_for_exception(self, text: str) -> Ruling:
        """Return the rule for an exception, "CLASS: MESSAGE"."""
        return self.match_exception(text) or self.default

    def match_exception(self, text: str) -> Ruling | None:
        """Return the rule that matches an exception, None where none does."""
        found = self._rule_for_xids(text) or _first(self._rules, text)
        return found or (self._otherwise.match_exception(text) if self._otherwise else None)

    def rule_for_hardware(self, text: str) -> Ruling | None:
        """Return the rule for a line of the kernel's log, or a GPU driver's message; None where none matches."""
        found = self._rule_for_xids(text) or _first(self._kernel, text)
        return found or (self._otherwise.rule_for_hardware(text) if self._otherwise else None)

    def rule_for_output(self, text: str) -> Ruling | None:
        """Return the rule for a line that a worker wrote; None where it says nothing."""
        return _first(self.worker, text)

    def match_hardware_lines(self, lines: str) -> list[tuple[str, Ruling]]:
        """Return those of some lines of the kernel's log that stand for anything, each with its rule.

        Most logs have none in thousands, so all are looked at as one first.
        """
        cut = _cut(lines)
        whole = "\n".join(cut)
        if "Xid" not in whole and not self.rule_for_hardware(whole):
            return []
        return [(line, ruling) for line in cut if (ruling := self.rule_for_hardware(line))]

    def match_output_lines(self, lines: str) -> list[tuple[str, Ruling]]:
        """Return of some lines that a worker wrote the first that each rule finds, at little cost."""
        whole, found = "\n".join(_cut(lines)), dict[int, tuple[str, Ruling]]()
        for pattern, ruling in self.worker:
            if hit := pattern.search(whole):
                begin = whole.rfind("\n", 0, hit.start()) + 1
                found.setdefault(begin, (whole[begin:].partition("\n")[0], ruling))
        return [found[begin] for begin in sorted(found)]

    def _rule_for_xids(self, text: str) -> Ruling | None:
        found = []
        for line in text.splitlines() if "Xid" in text else ():
            known = self._xids.get(int(code[1])) if (code := _XID.search(line)) else None
            if known is not None and not known[0].search(line):
                found.append(known[1])
        return min(found, key=lambda ruling: ruling.verdict.severity, default=None)


def _cut(lines: str) -> list[str]:
    return [line[:LONGEST_LINE] for line in lines.splitlines()]


def _status(named: str, name: str) -> FailureStatus:
    status = FailureStatus(named)
    if status is FailureStatus.UNKNOWN:
        known = ", ".join(each for each in FailureStatus if each is not FailureStatus.UNKNOWN)
        raise InvalidInputError(f"{name}: there is no status {named!r}; use one of {known}")
    return status


def _first(rules: list[tuple[re.Pattern[str], Ruling]], text: str) -> Ruling | None:
    return next((ruling for pattern, ruling in rules if pattern.search(text)), None)


def _ruling(
    rule: _Rule | _Kernel | _Worker, name: str, kind: str, flags: re.RegexFlag
) -> tuple[re.Pattern[str], Ruling]:
    pattern = _pattern(rule.match, name, kind, rule.status, flags)
    return pattern, Ruling(rule.verdict(name), f"{name}: {kind} {rule.match!r}")


def _pattern(text: str, name: str, kind: str, status: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    try:
        return re.compile(text, flags)
    except (re.error, OverflowError, RecursionError) as error:  # a count, or a depth, beyond what re can take
        raise InvalidInputError(
            f"{name}: {kind} {status!r}: match {text!r} is no regular expression: {error}"
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
