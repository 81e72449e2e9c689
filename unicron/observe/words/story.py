"""Messages in a person's words, and the story of one failure: every message of its chain, in order."""

from collections.abc import Iterable
from datetime import datetime

from unicron.contracts.base import Message
from unicron.errors import InvalidInputError
from unicron.exception_texts import cut
from unicron.observe.incidents import chain_of
from unicron.observe.words.ranks import RankNames

LONGEST = 160
"""Characters of a line."""


def describe(message: Message) -> str:
    """Return what `message` says, in one line."""
    return short(str(message))


def short(text: str, most: int = LONGEST) -> str:
    """Return text as one line of at most so many characters."""
    line = " ".join(text.split())
    return cut(line, most)


def line(message: Message, names: RankNames) -> str:
    """Return one line of the event list: time, chain, source, type, and what it says."""
    clock = datetime.fromtimestamp(message.at).astimezone().isoformat(timespec="milliseconds")[11:23]
    text = names.explain(describe(message))
    return f"{clock}  {chain_of(message):16}  {message.source:10}  {type(message).__name__:16}  {text}"


def find_chain(messages: Iterable[Message], wanted: str) -> list[Message]:
    """Return the messages of the chain that the message with id `wanted` belongs to, in their order.

    Raises:
        InvalidInputError: no message has that id, or the beginning given fits several chains.
    """
    known = list(messages)
    chains = {chain_of(message) for message in known if wanted in (message.id, message.correlation)}
    if not chains and wanted:
        chains = {
            chain_of(message)
            for message in known
            if message.id.startswith(wanted) or message.correlation.startswith(wanted)
        }
    if len(chains) != 1:
        why = f"fits {len(chains)} chains; give more of it" if chains else "is in no message of the journal"
        raise InvalidInputError(f"id {wanted!r} {why}; `unicron events` lists the ids")
    [chain] = chains
    return [message for message in known if chain_of(message) == chain]


def story(messages: list[Message], names: RankNames | None = None) -> list[str]:
    """Return a chain's lines: seconds since its first message, source, type, and what it says.

    Args:
        messages: of the chain.
        names: the ranks of workers before it; it learns those in it.
    """
    start, lines = messages[0].at, []
    names = names or RankNames()
    for message in messages:
        names.observe(message)
        text = names.explain(describe(message))
        lines.append(f"{message.at - start:+9.3f} s  {message.source:10}  {type(message).__name__:16}  {text}")
    return lines
