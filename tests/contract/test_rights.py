"""Rights to publish, subscribe and ask: each cell of the table on a real server, and keys that change."""

import asyncio
import contextlib
import stat

import nats as raw
import pytest
from helpers.buses import take
from helpers.waiting import PATIENT_S, insist, until
from helpers.worlds import serving
from unicron_deploy import keys, nats_server, rights
from unicron_deploy.keys import Keyring
from unicron_detector import statistics

from unicron import codec, subjects
from unicron.bus import access, nats, topology
from unicron.contracts.queries import GetStatus, RemoveTask
from unicron.errors import BusUnavailableError, InvalidInputError, NotAllowedError
from unicron.service import health
from unicron.service.bootstrap import connected
from unicron.services import ANSWERING, NAMED
from unicron.settings import Settings

pytestmark = pytest.mark.real

ALL = {*ANSWERING, "node-1", *rights.PEOPLE}
JOINER = access.JOINER
CONTROL = set(NAMED)
ASKING = {"operator", "user", "console"}
ORDERING = {"operator", "console"}
INSIDE = {*CONTROL, *ORDERING, "enroller"}
"""Who is in the account of what is stored."""

API, REAL = f"{topology.API}.", "$JS.API."

PUBLISH = {
    "unicron.v1.evt.node-1.WorkerExited.gpt": {"node-1"},
    "unicron.v1.evt.node-2.WorkerExited.gpt": set(),
    "unicron.v1.tel.node-1.NodeHeartbeat.node-1": {"node-1"},
    "unicron.v1.tel.node-2.NodeHeartbeat.node-2": set(),
    "unicron.v1.cmd.node-1.StopWorker.gpt": {"transition"},
    "unicron.v1.cmd.node-2.StopWorker.gpt": {"transition"},
    "unicron.v1.rpc.registry": {*ASKING, "registry"},
    "unicron.v1.rpc.planner": ASKING,
    # not its own node: a right to answer is one to publish wherever who asks has named, so nobody may ask itself
    "unicron.v1.rpc.node.node-1": ASKING,
    "unicron.v1.ord.registry": {*ORDERING, "registry"},
    "unicron.v1.ord.straggler": ORDERING,
    "unicron.v1.ord.node.node-1": ORDERING,
    "unicron.stored.evt.node-1.WorkerExited.gpt": set(),
    "unicron.v1.enrol": {JOINER},
    "unicron.v1.enrol.node-1": {"node-1"},
    "unicron.v1.enrol.node-2": set(),
    "_R_.x": {"enroller"},
    "$SYS.REQ.SERVER.PING": {"enroller"},
    "$SYS.REQ.SERVER.NONE.RELOAD": {"enroller"},
    "unicron.v1.evt.enroller.Alert.gpt": {"enroller"},
    "unicron.elsewhere": set(),
    "_INBOX.user.x": set(),
    "_INBOX.operator.x": set(),
    f"$SYS.ACCOUNT.{topology.NODES}.DISCONNECT": set(),
    "$JS.API.DIRECT.GET.UNICRON": ALL,
    "$JS.API.STREAM.INFO.UNICRON": INSIDE,
    "unicron.js.STREAM.INFO.UNICRON": ALL,
    "$JS.API.STREAM.MSG.GET.KV_unicron_lease": INSIDE - {"enroller"},
    "unicron.js.STREAM.MSG.GET.KV_unicron_lease": ALL - {"subscriber", "enroller"},
    "$JS.API.DIRECT.GET.KV_unicron_lease.$KV.unicron_lease.registry": set(),
    "$JS.API.STREAM.MSG.GET.KV_unicron_state": CONTROL,
    "unicron.js.STREAM.MSG.GET.KV_unicron_state": CONTROL,
    "unicron.js.STREAM.PURGE.UNICRON": set(),
    "$JS.API.STREAM.CREATE.UNICRON": {"operator", "registry"},
    "$JS.API.STREAM.UPDATE.KV_unicron_state": {"operator", "registry"},
    "$JS.API.STREAM.CREATE.ANOTHER": set(),
    "$JS.API.STREAM.SNAPSHOT.UNICRON": {"operator"},
    "$JS.API.STREAM.RESTORE.KV_unicron_state": {"operator"},
    "$JS.SNAPSHOT.RESTORE.UNICRON.x": {"operator"},
    "$JS.API.STREAM.DELETE.UNICRON": set(),
    "$JS.API.STREAM.PURGE.UNICRON": set(),
    "$JS.API.STREAM.MSG.DELETE.UNICRON": set(),
    "$JS.API.CONSUMER.CREATE.UNICRON": set(),
    "$JS.API.CONSUMER.CREATE.UNICRON.mine.unicron.v1.evt.>": set(),
    "$SRV.PING.agent-node-1": set(),
    **{f"unicron.v1.evt.{name}.Alert.gpt": {name} for name in NAMED},
    **{f"$KV.unicron_state.{name}": {name} for name in NAMED},
    **{f"$KV.unicron_state.{name}.3": {name} for name in NAMED},
    **{f"$KV.unicron_lease.{name}": {name} for name in NAMED},
    f"$KV.unicron_state.{statistics.KEY}": {"detector"},
}

