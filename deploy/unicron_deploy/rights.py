"""Who may say and hear what on the bus: a table, and the accounts of the NATS server made of it.

A user of the bus is named like the node or the service that it speaks for, or like one of `PEOPLE`. Nobody may do more
than stands here. What is stored is read by direct gets, which give whoever may use them the whole journal.

The server sends a reply to whatever subject who asks has named, and looks at nobody's rights then: who may ask for an
entry could have it stored as another's command, order or state. So agents, and those people who may not order, have
accounts of their own, from which only a few subjects lead to the account of what is stored, and replies never do.
"""

import json
from collections.abc import Mapping
from typing import NamedTuple

from unicron import subjects
from unicron.bus import access, topology
from unicron.bus.topology import ACCOUNT, API, JOINERS, NODES, READERS
from unicron.errors import InvalidInputError
from unicron.services import ANSWERING, CONSOLE, ENROLLER, NAMED

OPERATOR, USER, SUBSCRIBER = "operator", "user", "subscriber"
PEOPLE = (OPERATOR, USER, SUBSCRIBER, CONSOLE)
"""Who asks and orders, who asks, who only reads facts, and what asks and orders in the name of people with tokens."""

ORDERING = (OPERATOR, CONSOLE)

READ_JOURNAL = (f"$JS.API.DIRECT.GET.{topology.STREAM}", f"{API}.STREAM.INFO.{topology.STREAM}")
STATE, LEASE = (f"KV_{topology.BUCKETS[name]}" for name in ("state", "lease"))
READ_LEASE = (f"{API}.STREAM.MSG.GET.{LEASE}",)
PROVISION = tuple(
    f"$JS.API.STREAM.{verb}.{stream.name}" for verb in ("CREATE", "UPDATE", "INFO") for stream in topology.streams()
)
BACKUP = (
    *(f"$JS.API.STREAM.{verb}.{stream.name}" for verb in ("SNAPSHOT", "RESTORE") for stream in topology.streams()),
    "$JS.SNAPSHOT.>",
)
REPLIED = "_R_.>"
"""Where replies to other accounts go. A server that has read its configuration again has forgotten who was asked."""

FIND_SERVERS, RELOAD = "$SYS.REQ.SERVER.PING", "$SYS.REQ.SERVER.*.RELOAD"
"""Where servers answer that they are there, and where one is told to read its configuration again."""

JOINING = f"limits {{ max_connections: 256, max_subscriptions: 1024, max_payload: {access.MOST_ASKED} }}"
"""What all who ask to become nodes may take up together; they come without a key."""

ALL_STORED, ALL_FACTS = f"{subjects.STORED}.>", subjects.stored(subjects.FACTS)
ALL_TELEMETRY = f"{subjects.ROOT}.tel.>"

ASKED, ORDERED = ((f"{subjects.ROOT}.{kind}.*", f"{subjects.ROOT}.{kind}.node.*") for kind in ("rpc", "ord"))
"""Where services and nodes are asked, and where they take orders."""

REPLIES = 1000
"""Messages that one reply may come in."""

REPLY_S = 60
"""Seconds within which a reply may come."""

GET_S = 5
"""Seconds within which the journal's next entries come: so long the server keeps in mind who in another account asked.
"""


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
    if name == ENROLLER:
        return _enroller()
    return _service(name) if name in NAMED else _agent(subjects.token(name, "node"))


def node(name: str) -> str:
    """Return `name` if it can be a node's.

    Raises:
        InvalidInputError: a service or a person is called so, whose rights that node would have.
    """
    if name in (*PEOPLE, *ANSWERING, access.JOINER):
        raise InvalidInputError(f"node {name!r}: that name has rights of its own on the bus; call the node otherwise")
    return subjects.token(name, "node")


def account(name: str) -> str:
    """Return the server's account that the user `name` belongs to."""
    if name in ANSWERING or name in ORDERING:
        return ACCOUNT
    return READERS if name in PEOPLE else NODES


def _answering(name: str, service: str) -> tuple[str, ...]:
    """What is subscribed to by who answers as `name`, a micro service called `service`."""
    return (subjects.rpc(name), subjects.orders(name), "$SRV.*", f"$SRV.*.{service}", f"$SRV.*.{service}.*")


