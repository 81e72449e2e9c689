"""The bus on a real server: lost connections, servers that end, slow readers."""

import asyncio
import contextlib
from pathlib import Path

import pytest
from helpers.buses import ALL, heard, take, write
from helpers.waiting import PATIENT_S, elapse, in_virtual_time, insist, until
from helpers.worlds import serving
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.transport import TcpTransport
from unicron_deploy.nats_server import NatsServer, Routes, config_text

from unicron import subjects
from unicron.bus import connection, journal, nats, topology
from unicron.errors import BusUnavailableError, ConflictError, InvalidInputError
from unicron.settings import Settings


@pytest.mark.parametrize("how", ["kill", "stop"])
async def test_reading_neither_skips_nor_repeats_across_restarts_of_the_server(private_world, private_server, how):
    writer, reader = await private_world.connect("writer"), await private_world.connect("reader")
    outages = asyncio.create_task(take(reader.reconnected(), 3))
    following = asyncio.create_task(take(reader.follow(ALL, 0), 400))
    writing = asyncio.create_task(write(writer, 400))
    for seen in (50, 150, 250):
        await until(lambda seen=seen: reached(writer, seen))
        await until(lambda: reader.client.is_connected)
        getattr(private_server, how)()
        await until(lambda: not reader.client.is_connected)
        private_server.start()
    await writing
    entries = await following
    assert [entry.data for entry in entries] == [b"m%d" % i for i in range(400)]
    assert [entry.sequence for entry in entries] == list(range(1, 401))
    assert all(down_s > 0 for down_s in await outages)
    assert await writer.append("unicron.v1.evt.n1.T.k", b"", "m3") == 4, "ids outlive the server too"


async def reached(bus, sequence):
    return await bus.tail() >= sequence


async def test_a_slow_reader_gets_everything(nats_world):
    bus = await nats_world.connect()
    following, payload = bus.follow(ALL, 0), bytes(4000)
    await write(bus, 1)
    assert (await anext(following)).sequence == 1  # it is not asked for more until all of them are there
    for first in range(0, 3000, 300):  # not all at once: on a busy machine the last would wait too long for an answer
        numbers = range(first, first + 300)
        await asyncio.gather(*(bus.append("unicron.v1.evt.n1.T.k", payload, f"n{i}") for i in numbers))
    assert [entry.sequence for entry in await take(following, 3000)] == list(range(2, 3002))


async def test_readers_make_nothing_on_the_server(nats_world):
    bus = await nats_world.connect()
    following = asyncio.create_task(take(bus.follow(ALL, 0), 20))
    await write(bus, 10)
    assert await bus.jetstream.consumers_info(topology.STREAM) == []
    await write(bus, 10, "later")
    assert [entry.sequence for entry in await following] == list(range(1, 21))


def losing_once(monkeypatch, lost):
    """Have what `lost` says of a message's data and headers get lost on its way to the client, once."""
    deliver, dropped = Client._process_msg, []

    async def drop_once(self, sid, subject, reply, data, headers):
        if not dropped and lost(data, headers):
            dropped.append(data)
        else:
            await deliver(self, sid, subject, reply, data, headers)

    monkeypatch.setattr(Client, "_process_msg", drop_once)
    return dropped


@pytest.mark.parametrize("lost", [b"m4", b"m9"])  # one in the middle; the last
async def test_a_delivery_that_got_lost_is_noticed_and_read_again(nats_world, monkeypatch, lost):
    monkeypatch.setattr(journal, "CHECK_S", 0.2)
    dropped = losing_once(monkeypatch, lambda data, headers: data == lost)
    bus = await nats_world.connect()
    await write(bus, 10)
    entries = await take(bus.follow(ALL, 0), 10)
    assert [entry.sequence for entry in entries] == list(range(1, 11))
    assert dropped == [lost]


async def test_what_the_server_forgot_to_tell_is_read_all_the_same(nats_world, monkeypatch):
    monkeypatch.setattr(journal, "CHECK_S", 0.2)
    bus = await nats_world.connect()
    entries = bus.follow(ALL, 0)
    await write(bus, 1)
    assert (await anext(entries)).data == b"m0"
    dropped = losing_once(monkeypatch, lambda data, headers: not data and b"Nats-Sequence: 2\r" in (headers or b""))
    following = asyncio.create_task(anext(entries))
    await write(bus, 1, "later")
    assert (await following).data == b"later0"
    assert dropped == [b""]


class Still:
    """A connection to a server whose journal is empty."""

    def __init__(self):
        self.asked = []

    def new_inbox(self):
        return "_INBOX.test"

    async def subscribe(self, subject, cb):
        if subject.startswith(self.new_inbox()):
            self._answer = cb

    async def flush(self):
        pass

    async def publish(self, subject, data, reply):
        self.asked.append((asyncio.get_running_loop().time(), subject, data))
        await self._answer(Msg(self, subject=reply, headers={"Status": "404"}))


