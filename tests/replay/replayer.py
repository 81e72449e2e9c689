"""Replays journals that were recorded on real clusters through today's cores, to see what they would decide.

    python tests/replay/replayer.py accept                      after reading the difference that a test showed
    python tests/replay/replayer.py record nats://HOST:4222 NAME      keep the journal of a running cluster

Each service is replayed for itself: its core is fed the recorded messages that it listens to, those of other services
included, in their order, with timers in the time of the record. So a decision that has changed does not lead to others.
What is in no journal is made up for: heartbeats of the nodes that are there, the end of a connection where a node was
given up for it, and the orders of users where the registry recorded them.

A journal is kept as lines of JSON in NAME.xz, what was decided in NAME.txt: a line for each decision, without what
differs from run to run.
"""

import asyncio
import json
import lzma
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from unicron_simulator.storms.world import wirings

from unicron import codec, subjects
from unicron.contracts.base import CancelTimer, ConnectionLost, Message, SetTimer, Started, TimerFired
from unicron.contracts.events import (
    FailureDetected,
    NodeDrained,
    NodeHeartbeat,
    NodeJoined,
    NodeLeft,
    PlanDecided,
    TaskRemoved,
    TaskSubmitted,
)
from unicron.contracts.queries import DrainNode, Query, RemoveTask, SubmitTask
from unicron.service.bootstrap import connected
from unicron.settings import Settings

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("*.xz"))

GRACE_S = 1.0
"""For so long a node that was given up for its connection had been without it."""

EMPTY: tuple[Any, ...] = ("", [], {})

AFTER_S = 3.0
"""How long after the last message timers still fire."""


def read(name: str) -> list[Message]:
    """Return a recorded journal."""
    lines = lzma.decompress((HERE / f"{name}.xz").read_bytes()).splitlines()
    return [codec.decode_message(bytes.fromhex(json.loads(line)["data"])) for line in lines]


def decisions(journal: list[Message]) -> str:
    """Return what all services decide, a line each."""
    return "".join(f"{line}\n" for name in wirings() for line in Replay(name, journal).run())


class Replay:
    """One core that lives through a journal again."""

    def __init__(self, name: str, journal: list[Message]) -> None:
        self._name = name
        self._wiring = wirings()[name]
        self._core = self._wiring.core(None)
        self._journal = journal
        self._began = journal[0].at
        self._timers: dict[str, tuple[float, Message]] = {}
        self._there: set[str] = set()
        self._said: list[str] = []

    def run(self) -> list[str]:
        """Return what was decided."""
        self._take(self._began, Started(token=1, id="started", at=self._began))
        for at, each in sorted(self._inputs(), key=lambda each: each[0]):
            self._go_on_to(at)
            self._take(at, each)
        self._go_on_to(max(message.at for message in self._journal) + AFTER_S)
        return self._said

    def _inputs(self) -> Iterator[tuple[float, Message | Query]]:
        last, boots = 0.0, dict[str, str]()
        for message in self._journal:
            if isinstance(message, NodeJoined):
                boots[message.node] = message.incarnation.partition(".")[0]
            last = max(last, message.at)  # clocks differ; the journal's order is what counts
            if self._name == "registry" and (query := order(message)):
                yield last, query
            if isinstance(message, FailureDetected) and message.method == "node_health":
                boot = boots.get(message.node, "")
                lost = ConnectionLost(node=message.node, boot=boot, reason="as recorded", id=f"before-{message.id}")
                yield last - GRACE_S, lost
            if self._name == "planner" and isinstance(message, PlanDecided):
                continue  # it would hear what it has yet to decide, and overrule that
            if isinstance(message, NodeJoined) or subjects.matches(self._wiring.facts, subjects.for_message(message)):
                yield last, message

    def _go_on_to(self, at: float) -> None:
        while due := [(when, name) for name, (when, _) in self._timers.items() if when <= at]:
            when, name = min(due)
            _, cause = self._timers.pop(name)
            for node in sorted(self._there) if self._name == "detector" else ():
                self._take(when, NodeHeartbeat(node=node, incarnation="", at=when))
            self._take(when, TimerFired(name=name, at=when, correlation=cause.correlation or cause.id))

    def _take(self, at: float, item: Message | Query) -> None:
        if isinstance(item, Query):
            cause, outcomes = Message(id="order", at=at), self._core.answer(item)[1]
        else:
            cause, outcomes = item, self._core.handle(item)
        match item:
            case NodeJoined(node=node):
                self._there.add(node)
            case NodeLeft(node=node) | ConnectionLost(node=node):
                self._there.discard(node)
        for outcome in outcomes:
            match outcome:
                case SetTimer(name=name, after_s=after_s):
                    self._timers[name] = (at + after_s, cause)
                case CancelTimer(name=name):
                    self._timers.pop(name, None)
                case _:
                    why = f"+{at - self._began:.3f} {self._name}, on {title(item)}"
                    self._said.append(f"{why}: {type(outcome).__name__} {text(outcome)}")


def order(message: Message) -> Query | None:
    """Return the order that must have led the registry to this fact."""
    match message:
        case TaskSubmitted(spec=spec):
            return SubmitTask(spec=spec)
        case TaskRemoved(task=task):
            return RemoveTask(task=task)
        case NodeDrained(node=node, drain=drain):
            return DrainNode(node=node, drain=drain)
    return None


def title(item: Message | Query) -> str:
    """Return in two words what something was."""
    about = [getattr(item, name, "") for name in ("worker", "name", "task", "node")]
    return " ".join([type(item).__name__, *list(filter(None, about))[:1]])


def text(message: Message) -> str:
    """Return what a message says, without what is its sender's or empty."""
    plain = msgspec.to_builtins(message)
    for name in ("type", "id", "at", "source", "correlation"):
        plain.pop(name)
    return json.dumps(_brief(plain), separators=(",", ":"))


def _brief(value: Any) -> Any:
    match value:
        case {"worker": worker, "node": node, "slot": slot, "state_server": _}:
            return f"{worker}@{node}:{slot}"
        case {"node": node, "slot": slot} if len(value) == 2:
            return f"{node}:{slot}"
        case {"name": name, "command": _}:
            return f"{name} #{zlib.crc32(json.dumps(value, sort_keys=True).encode()):08x}"
        case dict():
            short = {key: _brief(each) for key, each in value.items() if each is not None and each is not False}
            return {key: each for key, each in short.items() if each not in EMPTY}
        case list():
            return [_brief(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


async def record(url: str, name: str) -> None:
    """Keep the journal of a running cluster as it is now."""
    lines = []
    async with connected(msgspec.structs.replace(Settings.load([]), nats_url=url), "recorder") as bus:
        last = await bus.tail()
        async for entry in bus.follow(subjects.JOURNAL, 0):
            lines.append(line(codec.decode_message(entry.data)))
            if entry.sequence >= last:
                break
    keep(name, lines)


def line(message: Message) -> bytes:
    """Return a message as a line of a recorded journal."""
    return json.dumps({"type": type(message).__name__, "data": codec.encode(message).hex()}).encode()


def keep(name: str, lines: list[bytes]) -> None:
    """Keep a journal, and what is decided in it today."""
    (HERE / f"{name}.xz").write_bytes(lzma.compress(b"\n".join(lines), preset=9))
    accept(name)


def accept(name: str) -> None:
    """Take what is decided today for right."""
    (HERE / f"{name}.txt").write_text(decisions(read(name)))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["accept"]:
            for each in NAMES:
                accept(each)
        case ["record", where, new]:
            asyncio.run(record(where, new))
        case _:
            sys.exit(__doc__)
