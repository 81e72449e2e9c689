"""Who may say and hear what on the bus: a table, and the accounts of the NATS server made of it.

A user of the bus is named like the node or the service that it speaks for, or like one of `PEOPLE`. Nobody may do more
than stands here. What is stored is read by direct gets, which give whoever may use them the whole journal.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

from unicron import subjects
from unicron.bus import access, topology
from unicron.bus.topology import ACCOUNT
from unicron.errors import InvalidInputError
from unicron.services import SERVICES

OPERATOR, USER, SUBSCRIBER = "operator", "user", "subscriber"
PEOPLE = (OPERATOR, USER, SUBSCRIBER)
"""Who asks and orders, who asks, and who only reads facts."""

READ_JOURNAL = (f"$JS.API.DIRECT.GET.{topology.STREAM}", f"$JS.API.STREAM.INFO.{topology.STREAM}")
STATE, LEASE = (f"KV_{topology.BUCKETS[name]}" for name in ("state", "lease"))
READ_LEASE = (f"$JS.API.STREAM.MSG.GET.{LEASE}", f"$JS.API.DIRECT.GET.{LEASE}.>")
PROVISION = tuple(
    f"$JS.API.STREAM.{verb}.{stream.name}" for verb in ("CREATE", "UPDATE", "INFO") for stream in topology.streams()
)
BACKUP = (
    *(f"$JS.API.STREAM.{verb}.{stream.name}" for verb in ("SNAPSHOT", "RESTORE") for stream in topology.streams()),
    "$JS.SNAPSHOT.>",
)
ALL_STORED, ALL_FACTS = f"{subjects.STORED}.>", subjects.stored(subjects.FACTS)
ALL_TELEMETRY = f"{subjects.ROOT}.tel.>"

REPLIES = 1000
"""Messages that one reply may come in."""

REPLY_S = 60
"""Seconds within which a reply may come."""


class Rights(NamedTuple):
    """What a user may do.

    Attributes:
        publish: subjects on which it may.
        subscribe: subjects on which it may, besides its own inbox.
        answers: whether it may reply to what it is asked.
    """

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    answers: bool = False


def rights(name: str) -> Rights:
    """Return the rights of the user `name`; a name that is nobody else's is a node's.

    Raises:
        InvalidInputError: it can't be a name.
    """
    if name in PEOPLE:
        return _person(name)
    return _service(name) if name in SERVICES else _agent(subjects.token(name, "node"))


def node(name: str) -> str:
    """Return `name` if it can be a node's.

    Raises:
        InvalidInputError: a service or a person is called so, whose rights that node would have.
    """
    if name in (*PEOPLE, *SERVICES):
        raise InvalidInputError(f"node {name!r}: that name has rights of its own on the bus; call the node otherwise")
    return subjects.token(name, "node")


def _answering(name: str, service: str) -> tuple[str, ...]:
    """What is subscribed to by who answers as `name`, a micro service called `service`."""
    return (subjects.rpc(name), subjects.orders(name), "$SRV.*", f"$SRV.*.{service}", f"$SRV.*.{service}.*")


def _agent(name: str) -> Rights:
    own = (subjects.commands(name), subjects.given_up(name), subjects.switched())
    ping = f"$SRV.PING.agent-{name}"
    return Rights(
        publish=(*(f"{subjects.ROOT}.{kind}.{name}.>" for kind in ("evt", "tel")), *READ_JOURNAL, *READ_LEASE, ping),
        subscribe=(*map(subjects.stored, own), *_answering(name, f"agent-{name}")),
        answers=True,
    )


def _service(name: str) -> Rights:
    state, lease = (f"$KV.{topology.BUCKETS[bucket]}.{name}" for bucket in ("state", "lease"))
    facts = f"{subjects.ROOT}.evt.{name}.>"
    publish = (facts, state, f"{state}.>", lease, *READ_JOURNAL, *READ_LEASE, f"$JS.API.STREAM.MSG.GET.{STATE}")
    more: dict[str, tuple[str, ...]] = {
        "registry": (
            *PROVISION,
            subjects.rpc(name),
            subjects.orders(name),
        ),  # orders that come as files it gives itself
        "transition": (f"{subjects.ROOT}.cmd.>",),
    }
    heard = (topology.DISCONNECTS,) if name == "detector" else ()
    return Rights(
        publish=(*publish, *more.get(name, ())),
        subscribe=(ALL_STORED, ALL_TELEMETRY, *_answering(name, name), *heard),
        answers=True,
    )


def _person(name: str) -> Rights:
    if name == SUBSCRIBER:
        return Rights(publish=READ_JOURNAL, subscribe=(ALL_FACTS, ALL_TELEMETRY))
    ask = (*READ_JOURNAL, *READ_LEASE, f"{subjects.ROOT}.rpc.*")
    order = (f"{subjects.ROOT}.ord.*", *PROVISION, *BACKUP) if name == OPERATOR else ()
    return Rights(publish=(*ask, *order), subscribe=(ALL_STORED, ALL_TELEMETRY))


def accounts(users: Mapping[str, str]) -> str:
    """Return the part of the server's configuration that says who is let in, by the public keys of users."""
    lines = [_user(name, key) for name, key in sorted(users.items())]
    return _ACCOUNTS.replace("USERS", "\n".join(["users: [", *lines, "    ]"]))


OPEN_USERS = "users: [ { user: unicron, password: unicron } ]"


def open_accounts() -> str:
    """Return the part of the server's configuration that lets everybody in, with all rights."""
    return _ACCOUNTS.replace("USERS", OPEN_USERS) + "no_auth_user: unicron\n"


def _user(name: str, key: str) -> str:
    granted = rights(name)
    subscribe = (*granted.subscribe, f"{access.inbox(name)}.>")
    permissions = {"publish": {"allow": granted.publish}, "subscribe": {"allow": subscribe}}
    if granted.answers:
        permissions["allow_responses"] = {"max": REPLIES, "expires": f"{REPLY_S}s"}  # type: ignore[dict-item]
    return f"      # {name}\n      {{ nkey: {key}, permissions: {json.dumps(permissions)} }}"


_ACCOUNTS = f"""\
accounts {{
  SYS {{
    exports: [
      {{ stream: "$SYS.ACCOUNT.*.CONNECT", account_token_position: 3 }}
      {{ stream: "$SYS.ACCOUNT.*.DISCONNECT", account_token_position: 3 }}
    ]
  }}
  {ACCOUNT} {{
    jetstream: enabled
    USERS
    imports: [
      {{ stream: {{ account: SYS, subject: "$SYS.ACCOUNT.{ACCOUNT}.CONNECT" }} }}
      {{ stream: {{ account: SYS, subject: "$SYS.ACCOUNT.{ACCOUNT}.DISCONNECT" }} }}
    ]
  }}
}}
system_account: SYS
"""
"""The application account hears of its own connections from the system account."""