SUBSCRIBE = {
    ">": set(),
    "unicron.v1.>": set(),
    "unicron.v1.evt.>": set(),
    "unicron.v1.cmd.node-1.>": set(),
    "unicron.stored.>": CONTROL | ASKING,
    "unicron.stored.evt.>": CONTROL | ASKING | {"subscriber"},
    "unicron.stored.cmd.node-1.>": CONTROL | ASKING | {"node-1"},
    "unicron.stored.cmd.node-2.>": CONTROL | ASKING,
    "unicron.stored.evt.detector.FailureDetected.node-1": ALL - {"enroller"},
    "unicron.stored.evt.detector.FailureDetected.node-2": ALL - {"node-1", "enroller"},
    "unicron.stored.evt.straggler.RecordingSwitched.*": ALL - {"enroller"},
    "unicron.v1.tel.>": ALL - {"node-1", "enroller"},
    "unicron.v1.enrol": {"enroller"},
    "unicron.v1.enrol.*": {"enroller"},
    "unicron.v1.rpc.node.node-1": {"node-1"},
    "unicron.v1.rpc.node.node-2": set(),
    "unicron.v1.ord.node.node-1": {"node-1"},
    "unicron.v1.ord.node.node-2": set(),
    "unicron.v1.rpc.*": set(),
    "unicron.v1.rpc.node.*": set(),
    "_INBOX.>": set(),
    "_INBOX.*.*": set(),
    "$KV.>": set(),
    "$JS.>": set(),
    topology.DISCONNECTS: {"detector"},
    f"$SYS.ACCOUNT.{topology.NODES}.CONNECT": set(),
    "_R_.>": set(),
    "$SRV.PING.agent-node-1": {"node-1"},
    **{f"unicron.v1.rpc.{name}": {name} for name in ANSWERING},
    **{f"unicron.v1.ord.{name}": {name} for name in ANSWERING},
    **{f"_INBOX.{name}.>": {name} for name in (*ALL, JOINER)},
}

REQUEST = {
    "unicron.v1.rpc.planner": ASKING,
    "unicron.v1.ord.planner": ORDERING,
    "unicron.v1.rpc.node.node-1": ASKING,
    "unicron.v1.ord.node.node-1": ORDERING,
}


