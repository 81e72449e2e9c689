"""An agent on a machine with GPUs of AMD: a program in its path stands for amd-smi."""

import asyncio
import logging
import os
import queue
import sys
import threading

import pytest
from helpers.amd import AmdMachine, told
from unicron_agent.hardware import amd_smi, slots
from unicron_agent.hardware.amd_smi import AmdSmi, AmdWatch, NoAnswerError
from unicron_agent.stimuli import Logged, Sampled

from unicron import codec, subjects
from unicron.contracts.events import NodeJoined
from unicron.contracts.hardware import GpusSampled
from unicron.contracts.tasks import Slot
from unicron.errors import InvalidInputError
from unicron.rules import load

DEVICES = ["GPU-d4b1dbb1e6a69540", "GPU-d4b1dbb1e6a69541"]
SLOTS = [Slot(index=index, kind="gpu", device=device) for index, device in enumerate(DEVICES)]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return AmdMachine(tmp_path / "bin", monkeypatch)


@pytest.fixture
def smi():
    return AmdSmi(threading.Event())


def test_slots_are_the_gpus_that_hip_has_names_for(machine, caplog):
    unnamed = ({"gpu": 2, "bdf": "0000:c4:00.0", "uuid": "N/A"}, told(2)[1])
    machine.has(told(0), told(1), unnamed)
    assert slots.find_slots(0) == SLOTS
    assert "1 GPUs of this node have no serial number" in caplog.text


def test_gpus_that_are_split_up_are_refused(machine):
    machine.has(told(0), ({**told(0)[0], "gpu": 1}, told(1)[1]))
    with pytest.raises(InvalidInputError, match=f"GPU {DEVICES[0]} is split up"):
        slots.find_slots(4)


def test_without_an_answer_there_are_cpu_slots_and_it_is_said(machine, caplog):
    machine.behave("exit 255")
    assert slots.find_slots(2) == [Slot(index=0), Slot(index=1)]
    assert "list --json ends with 255" in caplog.text


def test_the_program_gets_nothing_of_our_environment(machine, smi, monkeypatch):
    for name in ("PYTHONPATH", "LD_PRELOAD_OF_A_USER", "UNICRON_NATS_NKEY", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "ours")
    smi.read()
    asked, environment = machine.asked()
    assert asked == ["list --json", "metric --json"]
    assert "ours" not in environment


def test_it_is_found_where_rocm_is_too(machine, smi, monkeypatch):
    monkeypatch.setenv("PATH", os.defpath)
    assert smi.read() == []
    monkeypatch.setattr(amd_smi, "ROCM", str(machine.folder))
    assert [reading.device for reading in smi.read()] == DEVICES


def test_a_program_that_hangs_is_ended(machine, smi, monkeypatch):
    monkeypatch.setattr(amd_smi, "ANSWERS_S", 0.0)
    machine.behave("tail -f /dev/null")
    for _ in range(2):
        with pytest.raises(NoAnswerError, match="list --json does not end within"):
            smi.read()


def test_beside_one_that_can_not_be_ended_no_other_is_started(machine, smi, monkeypatch):
    monkeypatch.setattr(amd_smi, "ANSWERS_S", 0.0)
    stuck = []
    with monkeypatch.context() as kernel:
        kernel.setattr(amd_smi, "_kill", stuck.append)
        machine.behave("tail -f /dev/null")
        with pytest.raises(NoAnswerError, match="does not end within"):
            smi.read()
        for _ in range(3):
            with pytest.raises(NoAnswerError, match=f"process {stuck[0].pid} of .* does not end"):
                smi.read()
    assert len(stuck) == 1
    amd_smi._kill(stuck[0])
    stuck[0].wait()
    monkeypatch.setattr(amd_smi, "ANSWERS_S", 60.0)
    machine.behave(":")
    assert [reading.device for reading in smi.read()] == DEVICES


class Watching:
    """The watch alone, which reads without a rest."""

    def __init__(self, machine):
        self.machine, self.told, self.addresses = machine, queue.Queue(), {}
        self.watch = AmdWatch(load(), SLOTS, self.addresses, self.told.put)
        self.watch.start()

    def until(self, kind, right=lambda _: True):
        while True:
            if isinstance(found := self.told.get(), kind) and right(found):
                return found


@pytest.fixture
def watching(machine, monkeypatch):
    monkeypatch.setattr(amd_smi, "SAMPLE_S", 0.01)
    monkeypatch.setattr(amd_smi, "ANSWERS_S", 3600.0)
    found = Watching(machine)
    yield found
    found.watch.stop()


def test_counters_and_faults_are_told_with_their_slots(watching):
    assert [gpu.slot for gpu in watching.until(Sampled).gpus] == [0, 1]
    assert watching.addresses == {"0000:1a:00": 0, "0000:1b:00": 1}
    watching.machine.has(told(0), told(1, 2))
    text = "amd-smi: 2 new uncorrectable ECC errors of GPU 1"
    assert watching.until(Logged) == Logged(text=text, status="ecc_error", slot=1)
    watching.machine.has(told(1, 2))
    assert watching.until(Logged) == Logged(text="amd-smi: GPU 0 is lost", status="gpu_driver_error", slot=0)


def test_a_program_that_fails_in_between_is_said_once_and_asked_again(watching, caplog):
    caplog.set_level(logging.WARNING)
    watching.until(Sampled)
    watching.machine.behave("exit 3")
    while "ends with 3" not in caplog.text:
        watching.watch._ended.wait(0.01)
    asked = len(watching.machine.asked()[0])
    while len(watching.machine.asked()[0]) < asked + 3:
        watching.watch._ended.wait(0.01)
    watching.machine.behave(":")
    while not watching.told.empty():
        watching.told.get()
    watching.until(Sampled)
    watching.until(Sampled)
    assert [each.message.split(":")[0] for each in caplog.records] == [
        "the GPUs are not watched",
        "the GPUs are watched again",
    ]


def test_it_ends_at_once_beside_a_program_that_hangs(watching):
    watching.until(Sampled)
    watching.machine.behave("touch hangs; tail -f /dev/null")
    while not (watching.machine.folder / "hangs").exists():
        watching.watch._ended.wait(0.01)
    watching.watch.stop()


async def test_an_agent_offers_them_and_tells_of_them(machine, nats_world, tmp_path):
    bus, url = await nats_world.connect(), nats_world.settings.nats_url
    sampled = asyncio.ensure_future(anext(bus.receive_telemetry(subjects.events(GpusSampled))))
    words = ["--node=n1", f"--run-dir={tmp_path / 'run'}", f"--nats-url={url}", "--leave-s=0"]
    agent = await asyncio.create_subprocess_exec(sys.executable, "-m", "unicron_agent", *words)
    try:
        joined = codec.decode_message((await anext(bus.follow(subjects.events(NodeJoined), 0))).data)
        assert list(joined.slots) == SLOTS
        assert [gpu.temperature_c for gpu in codec.decode_message((await sampled).data).gpus] == [45, 45]
    finally:
        agent.terminate()
        await agent.wait()
