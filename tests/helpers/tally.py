"""A tiny core that counts, and the service around it as a process of its own."""

import sys
from typing import ClassVar

import msgspec

from unicron import subjects
from unicron.contracts.answers import Reply
from unicron.contracts.base import (
    BusReconnected,
    CancelTimer,
    ConnectionLost,
    Message,
    SetTimer,
    TelemetryDropped,
    TimerFired,
)
from unicron.contracts.events import (
    Alert,
    AttemptFailed,
    DeadLetter,
    FailureDetected,
    NodeHeartbeat,
    NodeJoined,
    NodeLeft,
    TaskSubmitted,
    WorkerExited,
)
from unicron.contracts.queries import GetStatus, Query, SubmitTask
from unicron.contracts.ranges import Moment
from unicron.service.core import Core, Handlers
from unicron.service.runner import run_service
from unicron.service.service import Wiring
from unicron.settings import Settings

NAME = "tally"


class State(msgspec.Struct):
    """The counts, and when a node left last."""

    exits: int = 0
    beats: int = 0
    left_at: Moment = 0.0


class Tally(Core):
    """Answers each exit with a failure that carries the count; sets timers when nodes leave."""

    def __init__(self, state: State | None) -> None:
        self.state = state or State()
        self.seen: list[Message] = []

    def handle(self, message: Message) -> list[Message]:  # noqa: C901, PLR0911
        self.seen.append(message)
        match message:
            case WorkerExited(worker=worker, task=task, stderr=lines):
                self.state.exits += 1
                if worker == "poison":
                    raise ValueError("this one can't be handled")
                if worker == "misnamed":
                    return [AttemptFailed(task="no.such.token", action="", reason="")]
                text = " ".join(lines)
                return [
                    FailureDetected(
                        severity=2, method="m", status="s", task=task, attempt=self.state.exits, reason=text
                    )
                ]
            case NodeLeft(node=node, incarnation=after_s):
                self.state.left_at = message.at
                return [SetTimer(name=node, after_s=float(after_s))]
            case NodeJoined(node=node):
                return [CancelTimer(name=node)]
            case TimerFired(name=name):
                if name == "poison":
                    raise ValueError("this timer can't be handled")
                return [AttemptFailed(task="t", node=name, action="timer", reason="")]
            case NodeHeartbeat(node=node, incarnation=after_s):
                self.state.beats += 1
                if node == "disarmed":
                    return [CancelTimer(name="armed")]
                return [SetTimer(name=node, after_s=float(after_s))] if node == "armed" else []
            case DeadLetter():
                raise ValueError("nor can dead letters be handled")
            case BusReconnected() | ConnectionLost() | TelemetryDropped():
                return [Alert(text=type(message).__name__)]
        return []

    def answer(self, query: Query) -> tuple[Reply, list[Message]]:
        match query:
            case GetStatus():
                return Reply(text=f"{self.state.exits} {self.state.beats}"), []
            case SubmitTask(spec=spec):
                return Reply(text="submitted"), [TaskSubmitted(task=spec.name, spec=spec)]
        self.state.exits += 1000
        raise RuntimeError("no answer to that")


class Mute(Core):
    """Answers nothing."""

    handlers: Handlers = {}

    def __init__(self, state: State | None) -> None:
        self.state = state or State()


class TallySettings(Settings, kw_only=True, frozen=True):
    """A service of the tests."""

    process: ClassVar[str] = NAME


def translate(subject: str, data: bytes) -> Message | None:
    """Take 'elsewhere.node' for a lost connection."""
    node = data.decode()
    return ConnectionLost(node=node, boot="") if node else None


def wiring(**changes) -> Wiring:
    fields = {
        "name": NAME,
        "core": Tally,
        "state": State,
        "facts": subjects.events(WorkerExited, NodeLeft, NodeJoined),
        "telemetry": [*subjects.events(NodeHeartbeat), "elsewhere.>"],
        "translate": translate,
    }
    return Wiring(**{**fields, **changes})


if __name__ == "__main__":
    sys.exit(run_service(TallySettings, lambda _: wiring()))
