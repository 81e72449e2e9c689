"""Three NATS servers: what one of them has not yet is not missed, and any of them may be lost."""

import asyncio
import contextlib
import shutil
import socket
from pathlib import Path

import pytest
import pytest_asyncio
from helpers.ports import free_port
from helpers.waiting import until
from helpers.worlds import LEASE_TTL_S, PATIENT_PING_S
from unicron_cli import doctor
from unicron_deploy.keys import Keyring
from unicron_deploy.nats_server import NatsServer, Routes

from unicron import vitality
from unicron.aio import retry_until_available
from unicron.bus import nats, topology
from unicron.errors import BusUnavailableError
from unicron.service.bootstrap import connected
from unicron.settings import Settings

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module")]

NAMES = ("nats-1", "nats-2", "nats-3")


class Servers:
    """Three servers that know one another."""

    def __init__(self, root: Path) -> None:
        ports = [free_port() for _ in NAMES]
        self.keys = Keyring(root / "keys")
        self.keys.route(f"127.0.0.1:{port}" for port in ports)
        self.all = {
            name: NatsServer(
                root / name, free_port(), ping_s=PATIENT_PING_S, name=name, routes=Routes(port, self.keys.routes)
            )
            for name, port in zip(NAMES, ports, strict=True)
        }

    def settings(self, *names: str) -> Settings:
        """Return the settings of who knows these servers, or all."""
        return Settings(nats_url=",".join(self.all[name].url for name in names or NAMES), lease_ttl_s=LEASE_TTL_S)

    async def leader(self, bus, stream=topology.STREAM):
        info = await retry_until_available(
            lambda: bus._call(bus._reading.stream_info(stream), "looking for the leader"), "looking"
        )
        return info.cluster.leader, {each.name: each.current for each in info.cluster.replicas}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory):
    made = Servers(tmp_path_factory.mktemp("servers"))
    try:
        for server in made.all.values():
            await asyncio.to_thread(server.start)
        copies = topology.copies(made.settings().nats_servers)
        async with connected(made.settings(), "provision") as bus:
            await retry_until_available(
                lambda: topology.provision(bus.jetstream, copies, lease_ttl_s=LEASE_TTL_S), "provisioning"
            )
        yield made
    finally:
        for server in made.all.values():
            server.kill()


async def collect(bus, filters, after, until):
    found = []
    async for entry in bus.follow(filters, after):
        found.append((entry.sequence, entry.subject, entry.data))
        if entry.data == until:
            return found
    return found


KINDS = [f"unicron.v1.evt.n{number}.T.k" for number in range(5)]


async def say(bus, word, count):
    """Append messages on all subjects in turn, and a last one on each; return all there are from there on."""
    for number in range(count):
        await retry_until_available(lambda: bus.append(KINDS[number % 5], b"%d" % number, f"{word}-{number}"), "saying")  # noqa: B023
    await retry_until_available(lambda: bus.append(KINDS[0], word.encode(), word), "saying")


async def longer(bus, than):
    return await bus.tail() > than


async def read_while(servers, word, job=None, count=250):
    """Have readers of one, of some and of all subjects, on all servers, follow what is said while `job` runs."""
    filters = [[KINDS[0]], [KINDS[0], KINDS[1]], ["unicron.v1.evt.*.T.k", KINDS[0], KINDS[2]], KINDS]
    async with contextlib.AsyncExitStack() as stack:
        known = [servers.settings(*names) for names in [(name,) for name in NAMES] + [()]]
        buses = [await stack.enter_async_context(connected(each, "reader")) for each in known]
        after = await buses[-1].tail()
        reading = [asyncio.create_task(collect(bus, each, after, word.encode())) for bus in buses for each in filters]
        await asyncio.gather(say(buses[-1], word, count), *([job(buses[-1], after)] if job else []))
        found = await asyncio.gather(*reading)
    everything = found[-1]
    assert [data for *_, data in everything] == [*(b"%d" % number for number in range(count)), word.encode()]
    for number, entries in enumerate(found):
        wanted = filters[number % len(filters)]
        if number % len(filters) == 2:
            wanted = KINDS
        assert entries == [each for each in everything if each[1] in wanted], (number, wanted)


async def test_whichever_server_answers_a_reader_skips_and_repeats_nothing_and_keeps_the_order(servers):
    await read_while(servers, "quiet")


async def test_who_does_not_know_the_secret_is_no_server_of_the_cluster(servers):
    port = servers.all["nats-1"]._routes.port
    with socket.create_connection(("127.0.0.1", port)) as route, route.makefile("rb") as said:
        assert said.readline().startswith(b"INFO")
        route.sendall(b'CONNECT {"name":"nats-4","cluster":"unicron","user":"route","pass":"guessed"}\r\nPING\r\n')
        assert b"Authorization Violation" in said.readline()
    assert servers.keys.routes.stat().st_mode & 0o077 == 0