class Place:
    """A server with rights, and its keys."""

    def __init__(self, server, keys):
        self.server, self.keys = server, keys

    def seed(self, user):
        enrolled = self.keys.public(user).exists()
        return self.keys.folder.parent / f"{user}.nk" if enrolled else self.keys.path(user)

    def settings(self, user):
        return Settings(nats_url=self.server.url, nats_nkey=str(self.seed(user)), connect_timeout_s=PATIENT_S)

    @contextlib.asynccontextmanager
    async def connected(self, *users):
        async with contextlib.AsyncExitStack() as stack:
            yield [await stack.enter_async_context(connected(self.settings(user), user)) for user in users]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    async def provision():
        async with place.connected("registry") as [bus]:
            await topology.provision(bus.jetstream)

    root = tmp_path_factory.mktemp("rights")
    keys = Keyring(root / "keys")
    keys.ensure(["node-1", "node-2"], enrols=True)
    (root / "node-1.nk").write_bytes(keys.path("node-1").read_bytes())
    (root / "node-1.nk").chmod(0o600)
    own = keys.users()["node-1"]
    keys.forget("node-1")
    keys.enrol("node-1", own)  # so the table is that of a node which keeps its seed to itself
    with serving(root / "nats", accounts=keys.accounts) as server:
        place = Place(server, keys)
        asyncio.run(provision())
        yield place


# --- the table -------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def refusals(place, user):
    """Connect as `user` without the help of our own bus; yield the connection, and what the server has refused it."""
    refused = []

    async def note(error):
        refused.append(str(error).partition(' to "')[2].rstrip('"'))

    shown = {"user": JOINER, "password": JOINER} if user == JOINER else {"nkeys_seed": str(place.seed(user))}
    client = await raw.connect(place.server.url, **shown, inbox_prefix=f"_INBOX.{user}", error_cb=note)
    try:
        yield client, refused
    finally:
        await client.close()


def denied(table, user):
    """Return what the server says that it refused, as it calls that in the account of the user."""
    found = [subject for subject, allowed in table.items() if user not in allowed]
    return sorted(str(subject.replace(API, REAL) if user in INSIDE else subject).lower() for subject in found)


@pytest.mark.parametrize("table", [PUBLISH, SUBSCRIBE], ids=["publish", "subscribe"])
@pytest.mark.parametrize("user", sorted({*ALL, JOINER}))
async def test_each_may_publish_and_subscribe_to_what_the_table_says_and_nothing_else(place, user, table):
    async with refusals(place, user) as (client, refused):
        for subject in table:
            await (client.publish(subject, b"") if table is PUBLISH else client.subscribe(subject))
        for _ in range(2):  # one is no barrier for refusals
            await client.flush()
    assert sorted(refused) == denied(table, user)


async def echo(data):
    return data * 2


@pytest.mark.parametrize("user", sorted(ALL))
async def test_each_gets_answers_to_what_the_table_says_and_nothing_else(place, user):
    large = bytes(400_000)  # so that the reply comes in pieces
    async with place.connected("planner", "node-1", user) as [planner, node, asker]:
        for bus, name, service in ((planner, "planner", "planner"), (node, "node-1", "agent-node-1")):
            for subject in (subjects.rpc(name), subjects.orders(name)):
                await bus.serve(subject, service, echo)
        for subject, allowed in REQUEST.items():
            if user in allowed:
                assert await asker.ask(subject, large, PATIENT_S) == large * 2
            else:
                with pytest.raises(
                    NotAllowedError, match=rf"the key of {user} gives no right to publish on {subject}: .*NKEY"
                ):
                    await asker.ask(subject, large, PATIENT_S)


def test_the_table_names_every_kind_of_user():
    with pytest.raises(InvalidInputError, match=r"'no\.node'"):
        rights.rights("no.node")
    for name in (*ANSWERING, *rights.PEOPLE, JOINER, keys.SERVER):
        with pytest.raises(InvalidInputError, match=f"node '{name}': .*call"):
            keys._node(name)


# --- as our own processes use it -------------------------------------------------------------------------------------


def said(entries):
    return [entry.data for entry in entries]


