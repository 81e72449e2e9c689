"""What exceptions, lines of logs and events of GPUs mean: `rules.toml` (paper, table 1).

The detector judges by them. Agents have the same ones, to pick out of a log the few lines that say something.
"""

import re
import tomllib
from hashlib import blake2b
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import msgspec

from unicron.contracts.base import Record
from unicron.contracts.failures import FailureStatus, Severity
from unicron.errors import InvalidInputError
from unicron.exception_texts import classes_in, messages

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
    match: str | list[str]
    gpu: Severity | None = None
    echo: bool = False

    def verdict(self, name: str) -> ErrorVerdict:
        status = _status(self.status, name)
        return ErrorVerdict(status=status, severity=self.severity, gpu=self.gpu, echo=self.echo)


class _Rule(_Row, kw_only=True, frozen=True, forbid_unknown_fields=True):
    match: str | list[str] = ""
    named: str | list[str] = ""
    echo: bool = False
    weak: bool = False

    def verdict(self, name: str) -> ErrorVerdict:
        return ErrorVerdict(status=_status(self.status, name), severity=self.severity, echo=self.echo)


class _Worker(Record, kw_only=True, frozen=True, forbid_unknown_fields=True):
    status: str
    match: str | list[str]

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
    outside: str | list[str] = ""
    boilerplate: str | list[str] = ""
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


class _Matcher(NamedTuple):
    """A rule: what it looks for in a text, and in the names of classes of exceptions.

    Attributes:
        match: what it looks for in a text: each by itself, as one that begins with letters is found ten times as fast.
        named: likewise, in the name of a class.
        verdict: what it says.
        name: of the rule, without what it found.
        weak: it decides only where no other rule knows any message of a chain.
    """

    match: list[re.Pattern[str]]
    named: list[re.Pattern[str]]
    verdict: ErrorVerdict
    name: str
    weak: bool = False

    @property
    def weight(self) -> int:
        """How much it weighs against what others say of the other messages of a chain: the least comes first."""
        return 0 if self.verdict.severity is Severity.SEV1 else 1 + self.weak

    def ruling(self, text: str) -> Ruling | None:
        """Return the ruling on a text; None where this rule finds nothing in it."""
        by = next((each for each in self.match if each.search(text)), None)
        if by is None and self.named:
            classes = classes_in(text)
            by = next((each for each in self.named if any(map(each.search, classes))), None)
        return None if by is None else Ruling(self.verdict, f"{self.name} {by.pattern!r}")


