"""Wires the notifier up: settings, core, and the couriers beside it."""

from functools import cache, partial
from typing import ClassVar

from unicron import subjects
from unicron.bus.protocol import Bus
from unicron.clock import SystemClock
from unicron.service.runner import run_service
from unicron.service.service import Service, Wiring
from unicron.settings import Settings
from unicron_notifier.config import load
from unicron_notifier.core import NotifierCore
from unicron_notifier.state import NotifierState


class NotifierSettings(Settings, kw_only=True, frozen=True):
    """The notifier: which channels get which notices, and when.

    Attributes:
        notify: TOML file of rules and channels ([how](../howto/notify.md)). Empty: nobody is told.
    """

    process: ClassVar[str] = "notifier"

    notify: str = ""


configured = cache(load)
"""Reads a file once: core and couriers go by the same, whatever becomes of it meanwhile."""


def wiring(settings: NotifierSettings) -> Wiring:
    """Return what the notifier is made of."""
    core = partial(NotifierCore, routing=configured(settings.notify).routing)
    facts, telemetry = subjects.listened(core(None).handlers)
    return Wiring(
        name=settings.process,
        core=core,
        state=NotifierState,
        facts=facts,
        telemetry=telemetry,
    )


async def carry(settings: NotifierSettings, bus: Bus, service: Service) -> None:
    """Deliver what the core decides, where there is a file."""
    if settings.notify:
        from unicron_notifier.couriers import Couriers  # noqa: PLC0415 most of it is for channels

        await Couriers(configured(settings.notify), bus, SystemClock(), service).run()


def main() -> int:
    """Run the notifier until it is stopped; return the exit status."""
    return run_service(NotifierSettings, wiring, beside=carry)