@in_virtual_time
async def test_at_rest_the_journal_is_looked_at_ever_more_rarely_and_where_it_ends_is_not_asked():
    server, filters = Still(), subjects.read_by("node-1")

    async def call(job, *_):
        return await job

    reader = journal.JournalReader(server, None, call, filters, dict.fromkeys(journal.patterns(filters), 0))
    await reader.open()
    reading = asyncio.create_task(anext(reader.entries()))
    await elapse(29.0)
    looks = server.asked[:: len(filters)]
    assert [round(at) for at, *_ in looks] == [0, 2, 6, 14, 22]
    assert all(b"last_by_subj" in data for *_, data in looks)
    reader.interrupt()
    with pytest.raises(StopAsyncIteration):
        await reading


async def test_an_interruption_is_noticed_without_waiting_for_the_next_check(
    private_world, private_server, monkeypatch
):
    monkeypatch.setattr(journal, "CHECK_S", 1e6)  # a test that waits for it never ends
    bus = await private_world.connect()
    following = asyncio.create_task(take(bus.follow(ALL, 0), 2))
    await write(bus, 1)
    private_server.kill()
    private_server.start()
    await write(bus, 1, "later")
    assert [entry.data for entry in await following] == [b"m0", b"later0"]


async def test_a_call_in_flight_fails_when_the_connection_breaks(private_world, private_server):
    bus = await private_world.connect()
    called = asyncio.Event()

    async def handler(_data):
        called.set()
        await asyncio.Event().wait()
        return b""

    await bus.serve("unicron.v1.rpc.planner", "planner", handler)
    asking = asyncio.create_task(bus.ask("unicron.v1.rpc.planner", b"", PATIENT_S))
    await called.wait()
    private_server.kill()
    with pytest.raises(BusUnavailableError, match="connection to NATS is down"):
        await asking


async def test_the_server_tells_when_a_connection_ends(private_world):
    bus = await private_world.connect()
    hearing = await heard(bus, [topology.DISCONNECTS])
    await (await private_world.connect("agent.node-7")).close()
    (advisory,) = await take(hearing, 1)
    assert b"agent.node-7" in advisory.data


async def test_calls_fail_in_time_while_the_server_is_away_and_work_afterwards(private_world, private_server):
    bus = await private_world.connect()
    bucket = bus.bucket("state")
    revision = await bucket.create("k", b"1")

    async def answer(data):
        return data

    await bus.serve("unicron.v1.rpc.registry", "registry", answer)
    private_server.kill()
    for call in (
        lambda: bus.append("unicron.v1.evt.n1.T.k", b"", "id"),
        lambda: bus.publish_telemetry("unicron.v1.tel.n1.T.k", b""),
        lambda: bus.ask("unicron.v1.rpc.registry", b"", 1.0),
        lambda: bucket.update("k", b"2", revision),
        lambda: bucket.get("k"),
        bus.tail,
        bus.flush,
    ):
        with pytest.raises(BusUnavailableError):
            await call()
    private_server.start()
    await insist(lambda: bus.append("unicron.v1.evt.n1.T.k", b"", "id"))
    assert await bus.tail() == 1
    assert await bucket.get("k") == (b"1", revision)
    assert await bucket.update("k", b"2", revision) > revision
    assert await bus.ask("unicron.v1.rpc.registry", b"again", PATIENT_S) == b"again"


async def test_a_connection_closed_while_the_server_is_away_leaves_no_task_behind(private_server, monkeypatch):
    async def connect(*_args, **_kwargs):
        tried.set()
        # What asyncio.wait_for does before Python 3.12 when its job fails while it is being cancelled.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)
        raise ConnectionRefusedError

    before, tried = asyncio.all_tasks(), asyncio.Event()
    bus = await nats.connect(Settings(nats_url=private_server.url), "test")
    monkeypatch.setattr(TcpTransport, "connect", connect)
    private_server.kill()
    await tried.wait()
    await bus.close()
    await until(lambda: asyncio.all_tasks() <= before)