def _agent(name: str) -> Rights:
    own = subjects.read_by(name)
    return Rights(
        publish=(
            *(f"{subjects.ROOT}.{kind}.{name}.>" for kind in ("evt", "tel")),
            *READ_JOURNAL,
            *READ_LEASE,
            subjects.papers(name),
        ),
        subscribe=(*map(subjects.stored, own), *_answering(name, f"agent-{name}")),
        answers=True,
    )


def _service(name: str) -> Rights:
    state, lease = (f"$KV.{topology.BUCKETS[bucket]}.{name}" for bucket in ("state", "lease"))
    facts = f"{subjects.ROOT}.evt.{name}.>"
    pulse = subjects.pulse(name)
    publish = (
        facts,
        pulse,
        state,
        f"{state}.>",
        lease,
        *READ_JOURNAL,
        *READ_LEASE,
        f"{API}.STREAM.MSG.GET.{STATE}",
    )
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
        subscribe=(ALL_STORED, ALL_TELEMETRY, *_answering(name, name), subjects.standby(name), *heard),
        answers=True,
    )


def _enroller() -> Rights:
    return Rights(
        publish=(f"{subjects.ROOT}.evt.{ENROLLER}.>", *READ_JOURNAL, FIND_SERVERS, RELOAD, REPLIED),
        subscribe=(subjects.JOIN, subjects.papers("*"), *_answering(ENROLLER, ENROLLER)),
        answers=True,
    )


def _person(name: str) -> Rights:
    if name == SUBSCRIBER:
        return Rights(publish=READ_JOURNAL, subscribe=(ALL_FACTS, ALL_TELEMETRY))
    ask = (*READ_JOURNAL, *READ_LEASE, *ASKED)
    order = ORDERED if name in ORDERING else ()
    if name == OPERATOR:
        order = (*order, *PROVISION, *BACKUP)
    return Rights(publish=(*ask, *order), subscribe=(ALL_STORED, ALL_TELEMETRY))


def accounts(users: Mapping[str, str]) -> str:
    """Return the part of the server's configuration that says who is let in, by the public keys of users.

    Where there is an enroller, those are let in too who ask to become nodes, to do that and nothing else.
    """
    lines: dict[str, list[str]] = {ACCOUNT: [], NODES: [], READERS: []}
    for name, key in sorted(users.items()):
        lines[account(name)].append(_user(name, key))
    return _configuration(
        {name: "\n".join(["users: [", *each, "    ]"]) for name, each in lines.items()},
        told_of=NODES,
        enrols=ENROLLER in users,
    )


def open_accounts() -> str:
    """Return the part of the server's configuration that lets everybody in, with all rights."""
    everybody = "users: [ { user: unicron, password: unicron } ]"
    return _configuration({ACCOUNT: everybody}, told_of=ACCOUNT) + "no_auth_user: unicron\n"


def _user(name: str, key: str) -> str:
    granted = rights(name)
    inside = account(name) == ACCOUNT  # where the server looks at rights behind the mapping of subjects
    publish = [_own(subject) if inside else subject for subject in granted.publish]
    subscribe = (*granted.subscribe, f"{access.inbox(name)}.>")
    permissions: dict[str, object] = {"publish": {"allow": publish}, "subscribe": {"allow": subscribe}}
    if granted.answers:
        permissions["allow_responses"] = {"max": REPLIES, "expires": f"{REPLY_S}s"}
    return f"      # {name}\n      {{ nkey: {key}, permissions: {json.dumps(permissions)} }}"


def _own(subject: str) -> str:
    """Return what a subject of JetStream's interface is called in the account of what is stored."""
    return subject.replace(f"{API}.", "$JS.API.")


def _joiners() -> str:
    """Return the account of those who ask to become nodes; what they ask with is a token, which the enroller looks at.

    Replies say nothing that is secret: all of them may listen to all.
    """
    permissions = {"publish": {"allow": [subjects.JOIN]}, "subscribe": {"allow": [f"{access.inbox(access.JOINER)}.>"]}}
    return f"""\
  {JOINERS} {{
    {JOINING}
    users: [ {{ user: {access.JOINER}, password: {access.JOINER}, permissions: {json.dumps(permissions)} }} ]
    imports: [ {{ service: {{ account: {ACCOUNT}, subject: "{subjects.JOIN}" }} }} ]
  }}
"""


