"""Whatever variables its processes are given, the traffic of a cluster goes where the cluster sends it."""

import asyncio
import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import proxies
from helpers.fabric import Node, fabric, state_ref
from helpers.ports import free_port
from msgspec.structs import replace
from unicron_agent.hardware.network import interface_of, own_address
from unicron_agent.snapshots.sources import OtherNode
from unicron_agent.workers.rendezvous import RendezvousServer
from unicron_cli.clusterlook import scrape
from unicron_deploy import nats_server
from unicron_deploy.nats_server import NatsServer

from unicron.bus.nats import connect
from unicron.contracts.worker import NOWHERE
from unicron.settings import Settings
from unicron.train.groups.rendezvous import Rendezvous

CONTENT = b"a state"
NAME = "gpt-1.1.state"


@pytest.fixture
def behind_a_proxy(monkeypatch):
    for name, value in proxies.VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("no_proxy")


@pytest.mark.usefixtures("behind_a_proxy")
async def test_a_state_goes_straight_from_node_to_node(tmp_path):
    async with Node("n1", tmp_path / "n1", fabric(tmp_path)).served() as node:
        (node.folder / NAME).write_bytes(CONTENT)
        ref = state_ref(CONTENT, NAME, address=node.address)
        taken = await OtherNode(fabric(tmp_path, "n2")).obtain(ref, tmp_path / "taken")
        assert taken.read_bytes() == CONTENT


STEERED = """\
import asyncio, os
from unicron_agent.calls import grpc
async def ask():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            await channel.unary_unary("/no/such")(b"", timeout=20)
        except grpc.aio.AioRpcError as error:
            print(error.code().name, os.environ["GRPC_POLL_STRATEGY"])
asyncio.run(ask())
"""


def test_variables_of_grpc_are_for_the_programs_of_users():
    env = {"PATH": os.environ["PATH"], "GRPC_POLL_STRATEGY": "none"}
    told = subprocess.run([sys.executable, "-c", STEERED], env=env, capture_output=True, text=True, check=False).stdout
    assert told == "UNIMPLEMENTED none\n", "gRPC ends the process where it heeds that"


class _Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'unicron_active{source="planner-1"} 1\n')

    def log_message(self, *args):
        pass


@pytest.mark.usefixtures("behind_a_proxy")
def test_a_process_is_asked_for_its_metrics_straight():
    with http.server.HTTPServer(("127.0.0.1", 0), _Metrics) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        seen = asyncio.run(scrape(f"127.0.0.1:{server.server_port}"))
        server.shutdown()
    assert (seen.up, seen.active) == (True, True)


def test_a_server_of_the_bus_takes_its_limits_from_the_environment_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("GODEBUG", "netdns=go")
    monkeypatch.setenv("GOMAXPROCS", "2")
    server = NatsServer(tmp_path / "nats", free_port())
    pid = server.start()
    try:
        given = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        assert {each.split(b"=")[0] for each in given if each} <= {b"GOMAXPROCS", b"TZ"}
    finally:
        server.kill()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_each_port_of_a_cluster_is_reached_by_either_kind_of_address(tmp_path, host):
    server = NatsServer(tmp_path / "nats", nats_server.free_port(host), host)
    server.start()
    try:
        bus = await connect(replace(Settings.load([], {}), nats_url=server.url), "n1")
        await bus.close()
    finally:
        server.kill()
    own = fabric(tmp_path)
    async with Node("n1", tmp_path / "n1", own).served(host=host) as node:
        (node.folder / NAME).write_bytes(CONTENT)
        ref = state_ref(CONTENT, NAME, address=node.address)
        assert (await OtherNode(fabric(tmp_path, "n2")).obtain(ref, tmp_path / "taken")).read_bytes() == CONTENT
    own_server, address = await RendezvousServer(own).serve(host)
    member = own.with_secrets(replace(NOWHERE, rendezvous=address, rendezvous_id="gpt-1"))
    (await asyncio.to_thread(Rendezvous, member)).close()
    own_server.close()
    assert interface_of(own_address(server.url)) == "lo"