async def test_calls_that_are_cut_short_do_no_harm_to_the_connection(private_world):
    bus = await private_world.connect()
    interrupted = asyncio.create_task(take(bus.reconnected(), 1))

    async def answer(data):
        return data

    async def serve_and_stop():
        await (await bus.serve("unicron.v1.rpc.registry", "registry", answer))()

    for number in range(150):
        call = (serve_and_stop, bus.flush, bus.tail)[number % 3]
        task = asyncio.create_task(call())
        for _ in range(number // 3):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await bus.flush()
    assert await bus.tail() == 0
    assert not interrupted.done()
    interrupted.cancel()


async def test_a_connection_that_the_server_ends_for_good_is_an_error_and_not_an_endless_wait(private_world):
    bus = await private_world.connect()
    watching = asyncio.create_task(take(bus.reconnected(), 1))
    await until(lambda: bus._outages)
    bus._nc._transport.write(b"NONSENSE\r\n")
    with pytest.raises(BusUnavailableError, match=r"for good.*unknown protocol operation"):
        await watching
    with pytest.raises(BusUnavailableError):
        await take(bus.receive_telemetry(["unicron.v1.tel.>"]), 1)


async def test_a_server_that_does_not_answer_is_named_with_the_cure():
    url = "nats://127.0.0.1:1"
    with pytest.raises(
        BusUnavailableError, match=rf"{url} within 0.3 s.*start the server there .*, or set UNICRON_NATS_URL"
    ):
        await nats.connect(Settings(nats_url=url, connect_timeout_s=0.3), "test")


async def test_a_connection_that_never_finishes_closing_holds_nobody_up(monkeypatch):
    async def never_ends(self, *_):
        await asyncio.Event().wait()

    monkeypatch.setattr(Client, "close", never_ends)
    monkeypatch.setattr(connection, "CLOSE_S", 0.1)
    settings = Settings(nats_url="nats://127.0.0.1:1", connect_timeout_s=0.3)
    with pytest.raises(BusUnavailableError, match="no NATS server answers"):
        await nats.connect(settings, "test")


async def test_a_server_without_streams_is_said_so(private_server):
    bus = await nats.connect(Settings(nats_url=private_server.url), "test")
    for call in (lambda: bus.append("unicron.v1.evt.n1.T.k", b"", "id"), bus.tail):
        with pytest.raises(BusUnavailableError, match="unicron provision"):
            await call()
    await bus.close()


async def test_an_address_that_is_none(tmp_path):
    with pytest.raises(InvalidInputError, match="UNICRON_NATS_URL"):
        await nats.connect(Settings(nats_url="nats://127.0.0.1:notaport", connect_timeout_s=1.0), "test")


async def test_provisioning_again_changes_what_is_declared_otherwise_and_nothing_else(nats_world):
    bus = await nats_world.connect()
    await bus.append("unicron.v1.evt.n1.T.k", b"kept", "id")
    await topology.provision(bus.jetstream, lease_ttl_s=5.0)
    info = await bus.jetstream.stream_info("KV_unicron_lease")
    assert info.config.max_age == 5.0
    journal = await bus.jetstream.stream_info(topology.STREAM)
    assert (journal.config.max_age, journal.config.duplicate_window) == (7 * 86400, 3600)
    assert await bus.tail() == 1


async def test_pulses_leave_the_journal_soon_and_messages_do_not(nats_world):
    bus = await nats_world.connect()
    for subject in ("unicron.v1.evt.n1.T.k", subjects.pulse("registry")):
        await bus.append(subject, b"", subject)
    message, pulse = [await bus.jetstream.get_msg(topology.STREAM, number) for number in (1, 2)]
    assert (pulse.headers["Nats-TTL"], "Nats-TTL" in message.headers) == (topology.PULSE_TTL, False)
    assert (await bus.jetstream.stream_info(topology.STREAM)).config.allow_msg_ttl


def test_a_port_that_is_taken_is_named_with_the_cure(private_server, tmp_path):
    second = NatsServer(tmp_path / "second", private_server.port)
    with pytest.raises(InvalidInputError, match=rf"port {private_server.port} on 127.0.0.1.*choose another port"):
        second.start()
    assert private_server.pid is not None


def test_the_deployed_configuration_is_the_embedded_one(request):
    deployed = request.config.rootpath / "deploy"
    fields = {"accounts": Path("server/accounts.conf"), "monitor": 8222, "tls": Path("/etc/unicron/server")}
    assert (deployed / "nats.conf").read_text() == config_text("/data", **fields)
    fields |= {"name": "$UNICRON_SERVER", "routes": Routes(6222, Path("server/routes.conf"))}
    # another folder: a server of a cluster removes what it finds of one that was alone
    assert (deployed / "nats-ha.conf").read_text() == config_text("/data/ha", **fields)


async def test_a_client_that_does_not_answer_is_noticed(tmp_path):
    with serving(tmp_path / "nats", ping_s=0.1) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b'CONNECT {"verbose":false,"name":"frozen"}\r\nPING\r\n')
        assert b"Stale Connection" in await reader.read(-1)
        writer.close()


async def test_leases_expire_there_and_states_do_not(private_world):
    bus = await private_world.connect()
    await topology.provision(bus.jetstream, lease_ttl_s=0.5)
    lease, state = bus.bucket("lease"), bus.bucket("state")
    first = await lease.create("k", b"1")
    await state.create("k", b"1")

    async def gone():
        return await lease.get("k") is None

    await until(gone)
    with pytest.raises(ConflictError):
        await lease.update("k", b"2", first)
    assert await lease.create("k", b"2") > first
    assert await state.get("k") is not None


async def test_when_a_flush_is_over_the_server_has_heard_of_a_subscription(nats_world):
    client = (await nats_world.connect()).client
    written, transport = [], client._transport
    write, writelines = transport.write, transport.writelines
    transport.write = lambda data: (written.append(data), write(data))
    transport.writelines = lambda lines: (written.extend(lines), writelines(lines))
    await client.subscribe("unicron.v1.tel.node-1.T.k")
    await client.flush()
    said = b"".join(written)
    assert said.index(b"SUB unicron.v1.tel.node-1.T.k") < said.index(b"PING")
