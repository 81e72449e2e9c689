"""The accounts that spans are closed into, by the chain that they went to, and the spans of the newest chains."""

from collections import Counter, OrderedDict
from collections.abc import Iterable

from unicron.observe.accounts.spans import Accounts, Key, PhaseSpan, SpanPiece

NO_CHAIN = ""
"""Costs that belong to no chain, or to one that is no longer tracked."""

FULL = 100
"""So many chains may have all the spans that one may have; beyond that, the oldest are only counted."""


class Book:
    """Accounts of what is closed, and the spans of each chain.

    Attributes:
        since: Unix seconds; what was before is in no account.
        most: spans of one chain that are kept.
        accounts: by chain; as many as chains are tracked and tasks are hit by each, and, of no chain, as tasks,
            kinds of causes and nodes come together, however many messages there are.
        spans: by chain, in the order in which they ended.
        more: by chain, how many spans there were beside those.
    """

    def __init__(self, since: float, most: int) -> None:
        self.since, self.most = since, most
        self.accounts: dict[str, Accounts] = {NO_CHAIN: {}}
        self.spans: OrderedDict[str, list[PhaseSpan]] = OrderedDict()
        self.more: Counter[str] = Counter()
        self._kept = 0

    def open(self, chain: str) -> None:
        """Track what a chain costs from now on."""
        self.accounts.setdefault(chain, {})

    def fold(self, chain: str) -> None:
        """No longer track a chain; what it cost stays, as of no chain."""
        for key, seconds in self.accounts.pop(chain).items():
            account = self.accounts[NO_CHAIN].setdefault(key.without_chain(), {})
            for phase, more in seconds.items():
                account[phase] = account.get(phase, 0.0) + more
        self._kept -= len(self.spans.pop(chain, ()))
        self.more.pop(chain, None)

    def enter(self, task: str, pieces: Iterable[SpanPiece], node: str = "", slot: int = -1, worker: str = "") -> None:
        """Add pieces of a slot, or of a task as a whole, to a task's accounts."""
        for phase, cause, begun, end, share in pieces:
            begin = max(begun, self.since)
            if end <= begin:
                continue
            key, chain = Key(task, cause), cause.chain
            accounts = self.accounts.get(chain)
            if accounts is None:
                key, accounts = key.without_chain(), self.accounts[NO_CHAIN]
            elif chain:
                self._keep(chain, PhaseSpan(node, slot, worker, task, phase, begin, end, share))
            account = accounts.get(key)
            if account is None:
                account = accounts[key] = {}
            account[phase] = account.get(phase, 0.0) + (end - begin) * share

    def copy(self) -> "Book":
        """Return one that can be added to without changing this."""
        book = Book(self.since, self.most)
        book.accounts = {
            chain: {key: dict(account) for key, account in accounts.items()}
            for chain, accounts in self.accounts.items()
        }
        book.spans = OrderedDict((chain, list(spans)) for chain, spans in self.spans.items())
        book.more, book._kept = self.more.copy(), self._kept
        return book

    def part(self, chain: str) -> "Book":
        """Return one with only what a single chain cost, that can be added to without changing this."""
        book = Book(self.since, self.most)
        book.accounts = {each: {} for each in self.accounts}
        book.accounts[chain] = {key: dict(account) for key, account in self.accounts[chain].items()}
        book.spans[chain] = list(self.spans.get(chain, ()))
        book.more[chain] = self.more[chain]
        return book

    def all(self) -> Accounts:
        """Return the accounts of all chains, each with its own keys."""
        return {key: account for accounts in self.accounts.values() for key, account in accounts.items()}

    def _keep(self, chain: str, span: PhaseSpan) -> None:
        spans = self.spans.get(chain)
        if spans is None:
            spans = self.spans[chain] = []
        if len(spans) >= self.most:
            self.more[chain] += 1
            return
        spans.append(span)
        self._kept += 1
        if self._kept > FULL * self.most:
            oldest, dropped = self.spans.popitem(last=False)
            self.more[oldest] += len(dropped)
            self._kept -= len(dropped)
