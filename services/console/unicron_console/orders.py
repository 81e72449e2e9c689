"""Orders from the page: what each would do, in words, and how it is given."""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from unicron.client import Client
from unicron.contracts.faults import FAULTS, kind_of
from unicron.errors import InvalidInputError, UnicronError
from unicron.observe.cluster import ClusterPicture
from unicron.observe.words.explain import explain
from unicron_console.views import Wanted

BREAK = "break"
DIGITS = 10
"""Most digits of an iteration's number."""


class PageOrder(NamedTuple):
    """An order that a reader can give.

    Attributes:
        target_kind: what it is given to: a node or a task.
        preview: what it would do, in words.
        give: gives it; returns what comes of it, in words.
    """

    target_kind: str
    preview: Callable[[Client, Wanted], Awaitable[str]]
    give: Callable[[Client, Wanted], Awaitable[str]]


def _fixed_preview(text: str) -> Callable[[Client, Wanted], Awaitable[str]]:
    async def preview(_: Client, wanted: Wanted) -> str:
        return text.format(wanted.target, value=wanted.value)

    return preview


async def _drain(client: Client, wanted: Wanted) -> str:
    """Return what the planner would do without the node."""
    text = f"{wanted.target} is taken out of use once its workers have moved; it stays up, and can be put back."
    try:
        words = dict(explain(await client.what_if(lose=[wanted.target])))
    except UnicronError as error:
        return f"{text} What the planner makes of that is not known: {error}."
    effects = [f"{label}: {words[label]}" for label in ("decision", "effect") if label in words]
    return " ".join([text, *(f"{each[0].upper()}{each[1:]}." for each in effects)])


async def _break(_: Client, wanted: Wanted) -> str:
    victim = f"{wanted.worker} on {wanted.target}" if wanted.worker else wanted.target
    return f"{wanted.value or 'a fault'} strikes {victim} now, as a real fault would; the cluster is to heal."


ORDERS: dict[str, PageOrder] = {
    "drain": PageOrder("node", _drain, lambda client, wanted: client.drain(wanted.target)),
    "undrain": PageOrder(
        "node",
        _fixed_preview("{0} is put back into use: the planner gives its slots to tasks."),
        lambda client, wanted: client.drain(wanted.target, drain=False),
    ),
    "save": PageOrder(
        "task",
        _fixed_preview("The state of {0} is written to storage now, while it trains on."),
        lambda client, wanted: client.save(wanted.target),
    ),
    "pause": PageOrder(
        "task",
        _fixed_preview("{0} gives all of its slots back after the iteration at hand, and waits until it is resumed."),
        lambda client, wanted: client.pause(wanted.target),
    ),
    "resume": PageOrder(
        "task",
        _fixed_preview("{0} is planned for again."),
        lambda client, wanted: client.pause(wanted.target, pause=False),
    ),
    "stop": PageOrder(
        "task",
        _fixed_preview(
            "{0} ends and is forgotten. What of it is not on storage is lost: save it first if it is to go on later."
        ),
        lambda client, wanted: client.remove(wanted.target),
    ),
    "rewind": PageOrder(
        "task",
        _fixed_preview(
            "{0} goes back to its checkpoint of iteration {value}; what it computed since then no longer counts."
        ),
        lambda client, wanted: client.rewind(wanted.target, int(wanted.value)),
    ),
    BREAK: PageOrder(
        "node",
        _break,
        lambda client, wanted: client.inject(wanted.target, *_fault(wanted)),
    ),
}
"""By name."""


def _fault(wanted: Wanted) -> tuple[str, str, str]:
    fault, _, value = wanted.value.partition("=")
    return fault, wanted.worker, value


def check(wanted: Wanted, picture: ClusterPicture, *, chaos: bool) -> PageOrder:
    """Return the order that is wanted.

    Raises:
        InvalidInputError: there is none such, or nobody that it could be given to; says which there are.
    """
    order = ORDERS.get(wanted.order)
    if order is None or (wanted.order == BREAK and not chaos):
        names = ", ".join(name for name in ORDERS if chaos or name != BREAK)
        raise InvalidInputError(f"order {wanted.order!r}: use one of {names}")
    if wanted.target not in (picture.nodes if order.target_kind == "node" else picture.tasks):
        raise InvalidInputError(f"there is no {order.target_kind} {wanted.target!r}")
    is_number = wanted.value.isascii() and wanted.value.isdecimal() and len(wanted.value) <= DIGITS
    if wanted.order == "rewind" and not is_number:
        raise InvalidInputError(f"rewind to iteration {wanted.value!r}: give the number of a checkpoint's iteration")
    if wanted.order == BREAK:
        kind_of(_fault(wanted)[0]).checked(_fault(wanted)[2])
    return order


def faults() -> list[str]:
    """Return the faults that an agent can inject."""
    return [name for name in FAULTS if name != "restart-node"]
