"""An agent on a machine with eight GPUs, which are a stand-in below pynvml."""

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.waiting import PATIENT_S

from unicron import codec, subjects
from unicron.contracts.events import FailureDetected, NodeAdmitted, NodeJoined
from unicron.contracts.hardware import FaultLogged, GpusSampled

SOURCE = Path(__file__).parents[2] / "helpers" / "nvml.c"

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler, for a libnvidia-ml.so.1")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nvml")
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(folder / "libnvidia-ml.so.1"), str(SOURCE)]
    subprocess.run(command, check=True)
    return folder


class Gpus:
    """The GPUs of a machine, to which something happens."""

    def __init__(self, folder, library):
        self._commands = folder / "commands"
        self._commands.touch()
        self.environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "NVML_COMMANDS": str(self._commands)}

    def happen(self, command):
        with self._commands.open("a") as file:
            file.write(f"{command}\n")


class Machine(Gpus):
    """A node with GPUs: its agent, and what it tells."""

    def __init__(self, bus, url, folder, library):
        super().__init__(folder, library)
        self.bus, self.kernel_log = bus, folder / "kern.log"
        self.kernel_log.touch()
        options = {"node": "n1", "run-dir": folder / "run", "nats-url": url, "kernel-log": self.kernel_log}
        self._words = [f"--{name}={value}" for name, value in {**options, "leave-s": 0}.items()]

    async def start(self):
        command = [sys.executable, "-m", "unicron_agent", *self._words]
        self.agent = await asyncio.create_subprocess_exec(*command, env=self.environment)

    async def stop(self):
        with contextlib.suppress(ProcessLookupError):
            self.agent.terminate()
        await self.agent.wait()

    async def next_of(self, kind, after=0):
        entry = await anext(self.bus.follow(subjects.events(kind), after))
        return codec.decode_message(entry.data), entry.sequence


@pytest.fixture
async def machine(nats_world, library, tmp_path):
    bus = await nats_world.connect()
    found = Machine(bus, nats_world.settings.nats_url, tmp_path, library)
    found.sampled = asyncio.ensure_future(anext(bus.hear(subjects.events(GpusSampled))))  # the first is unlike others
    await found.start()
    yield found
    found.sampled.cancel()
    await found.stop()


async def test_events_of_gpus_and_lines_of_the_kernel_are_told(machine):
    joined, at = await machine.next_of(NodeJoined)
    assert [slot.kind for slot in joined.slots] == ["gpu"] * 8
    told = []
    for command in ("xid 2 63", "xid 2 79", "dbe 3", "dbe 7", "xid 5 94", "unload", "xid 1 48", "lost 4"):
        machine.happen(command)  # 63 says nothing; GPU 7 tells of no memory errors; the driver comes back
    while len(told) < 4:
        fault, at = await machine.next_of(FaultLogged, at)
        told.append((fault.slot, fault.text))
    assert [slot for slot, _ in told] == [2, 3, 5, 1]
    assert "Xid (PCI:0000:3b:00): 79" in told[0][1]
    machine.kernel_log.write_text("a line\nNVRM: Xid (PCI:0000:2b:00): 31, pid=17, name=python\n")
    found = {}
    while len(found) < 2:
        fault, at = await machine.next_of(FaultLogged, at)
        found[fault.slot] = fault.text
    assert found[4] == "NVML: GPU 4 is lost"
    assert found[1].startswith("NVRM: Xid")
    assert machine.agent.returncode is None


async def test_a_sick_node_is_given_up_and_stays_so(machine, nats_world):
    url = nats_world.settings.nats_url
    services = [
        await asyncio.create_subprocess_exec(sys.executable, "-m", f"unicron_{name}", "--nats-url", url, *more)
        for name, more in (("registry", ()), ("detector", ("--heartbeat-timeout-s", str(PATIENT_S))))
    ]
    try:
        _, at = await machine.next_of(NodeAdmitted)
        machine.kernel_log.write_text("NVRM: Xid (PCI:0000:2b:00): 79, GPU has fallen off the bus.\n")
        failure, at = await machine.next_of(FailureDetected, at)
        assert (failure.severity, failure.method, failure.status) == (1, "device_health", "gpu_driver_error")
        assert (failure.node, failure.slot) == ("n1", 1)
        assert "79, GPU has fallen off the bus" in failure.reason
        with machine.kernel_log.open("a") as log:
            log.write("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n")
        following = machine.bus.follow(subjects.events(NodeJoined, FaultLogged), at)
        later = codec.decode_message((await anext(following)).data)
        assert (type(later), later.slot) == (FaultLogged, 2), "its agent goes on, and does not join again"
    finally:
        for service in services:
            service.kill()
            await service.wait()