@pytest.mark.parametrize("reader", ["planner", "user", "subscriber"])
async def test_what_a_node_says_is_heard_by_who_may_past_and_new(place, reader):
    async with place.connected("node-1", reader) as [node, other]:
        position = await other.tail()
        await node.append("unicron.v1.evt.node-1.T.k", b"past", f"{reader}-past")
        following = other.follow([subjects.FACTS], position)
        assert (await anext(following)).data == b"past"
        await node.append("unicron.v1.evt.node-1.T.k", b"new", f"{reader}-new")
        assert said(await take(following, 1)) == [b"new"]


async def test_a_node_gets_its_own_commands_and_can_not_listen_to_anothers(place):
    async with place.connected("transition", "node-1") as [transition, node]:
        position = await node.tail()
        await transition.append("unicron.v1.cmd.node-2.StopWorker.k", b"other", "c2")
        await transition.append("unicron.v1.cmd.node-1.StopWorker.k", b"own", "c1")
        filters = subjects.read_by("node-1")
        assert said(await take(node.follow(filters, position), 1)) == [b"own"]
        with pytest.raises(NotAllowedError, match=r"subscribe to unicron\.stored\.cmd\.node-2\.>"):
            await take(node.follow([subjects.commands("node-2")], position), 1)


async def test_a_node_that_speaks_for_another_is_told_so_at_once_and_nothing_is_stored(place, monkeypatch):
    async with place.connected("node-1") as [node]:
        position = await node.tail()
        monkeypatch.setattr(node.jetstream, "_timeout", 1e6)  # as long it would wait for an answer
        with pytest.raises(NotAllowedError, match=r"storing on unicron\.v1\.evt\.node-2\.T\.k: the key of node-1"):
            await node.append("unicron.v1.evt.node-2.T.k", b"", "forged")
        assert await node.tail() == position


async def revision(bus, bucket, key):
    stored = await bus.bucket(bucket).get(key)
    return stored.revision if stored else 0


async def test_services_keep_states_and_leases_of_their_own_only(place):
    async with place.connected("planner", "detector", "node-1") as [planner, detector, node]:
        for bucket, key in (("state", "planner"), ("state", "planner.0"), ("lease", "planner")):
            await planner.bucket(bucket).update(key, b"me", await revision(planner, bucket, key))
        assert (await detector.bucket("lease").get("planner")).value == b"me"
        assert (await node.bucket("lease").get("planner")).value == b"me"
        for bucket in ("state", "lease"):
            with pytest.raises(NotAllowedError, match=r"the key of detector .*\.planner"):
                await detector.bucket(bucket).create("planner", b"mine")
        with pytest.raises(NotAllowedError, match="KV_unicron_state"):
            await node.bucket("state").get("planner")


async def test_nobody_keeps_anothers_message_out_of_the_journal_by_using_its_id_first(place):
    mine, stolen = "unicron.v1.evt.planner.PlanDecided.x", "unicron.v1.evt.node-1.T.x"
    async with place.connected("node-1", "planner") as [node, planner]:
        taken = await node.append(stolen, b"nothing", "known-in-advance")
        stored = await planner.append(mine, b"plan", "known-in-advance")
        assert stored > taken
        found = await planner.jetstream.get_msg(topology.STREAM, stored, direct=True)
        assert (found.subject, found.data) == (mine, b"plan")
        assert await node.append(stolen, b"nothing", "known-in-advance") == taken, "its own is stored once as ever"


async def test_the_check_of_a_services_health_works_with_the_key_in_its_container(place):
    async with place.connected("detector") as [detector]:
        await detector.bucket("lease").update("detector", b"me", await revision(detector, "lease", "detector"))
        await health.check(place.settings("detector"), "detector")


STORING = (
    "unicron.v1.cmd.node-2.StopWorker.gpt",
    "unicron.v1.evt.node-2.WorkerExited.gpt",
    "unicron.v1.evt.planner.PlanDecided.gpt",
    "$KV.unicron_state.planner.9",
    "$KV.unicron_lease.planner.9",
)
ORDERING = ("unicron.v1.ord.registry", "unicron.v1.rpc.registry", "unicron.v1.ord.node.node-2")
TOLD = "unicron.v1.tel.node-2.NodeHeartbeat.node-2"