@pytest.mark.slow
@pytest.mark.exhaustive("elections take NATS seconds; that any server may be lost is shown by one that hangs")
async def test_the_server_that_leads_is_lost_with_its_disk_and_comes_back_with_an_empty_one(servers):
    watcher = await nats.connect(servers.settings(), "watcher")
    lost, _ = await servers.leader(watcher)

    async def lose_and_bring_back(bus, before):
        await until(lambda: longer(bus, before + 20))
        server = servers.all[lost]
        await asyncio.to_thread(server.kill)
        shutil.rmtree(server.directory)
        assert (await servers.leader(watcher))[0] != lost, "another one leads"
        await asyncio.to_thread(server.start)

    try:
        # readers that know only the lost server wait until it is back
        await read_while(servers, "lost", lose_and_bring_back)

        async def caught_up():
            return (await servers.leader(watcher))[1].get(lost)

        await until(caught_up)
        async with connected(servers.settings(lost), "alone") as alone:
            assert await retry_until_available(alone.tail, "asking") == await watcher.tail()
    finally:
        await watcher.close()


async def test_a_server_that_knows_of_no_leader_is_not_believed_how_far_the_journal_is(servers, monkeypatch):
    async def as_a_server_with_an_empty_disk_was_seen_to_answer(stream):
        info = await told(stream)
        info.cluster.leader, info.state.last_seq = None, 0
        return info

    async with connected(servers.settings(), "asker") as bus:
        told = bus._reading.stream_info
        monkeypatch.setattr(bus._reading, "stream_info", as_a_server_with_an_empty_disk_was_seen_to_answer)
        with pytest.raises(BusUnavailableError, match="none of its servers leads"):
            await bus.tail()


@pytest.mark.slow
async def test_a_server_that_hangs_with_unread_messages_is_left_for_another(servers):
    taken = []

    async def hang(reader, writer):
        if taken:  # it accepts nobody any more
            writer.close()
            return
        taken.append(writer)
        writer.write(b'INFO {"server_id":"hung","version":"2.11.0","max_payload":1048576,"headers":true}\r\n')
        while not (await reader.readline()).startswith(b"PING"):
            pass
        writer.write(b"PONG\r\n")
        await asyncio.Event().wait()  # and reads no more

    hung = await asyncio.start_server(hang, "127.0.0.1", 0)
    port = hung.sockets[0].getsockname()[1]
    bus = await nats.connect(Settings(nats_url=f"nats://127.0.0.1:{port}"), "stuck")
    async with connected(servers.settings("nats-1"), "other") as other:
        bus.client._server_pool.extend(other.client._server_pool)
    try:
        for _ in range(100):  # more than the kernel keeps on its way
            bus.client._transport.write(b"PUB x 200000\r\n" + b"x" * 200_000 + b"\r\n")
        await anext(bus.reconnected())
        assert await bus.tail() >= 0
    finally:
        await bus.close()
        hung.close()


@pytest.mark.slow
@pytest.mark.exhaustive("elections take NATS seconds")
async def test_the_doctor_says_how_many_servers_are_left_and_what_that_means(servers):
    def found(checks):
        return {check.name: (check.state, f"{check.found}; {check.cure}") for check in checks}

    second, third = (servers.all[name] for name in NAMES[1:])
    assert found(await doctor._cluster(servers.settings(), patient=False))["NATS"][0] == "ok"
    try:
        await asyncio.to_thread(second.kill)
        state, said = found(await doctor._cluster(servers.settings(), patient=False))["NATS"]
        assert state == "warning"
        assert f"2 of 3 servers answer, not {second.url}; start these servers again" in said
        async with connected(servers.settings(), "watcher") as bus:

            async def named():
                return [part.name for part in await vitality.examine(bus) if part.problem == vitality.SILENT_SERVER]

            assert await until(named) == [NAMES[1]]
        await asyncio.to_thread(third.kill)

        async def noticed():  # by the one that is left
            checks = found(await doctor._cluster(servers.settings(), patient=False))
            return checks["JetStream"][0] != "ok" and checks

        checks = await until(noticed)
        assert set(checks) == {"NATS", "JetStream"}
        assert {state for state, _ in checks.values()} == {"missing"}
        assert "1 of 3 servers answer" in checks["NATS"][1]
        assert "nothing is stored or healed until more than half answer" in checks["NATS"][1]
        assert checks["JetStream"][1].endswith("; as for NATS")
    finally:
        for server in (second, third):
            await asyncio.to_thread(server.start)