async def test_counters_come_in_one_message_a_node(machine):
    await machine.next_of(NodeJoined)
    sampled = codec.decode_message((await machine.sampled).data)
    assert [gpu.slot for gpu in sampled.gpus] == list(range(8))
    gpu = sampled.gpus[3]
    assert (gpu.temperature_c, gpu.power_w, gpu.memory_used) == (43, 350.5, 20 << 30)
    assert (gpu.ecc_corrected, gpu.ecc_uncorrected, gpu.throttled) == (7, 1, 4)
    assert (gpu.rows_remapped, gpu.remap_pending, gpu.remap_failed) == (2, True, False)
    assert gpu.pcie_replays is None, "this one does not tell"
    assert (gpu.pages_retired_single, gpu.pages_retired_double, gpu.clock_changes) == (3, 4, 0)
    assert (gpu.nvlink_replays, gpu.nvlink_recoveries, gpu.nvlink_crc, gpu.nvlink_grew) == (0, None, 10, None)
    assert (sampled.gpus[6].pages_retired_single, sampled.gpus[6].nvlink_crc) == (None, 10), "each field by itself"
    assert (sampled.gpus[7].clock_changes, sampled.gpus[7].nvlink_crc) == (None, None)


WATCH = """
import logging, sys
from unicron_agent.hardware import gpus
from unicron.rules import load
logging.basicConfig(format="log %(message)s", stream=sys.stdout)
gpus.SAMPLE_S = gpus.RETRY_S = 0.02
watch = gpus.GpuWatch(load(), lambda told: print(told, flush=True))
watch.start()
sys.stdin.read()
watch.stop()
"""


class Watching(Gpus):
    """The watch alone, which samples fifty times a second."""

    async def start(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "limit": 1 << 20}
        command = [sys.executable, "-c", WATCH]
        self.process = await asyncio.create_subprocess_exec(*command, env=self.environment, **pipes)

    async def until(self, words):
        """Return the next line that has all these words."""
        while True:
            line = (await self.process.stdout.readline()).decode()
            assert line, "it has ended"
            if all(word in line for word in words):
                return line


@pytest.fixture
async def watching(library, tmp_path):
    watching = Watching(tmp_path, library)
    await watching.start()
    yield watching
    watching.process.stdin.close()
    assert await watching.process.wait() == 0


async def test_errors_of_links_that_grow_are_told_and_counters_that_begin_anew_do_not(watching):
    await watching.until(["Sampled"])
    watching.happen("links 2 5")
    line = await watching.until(["nvlink_replays=5"])
    assert [gpu.partition(",")[0] for gpu in line.split("slot=") if "nvlink_grew=True" in gpu] == ["2"]
    assert "nvlink_grew=True" not in await watching.until(["Sampled"])
    watching.happen("links 2 1")
    assert "nvlink_grew=True" not in await watching.until(["nvlink_replays=1"])


async def test_clock_changes_are_counted_only(watching):
    for _ in range(3):
        watching.happen("clock 1")
    watching.happen("clock 7")
    line = await watching.until(["clock_changes=3"])
    assert line.count("clock_changes=None") == 1, "of the one that does not tell"


@pytest.mark.parametrize("code", [1, 9, 999])
async def test_nvml_that_fails_in_between_is_said_once_and_watched_again(watching, code):
    """Uninitialized, driver not loaded, unknown error."""
    await watching.until(["Sampled"])
    watching.happen(f"fail {code}")
    await watching.until(["log NVML does not answer"])
    for command in ("still", "still", "still", "mend"):  # each attempt to begin anew takes one
        watching.happen(command)
    assert "answers again" in await watching.until(["log NVML"]), "it is said once"
    watching.happen("xid 3 79")
    assert "slot=3" in await watching.until(["Logged", "79"])