@pytest.mark.parametrize("user", ["node-1", "user", "subscriber"])
async def test_no_reply_of_the_server_is_stored_or_obeyed_or_heard_as_anothers_word(place, user):
    """Who may ask for an entry names where the reply goes, and the server looks at nobody's rights then."""
    obeyed, heard = [], []

    async def note(data):
        obeyed.append(data)
        return b""

    async def listen(bus, subject):
        async for each in bus.receive_telemetry([subject]):
            heard.append(each)  # noqa: PERF401 - it never ends

    async with (
        place.connected("node-1", "node-2", "registry", "planner") as [node, victim, registry, planner],
        refusals(place, user) as (client, refused),
    ):
        forged = await node.append("unicron.v1.evt.node-1.T.forged", b"forged", f"forged-for-{user}")
        await registry.serve(subjects.orders("registry"), "registry", note)
        await registry.serve(subjects.rpc("registry"), "registry", note)
        await victim.serve(subjects.orders("node-2"), "agent-node-2", note)
        listening = asyncio.create_task(listen(planner, TOLD))
        await until(lambda: planner._hearing)
        await planner.flush()
        for reply in (*STORING, *ORDERING, TOLD):
            await client.publish(f"$JS.API.DIRECT.GET.{topology.STREAM}", b'{"seq": %d}' % forged, reply=reply)
            await client.publish(f"{topology.API}.STREAM.INFO.{topology.STREAM}", b"", reply=reply)
            if user == "node-1":
                await client.publish("unicron.v1.evt.node-1.T.x", b"", reply=reply)
        for each in (client, registry, victim, planner) * 2:  # what was to reach them has, twice over
            await each.flush()
        assert refused == []
        entries = await take(planner.follow([subjects.ANY], forged - 1), 10 if user == "node-1" else 1)
        assert {entry.subject for entry in entries} <= {"unicron.v1.evt.node-1.T.forged", "unicron.v1.evt.node-1.T.x"}
        assert await planner.tail() == forged + len(entries) - 1
        for name, key in (("state", "planner.9"), ("lease", "planner.9")):
            assert await planner.bucket(name).get(key) is None
        assert obeyed == []
        assert heard == []
        listening.cancel()


async def test_who_is_refused_again_and_again_fills_no_disk(place, tmp_path, monkeypatch):
    monkeypatch.setattr(nats_server, "LOG_BYTES", 64 * 1024)
    with serving(tmp_path / "nats", accounts=place.keys.accounts) as server:
        client = await raw.connect(server.url, nkeys_seed=str(place.keys.path("user")), error_cb=ignore)
        for _ in range(8):
            for _ in range(1000):
                await client.publish("unicron.v1.cmd.node-1.StopWorker.gpt", b"")
            await client.flush()
            await asyncio.sleep(0.05)
        await client.close()
        logs = list(server.directory.glob("nats-server.log*"))
        assert len(logs) == nats_server.LOGS
        assert sum(log.stat().st_size for log in logs) < 8000 * 100


async def ignore(_):
    pass


@pytest.mark.parametrize(("query", "refused"), [(GetStatus(), False), (RemoveTask(task="gpt"), True)])
def test_an_order_is_none_where_everybody_may_ask(query, refused):
    assert codec.decode_asked(codec.encode(query), orders=True) == query
    with pytest.raises(InvalidInputError, match="RemoveTask is an order") if refused else contextlib.nullcontext():
        assert codec.decode_asked(codec.encode(query), orders=False) == query


# --- keys ------------------------------------------------------------------------------------------------------------


async def test_without_a_key_or_with_an_unknown_one_nobody_gets_in(place, tmp_path):
    with pytest.raises(BusUnavailableError, match=r"lets in nobody without a key; set UNICRON_NATS_NKEY"):
        await nats.connect(Settings(nats_url=place.server.url), "test", patient=False)
    other = Keyring(tmp_path)
    other.ensure([])
    stranger = Settings(nats_url=place.server.url, nats_nkey=str(other.path("operator")))
    with pytest.raises(BusUnavailableError, match=r"does not know the key in .*operator\.nk"):
        await nats.connect(stranger, "test", patient=False)


