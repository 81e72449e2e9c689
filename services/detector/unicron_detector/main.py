"""Wires the detector up: settings, core, what it listens to, and the statistics beside it."""

import json
from datetime import datetime
from functools import partial
from typing import ClassVar

from unicron import fabric_proofs, subjects
from unicron.bus import topology
from unicron.bus.protocol import Bus
from unicron.clock import SystemClock
from unicron.contracts.base import ConnectionLost
from unicron.errors import InvalidInputError
from unicron.rules import load
from unicron.service.runner import run_service
from unicron.service.service import Service, Wiring
from unicron.settings import PREFIX, Settings
from unicron_detector.core import DetectorCore
from unicron_detector.state import DetectorLimits, DetectorState

AGENT = "agent."
"""Prefix of the name of an agent's connection; the node's name follows."""


class DetectorSettings(Settings, kw_only=True, frozen=True):
    """The detector: what has failed, and how badly.

    Attributes:
        grace_s: seconds from a node's lost connection to its loss. An agent that restarts must be back by then.
        heartbeat_timeout_s: seconds of silence after which a node is lost.
        collective_hold_s: seconds that a broken collective waits for the failure that explains it.
        window_s: seconds back in which failures are counted.
        attempts: failures of one kind within the window that keep their severity. One more gets a higher severity.
        no_progress: memberships that fail in the same iteration, one after the other, before the task fails.
        count_all: whether failures that no program caused (signals, machines, networks) count for that too. If not,
            such a task is tried again after longer and longer waits, and does not fail.
        rules: folder of TOML files with rules of your own, tried before Unicron's (docs/howto/machines.md).
    """

    process: ClassVar[str] = "detector"

    grace_s: float = DetectorLimits().grace_s
    heartbeat_timeout_s: float = DetectorLimits().heartbeat_timeout_s
    collective_hold_s: float = DetectorLimits().collective_hold_s
    window_s: float = DetectorLimits().window_s
    attempts: int = DetectorLimits().attempts
    no_progress: int = DetectorLimits().no_progress
    count_all: bool = DetectorLimits().count_all
    rules: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_seconds("grace_s", "heartbeat_timeout_s", "collective_hold_s", "window_s")
        self.check_order(
            "grace_s", "heartbeat_timeout_s", "a node would be given up for its silence before its grace ends"
        )
        self.check_order("heartbeat_timeout_s", "window_s", "failures would be forgotten before the next is found")
        for name in ("attempts", "no_progress"):
            if getattr(self, name) < 1:
                raise InvalidInputError(f"{PREFIX}{name.upper()} {getattr(self, name)}: give 1 or more")

    @property
    def limits(self) -> DetectorLimits:
        """The core's part of the settings."""
        return DetectorLimits(
            grace_s=self.grace_s,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            collective_hold_s=self.collective_hold_s,
            window_s=self.window_s,
            attempts=self.attempts,
            no_progress=self.no_progress,
            count_all=self.count_all,
        )


def translate(subject: str, data: bytes) -> ConnectionLost | None:
    """Turn the server's disconnect advisory into a message, if it is about an agent.

    The advisory is JSON: `{"id", "timestamp", "client": {"name", "user", ...}, "reason", ...}`. A name ends with the
    secret of the agent that had the connection, or it is that of somebody who would like to be that agent.
    """
    if not subjects.matches([topology.DISCONNECTS], subject):
        return None
    try:
        advisory = json.loads(data)
        name, identity = advisory["client"].get("name", ""), advisory["id"]
        at = datetime.fromisoformat(advisory["timestamp"]).timestamp()
        if not name.startswith(AGENT):
            return None
        node, secret = name.removeprefix(AGENT).split(".")
        subjects.token(node, "node")
    except (ValueError, TypeError, KeyError, AttributeError, InvalidInputError):
        return None  # it is of no agent of ours
    return ConnectionLost(
        node=node, boot=fabric_proofs.boot_id(secret), reason=str(advisory.get("reason", "")), id=str(identity), at=at
    )


def wiring(settings: DetectorSettings) -> Wiring:
    """Return what the detector is made of."""
    core = partial(DetectorCore, rules=load(settings.rules), limits=settings.limits)
    facts, telemetry = subjects.listened(core(None).handlers)
    return Wiring(
        name=settings.process,
        core=core,
        state=DetectorState,
        facts=facts,
        telemetry=[*telemetry, topology.DISCONNECTS],
        translate=translate,
    )


async def watch_statistics(_: DetectorSettings, bus: Bus, service: Service) -> None:
    """Run the online statistics beside the core."""
    from unicron_detector.statistics import Statistics  # noqa: PLC0415 faust comes with an extra of its own

    await Statistics(bus, SystemClock(), service).run()


def main() -> int:
    """Run the detector until it is stopped; return the exit status."""
    return run_service(DetectorSettings, wiring, beside=watch_statistics)