class Rules:
    """Ordered rules from a TOML text.

    Args:
        text: the TOML.
        name: of its file, for messages.
        otherwise: rules that are tried where none of these says anything.

    Attributes:
        default: what counts where no rule matches an exception.
        worker: the rules for what workers write, in the order in which they are tried.
        boilerplate: what is left out of the text of an exception.
        digest: of all that stands in these rules and those behind them; the same text has the same one.

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
        behind: str = otherwise.digest if otherwise else ""
        self.digest: str = blake2b(f"{behind}{text}".encode(), digest_size=8).hexdigest()
        self._outside = _pattern(file.outside, name, "outside", "", re.IGNORECASE | re.MULTILINE)
        own = _pattern(file.boilerplate, name, "boilerplate", "", re.IGNORECASE | re.MULTILINE)
        self.boilerplate: list[re.Pattern[str]] = [own, *(otherwise.boilerplate if otherwise else [])]
        self._rules = [_matcher(rule, name, "rule", re.IGNORECASE | re.MULTILINE) for rule in file.rule]
        self._kernel = [_matcher(rule, name, "kernel", re.MULTILINE) for rule in file.kernel]
        self.worker = [_matcher(rule, name, "worker", re.MULTILINE) for rule in file.worker]
        self.worker += otherwise.worker if otherwise else []
        self._xids = {
            code: (
                _pattern(xid.unless, name, "xid", xid.status),
                Ruling(xid.verdict(name), f"{name}: xid {code}"),
            )
            for xid in file.xid
            for code in xid.codes
        }

    def classify(self, exception: str, text: str, traceback: str = "") -> ErrorVerdict:
        """Return what an exception stands for.

        Args:
            exception: its class; empty where the text is what a process wrote last.
            text: its message.
            traceback: as Python prints it, with the exceptions that led to it: the first one says what happened.
        """
        what = f"{exception}: {text}" if exception else text
        ruling, message = self._judge(what, traceback)
        verdict = ruling.verdict
        outside = verdict.status in OF_NETWORKS and self.is_outside(message)
        return msgspec.structs.replace(verdict, outside=outside) if outside else verdict

    def is_outside(self, text: str) -> bool:
        """Return whether an exception of the network is about a server that is none of the cluster's."""
        return bool(self._outside.search(text)) or (self._otherwise is not None and self._otherwise.is_outside(text))

    def rule_for_exception(self, text: str) -> Ruling:
        """Return the rule for an exception: "CLASS: MESSAGE", or all that is printed of it."""
        return self._judge(text)[0]

    def _judge(self, text: str, traceback: str = "") -> tuple[Ruling, str]:
        said = [message for each in (traceback, text) if each for message in messages(each, self.boilerplate)]
        return self.match_messages(said) or (self.default, text)

    def match_messages(self, said: list[str]) -> tuple[Ruling, str] | None:
        """Return the rule for the first message that any matches, or for one that weighs more, and that message."""
        found = [each for message in said if (each := self._weigh_message(message))]
        if found:
            _, ruling, message = min(found, key=lambda each: each[0])
            return ruling, message
        return self._otherwise.match_messages(said) if self._otherwise else None

    def _weigh_message(self, message: str) -> tuple[int, Ruling, str] | None:
        """Return what the rule that decides on a message weighs, its ruling, and the message; None where none does."""
        if xid := self._rule_for_xids(message):
            return int(xid.verdict.severity is not Severity.SEV1), xid, message
        rulings = ((rule.weight, ruling, message) for rule in self._rules if (ruling := rule.ruling(message)))
        return next(rulings, None)

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
        for rule in self.worker:
            if hit := next((hit for each in rule.match if (hit := each.search(whole))), None):
                begin = whole.rfind("\n", 0, hit.start()) + 1
                line = whole[begin:].partition("\n")[0]
                found.setdefault(begin, (line, Ruling(rule.verdict, f"{rule.name} {hit.re.pattern!r}")))
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


def _first(rules: list[_Matcher], text: str) -> Ruling | None:
    return next((ruling for rule in rules if (ruling := rule.ruling(text))), None)


def _matcher(rule: _Rule | _Kernel | _Worker, name: str, kind: str, flags: re.RegexFlag) -> _Matcher:
    named, weak = (rule.named, rule.weak) if isinstance(rule, _Rule) else ("", False)
    if not rule.match and not named:
        raise InvalidInputError(f"{name}: {kind} {rule.status!r}: it looks for nothing: add match")
    match, classes = (_patterns(each, name, kind, rule.status, flags) for each in (rule.match, named))
    return _Matcher(match, classes, rule.verdict(name), f"{name}: {kind}", weak)


def _pattern(
    given: str | list[str], name: str, kind: str, status: str, flags: re.RegexFlag = re.NOFLAG
) -> re.Pattern[str]:
    """Return a pattern that finds any of those given; of none one that finds nothing."""
    several = _patterns(given, name, kind, status, flags)
    return re.compile("|".join(each.pattern for each in several) or "(?!)", flags)


def _patterns(given: str | list[str], name: str, kind: str, status: str, flags: re.RegexFlag) -> list[re.Pattern[str]]:
    out = []
    for text in [given] if isinstance(given, str) else given:
        try:
            out += [re.compile(text, flags)] if text else []
        except (re.error, OverflowError, RecursionError) as error:  # a count, or a depth, beyond what re can take
            raise InvalidInputError(
                f"{name}: {kind} {status!r}: match {text!r} is no regular expression: {error}"
            ) from error
    return out


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