def _configuration(users: Mapping[str, str], told_of: str, *, enrols: bool = False) -> str:
    """Return the accounts, with their users; the detector hears of the connections of one of them."""
    get, info, lease = *READ_JOURNAL, *READ_LEASE
    ended = f"$SYS.ACCOUNT.{told_of}.DISCONNECT"
    (ask, ask_node), (_, order_node) = ASKED, ORDERED
    shared = f"""\
      {{ service: {{ account: {ACCOUNT}, subject: "{get}" }} }}
      {{ service: {{ account: {ACCOUNT}, subject: "{_own(info)}" }}, to: "{info}" }}
      {{ service: {{ account: {ACCOUNT}, subject: "{_own(lease)}" }}, to: "{lease}" }}
      {{ stream: {{ account: {ACCOUNT}, subject: "{ALL_STORED}" }} }}"""
    papers = subjects.papers("*")
    seen, asked, joiners, joinable = "", "", "", ""
    if enrols:
        joiners, joinable = _joiners(), f'\n      {{ service: "{subjects.JOIN}", accounts: [{JOINERS}] }}'
        servers = [
            f'      {{ service: "{each}", response_type: stream, accounts: [{ACCOUNT}] }}\n'
            for each in (FIND_SERVERS, RELOAD)
        ]
        seen = "\n" + "".join(servers)
        asked = f"""
      {{ service: {{ account: SYS, subject: "{FIND_SERVERS}" }} }}
      {{ service: {{ account: SYS, subject: "{RELOAD}" }} }}"""
    return f"""\
accounts {{
  SYS {{
    exports: [ {{ stream: "{ended}", accounts: [{ACCOUNT}] }}{seen} ]
  }}
{joiners}  {ACCOUNT} {{
    jetstream: enabled
    mappings: {{ "{API}.>": "$JS.API.>" }}
    {users.get(ACCOUNT, "")}
    exports: [
      {{ service: "{get}", response_type: stream, threshold: "{GET_S}s", accounts: [{NODES}, {READERS}] }}
      {{ service: "{_own(info)}", accounts: [{NODES}, {READERS}] }}
      {{ service: "{_own(lease)}", accounts: [{NODES}, {READERS}] }}
      {{ service: "{subjects.FACTS}", accounts: [{NODES}] }}
      {{ service: "{ask}", response_type: stream, threshold: "{REPLY_S}s", accounts: [{READERS}] }}
      {{ stream: "{ALL_STORED}", accounts: [{NODES}, {READERS}] }}
      {{ service: "{papers}", accounts: [{NODES}] }}{joinable}
    ]
    imports: [
      {{ stream: {{ account: SYS, subject: "{ended}" }} }}{asked}
      {{ stream: {{ account: {NODES}, subject: "{ALL_TELEMETRY}" }} }}
      {{ service: {{ account: {NODES}, subject: "{ask_node}" }} }}
      {{ service: {{ account: {NODES}, subject: "{order_node}" }} }}
    ]
  }}
  {NODES} {{
    {users.get(NODES, "")}
    exports: [
      {{ stream: "{ALL_TELEMETRY}", accounts: [{ACCOUNT}, {READERS}] }}
      {{ service: "{ask_node}", response_type: stream, threshold: "{REPLY_S}s", accounts: [{ACCOUNT}, {READERS}] }}
      {{ service: "{order_node}", response_type: stream, threshold: "{REPLY_S}s", accounts: [{ACCOUNT}] }}
    ]
    imports: [
{shared}
      {{ service: {{ account: {ACCOUNT}, subject: "{subjects.FACTS}" }} }}
      {{ service: {{ account: {ACCOUNT}, subject: "{papers}" }} }}
    ]
  }}
  {READERS} {{
    {users.get(READERS, "")}
    imports: [
{shared}
      {{ stream: {{ account: {NODES}, subject: "{ALL_TELEMETRY}" }} }}
      {{ service: {{ account: {ACCOUNT}, subject: "{ask}" }} }}
      {{ service: {{ account: {NODES}, subject: "{ask_node}" }} }}
    ]
  }}
}}
system_account: SYS
"""