def test_keys_are_their_owners_and_stay(tmp_path):
    ring = Keyring(tmp_path / "keys")
    ring.ensure(["n1"])
    first = ring.users()
    assert set(first) == {*NAMED, *rights.PEOPLE, "n1"}
    assert len(set(first.values())) == len(first)
    for name in first:
        assert stat.S_IMODE(ring.path(name).stat().st_mode) == 0o600
        assert stat.S_IMODE(ring.path(name).parent.stat().st_mode) == 0o700
    ring.ensure(["n1", "n2"])
    assert {name: key for name, key in ring.users().items() if name != "n2"} == first
    with pytest.raises(InvalidInputError, match=r"'n9' has no key"):
        ring.rotate("n9")
    seeds = [ring.path(name).read_text().strip() for name in first]
    assert not any(seed in ring.accounts.read_text() for seed in seeds)


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("", 0o600, "no nkey seed"),
        ("SUNONSENSE", 0o600, "no nkey seed"),
        (None, 0o640, "chmod 600"),
        (None, 0o604, "chmod"),
    ],
)
async def test_a_key_that_can_not_be_used_is_named_with_the_cure(tmp_path, text, mode, says):
    ring = Keyring(tmp_path)
    ring.ensure([])
    path = ring.path("user")
    if text is not None:
        path.write_text(text)
    path.chmod(mode)
    with pytest.raises(InvalidInputError, match=rf"{path}: .*{says}"):
        await nats.connect(Settings(nats_nkey=str(path)), "test")
    with pytest.raises(InvalidInputError, match=says):
        ring.users()


async def test_a_node_is_shut_out_and_let_in_again_without_disturbing_anybody(place):
    pid, outages = place.server.pid, []
    async with place.connected("node-2", "planner") as [node, planner]:

        async def watch(bus):
            async for _ in bus.reconnected():
                outages.append(bus)  # noqa: PERF401 - it never ends

        watching = [asyncio.create_task(watch(bus)) for bus in (node, planner)]
        await asyncio.sleep(0)
        place.keys.shut_out("node-2")
        place.server.reload()
        await until(node._lost.done)
        with pytest.raises(BusUnavailableError):
            await node.append("unicron.v1.evt.node-2.T.k", b"", "shut")
        place.keys.ensure(["node-1", "node-2"])  # as at the next start: who is shut out stays so
        assert place.keys.shut() == ["node-2"]
        assert "node-2" not in place.keys.users()
        await planner.flush()
        assert outages == []
        place.keys.admit("node-2")
        place.server.reload()
        await insist(lambda: node.append("unicron.v1.evt.node-2.T.k", b"", "back"))
        assert outages == [node]
        assert place.server.pid == pid
        for task in watching:
            task.cancel()


async def test_a_key_that_was_replaced_opens_nothing_and_who_has_the_new_one_goes_on(place, tmp_path):
    old = tmp_path / "user.nk"
    old.write_bytes(place.keys.path("user").read_bytes())
    old.chmod(0o600)
    async with place.connected("user", "planner") as [user, planner]:
        await planner.serve(subjects.rpc("planner"), "planner", echo)
        before = place.keys.users()["user"]
        place.keys.rotate("user")
        assert place.keys.users()["user"] != before
        reloaded = lambda: place.server.log_path.read_text().count("Reloaded server configuration")  # noqa: E731
        before = reloaded()
        place.server.reload()
        await until(lambda: reloaded() > before)
        assert await insist(lambda: user.ask(subjects.rpc("planner"), b"x", 1.0)) == b"xx"
        stranger = Settings(nats_url=place.server.url, nats_nkey=str(old))
        with pytest.raises(BusUnavailableError, match="does not know the key"):
            await nats.connect(stranger, "test", patient=False)
