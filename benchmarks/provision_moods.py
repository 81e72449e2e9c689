"""A program that gives machines to a pool of `benchmarks.provision`: agents on this machine, and moods.

    python -m benchmarks.provision_moods FOLDER VERB

It speaks as docs/howto/pools.md says. FOLDER/mood says how it behaves, empty for well; each call goes to
FOLDER/calls.jsonl. Agents are those of the provider `local`, whose methods do the work.

- refuses, out_of_quota: it exits with 77 or 75 and has done nothing.
- away: it exits with 1, whatever it is asked.
- hangs_before, hangs_after: it sleeps instead of asking for the machine, or does that and sleeps then.
- late: the agent is started `LATE_S` seconds later, whatever is asked meanwhile.
- twice: a second agent is started under the same id, as another node.
"""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
from unicron_provisioner.providers import local
from unicron_provisioner.providers.local import LocalProvider, Record
from unicron_provisioner.providers.names import free_name
from unicron_provisioner.providers.protocol import MachineReport, MachineRequest, Surroundings

from unicron.contracts.pools import Pool

POOL, TWIN = "bench", "twin"
MOODS = {
    "refuses": "it says no for 5 s",
    "out_of_quota": "it is out of quota for 5 s",
    "away": "for 5 s it fails, whatever it is asked",
    "hangs_before": "for 5 s it never answers, and does nothing",
    "hangs_after": "for 5 s it never answers, and gives the machine",
    "late": "the machine comes when it was given up",
    "twice": "two machines come under one id",
}
"""Moods, and what they are."""

EXITS = {"refuses": 77, "out_of_quota": 75}
LATE_S = 12.0


class Giver(LocalProvider):
    """Agents on this machine, of which one may be there twice.

    Args:
        folder: of this benchmark's pool.
    """

    def __init__(self, folder: Path) -> None:
        pool = Pool(name=POOL, provider="local", max=1)
        url = (folder / "url").read_text()
        usual = local.make(pool, local.Options(env={"UNICRON_CHAOS": "true"}), Surroundings(folder, folder, url))
        vars(self).update(vars(usual))

    def start(self, request: MachineRequest, node: str) -> None:
        """Start an agent for a machine, whether or not it has one."""
        record = Record(machine=request.machine, node=node)
        self._write(record)
        record.pid, record.ticks = self._start(record, request)
        self._write(record)

    def name(self, pool: str) -> str:
        """Return the name of a node that no machine of a pool has."""
        return free_name(self._keys, pool, [each.node for each in self._records()])

    def promise(self, machine: str) -> str:
        """Note that a machine is to come; return the name of its node."""
        record = Record(machine=machine, node=self.name(POOL))
        self._write(record)
        return record.node


class Twins(Giver):
    """Second agents, in a folder of their own and under names of their own."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder / "twins"


def end_twins(folder: Path) -> None:
    """End the second agents, which no cluster knows of."""
    for path in folder.glob("twins/*/machine.json"):
        msgspec.json.decode(path.read_bytes(), type=Record).process.kill_session()


class Program:
    """The actions of one run of the program.

    Args:
        folder: of this benchmark's pool.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._giver, self._twins = folder, Giver(folder), Twins(folder)
        self._mood = (folder / "mood").read_text().strip()

    async def run(self, verb: str, given: dict[str, Any]) -> int:
        """Carry a call out; return the exit status."""
        with (self._folder / "calls.jsonl").open("a") as file:
            machine = given.get("machine", "")
            file.write(json.dumps({"at": time.time(), "verb": verb, "machine": machine, "mood": self._mood}) + "\n")
        if self._mood == "away":
            return 1
        if verb == "list":
            sys.stdout.write(msgspec.json.encode({"machines": await self._list()}).decode())
        elif verb == "ask":
            return await self._ask(msgspec.convert(given, MachineRequest))
        elif verb == "release":
            await self._release(given["machine"], given["instance"])
        return 0

    async def _list(self) -> list[MachineReport]:
        return [*await self._giver.list(), *await self._twins.list()]

    async def _ask(self, request: MachineRequest) -> int:
        if self._mood in EXITS:
            sys.stderr.write(f"its mood is {self._mood}\n")
            return EXITS[self._mood]
        there = {each.machine for each in await self._giver.list()}
        if request.machine not in there and self._mood == "late":
            start_late(self._folder, request, self._giver.promise(request.machine))
        elif self._mood != "hangs_before":
            await self._giver.ask(request)
        if request.machine not in there and self._mood == "twice":
            self._twins.start(request, self._twins.name(TWIN))
        if self._mood.startswith("hangs"):
            await asyncio.sleep(1000)
        return 0

    async def _release(self, machine: str, instance: str) -> None:
        for one in (self._giver, self._twins):
            if any(each.machine == machine and instance in {"", each.instance} for each in await one.list()):
                await one.release(machine)


def start_late(folder: Path, request: MachineRequest, node: str) -> None:
    """Have a process of its own start an agent late."""
    words = [sys.executable, "-m", "benchmarks.provision_moods", str(folder), "late", node]
    with (folder / "late.log").open("ab") as log:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)
    if process.stdin:
        process.stdin.write(msgspec.json.encode(request))
        process.stdin.close()


def late(folder: Path, node: str) -> None:
    """Start an agent late, whatever was asked meanwhile."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=MachineRequest)
    time.sleep(LATE_S)
    Giver(folder).start(request, node)


def main() -> int:
    """Do what the command line says; return the exit status."""
    folder, verb, *more = Path(sys.argv[1]), *sys.argv[2:]
    if verb == "late":
        late(folder, *more)
        return 0
    return asyncio.run(Program(folder).run(verb, json.load(sys.stdin)))


if __name__ == "__main__":
    sys.exit(main())
