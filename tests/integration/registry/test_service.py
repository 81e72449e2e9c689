"""The registry as a process of its own, on a real server."""

import signal
import subprocess
import sys
import time

import msgspec
import pytest
from helpers.registry import SPEC, connected, eventually, facts, registry
from helpers.shell import let_go

from unicron import codec, subjects
from unicron.contracts.events import (
    Alert,
    DeadLetter,
    FailureDetected,
    IterationFinished,
    NodeAdmitted,
    NodeJoined,
    OrderTaken,
    TaskStateChanged,
    TaskSubmitted,
)
from unicron.contracts.failures import Severity
from unicron.contracts.tasks import Member, NodeState, Slot, TaskState
from unicron.errors import BusUnavailableError, InvalidInputError


async def say(client, message, number):
    message = msgspec.structs.replace(message, id=f"test-{number}", at=time.time())
    await client.bus.append(subjects.of(message), codec.encode(message), message.id)


def joined(node):
    return NodeJoined(node=node, source=node, incarnation="a", host="127.0.0.1", slots=[Slot(index=0)])


async def test_it_keeps_its_picture_over_a_kill_and_says_everything_once(private_world):
    async with connected(private_world) as client:
        with registry(private_world) as process:
            await eventually(client.status, lambda status: True)
            await say(client, joined("node-1"), 1)
            await eventually(client.status, lambda status: [view.node for view in status.nodes] == ["node-1"])
            assert "submitted" in await client.submit(SPEC)
            assert "nothing changed" in await client.submit(SPEC)
            process.send_signal(signal.SIGKILL)
            process.wait()
            await let_go(client.bus, "registry")
            await say(client, joined("node-2"), 2)
        with registry(private_world):
            status = await eventually(client.status, lambda status: len(status.nodes) == 2)
        assert [(view.spec, view.state) for view in status.tasks] == [(SPEC, TaskState.WAITING)]
        assert [fact.node for fact in await facts(client, NodeAdmitted)] == ["node-1", "node-2"]
        assert [fact.spec for fact in await facts(client, TaskSubmitted)] == [SPEC]


async def test_progress_comes_from_facts_and_telemetry(patient_world):
    async with connected(patient_world) as client:
        with registry(patient_world):
            await eventually(client.status, lambda status: True)
            await client.submit(SPEC)
            members = [Member(worker="w0", node="node-1", slot=0)]
            running = TaskStateChanged(
                task="gpt", state=TaskState.RUNNING, epoch=0, members=members, source="transition"
            )
            await say(client, joined("node-1"), 1)
            await say(client, running, 2)
            await eventually(client.status, lambda status: status.tasks[0].state == TaskState.RUNNING)
            done = IterationFinished(
                node="node-1",
                slot=0,
                task="gpt",
                worker="w0",
                epoch=0,
                iteration=0,
                world_size=1,
                seconds=1.5,
                loss=3.0,
                source="node-1",
            )
            await client.bus.tell(subjects.of(done), codec.encode(done))
            status = await eventually(client.status, lambda status: status.tasks[0].iteration == 0)
            assert (status.tasks[0].loss, status.tasks[0].waf) == (3.0, 2e9)
            lost = FailureDetected(
                severity=Severity.SEV1, method="m", status="lost_connection", node="node-1", source="detector"
            )
            await say(client, lost, 3)
            await eventually(client.status, lambda status: status.nodes[0].state == NodeState.LOST)


@pytest.mark.parametrize(
    ("subject", "data", "named"),
    [
        ("unicron.v1.evt.node-1.NodeJoined.node-1", b"\xc1 not msgpack", "NodeJoined.node-1"),
        ("unicron.v1.evt.node-1.FlyingSaucer.node-1", b"\x81\xa4type\xacFlyingSaucer", "FlyingSaucer"),
        ("unicron.v1.evt.node-2.NodeJoined.node-1", codec.encode(joined("node-1")), "belongs on"),
    ],
)
async def test_what_nobody_can_read_is_put_aside_with_an_alert_and_it_lives_on(patient_world, subject, data, named):
    async with connected(patient_world) as client:
        with registry(patient_world) as process:
            await eventually(client.status, lambda status: True)
            await client.bus.append(subject, data, "bad-1")
            [letter] = await eventually(lambda: facts(client, DeadLetter), len)
            assert (letter.subject, letter.payload) == (subject, data)
            [alert] = await eventually(lambda: facts(client, Alert), len)
            assert named in alert.text
            await say(client, joined("node-1"), 1)
            status = await eventually(client.status, lambda status: status.nodes)
            assert [view.node for view in status.nodes] == ["node-1"]
            assert process.poll() is None


async def test_refused_orders_change_nothing_and_nobody_there_says_so(patient_world):
    async with connected(patient_world) as client:
        with pytest.raises(BusUnavailableError, match="is registry running"):
            await client.status()
        with registry(patient_world):
            await eventually(client.status, lambda status: True)
            with pytest.raises(InvalidInputError, match=r"weight -1\.0"):
                await client.submit(msgspec.structs.replace(SPEC, weight=-1.0))
            with pytest.raises(InvalidInputError, match="no node 'node-9'"):
                await client.drain("node-9")
            with pytest.raises(InvalidInputError, match="no task 'bert'"):
                await client.remove("bert")
            with pytest.raises(InvalidInputError, match="no fault 'flood'"):
                await client.inject("node-1", "flood")
            with pytest.raises(BusUnavailableError, match="is node-1 running"):
                await client.inject("node-1", "kill-node")
            assert (await client.status()).tasks == []
            assert await facts(client, TaskSubmitted) == await facts(client, OrderTaken) == []


def test_without_a_bus_it_says_so_in_one_line():
    command = ["-m", "unicron_registry", "--nats-url", "nats://127.0.0.1:1", "--connect-timeout-s", "0.2"]
    ended = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "no NATS server answers at nats://127.0.0.1:1" in ended.stderr.splitlines()[-1]
    ended = subprocess.run(
        [sys.executable, "-m", "unicron_registry", "--lease-ttl-s", "soon"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("registry: ")
    assert "--lease-ttl-s" in ended.stderr
