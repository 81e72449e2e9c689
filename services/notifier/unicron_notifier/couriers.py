"""Performs what the core has decided, beside it: one courier for each channel, so that none waits for another.

What is to be delivered stands in the core's state, and a courier sees it once that is committed. When a notice has been
delivered, or given up, it reports that to the core, which commits it in turn. If the service ends between a receiver's
answer and that commit, the next instance delivers the notice again, under the same id: nothing is lost, and receivers
can tell by the id.
"""

import asyncio
import contextlib
import logging
from collections import OrderedDict

from unicron.bus.protocol import Bus
from unicron.clock import Clock
from unicron.contracts.base import Delivered, GivenUp, Message, Probed, Started
from unicron.contracts.notices import Notice
from unicron.contracts.queries import GetNotifications
from unicron.errors import UnicronError
from unicron.service.intake import Input
from unicron.service.service import Service
from unicron_notifier.channels import Heartbeat, Secrets
from unicron_notifier.config import Config, Reached
from unicron_notifier.incidents import OWN
from unicron_notifier.senders import DeliveryError, beat, deliver

log = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Between two attempts: it doubles from one to the other."""

REMEMBERED = 1000
"""Notices of which the end is known here, should the core not have heard of it."""

HEARD_S = 10.0
"""Seconds after which a report is repeated that the core seems not to have got."""

ROOM_S = 0.1
"""Pause before a report is repeated for which the core had no room."""


class Couriers:
    """All couriers of a service.

    Args:
        config: the channels.
        bus: asked whether it answers.
        clock: what the time is.
        service: whose core decides.
    """

    def __init__(self, config: Config, bus: Bus, clock: Clock, service: Service) -> None:
        self._config, self._bus, self._clock, self._service = config, bus, clock, service
        self._couriers = {name: _Courier(reached, clock, service) for name, reached in config.channels.items()}
        self._probed = asyncio.Event()
        self._observed = service.observe
        service.observe = self._observe

    async def run(self) -> None:
        """Deliver until cancelled."""
        jobs = [courier.run() for courier in self._couriers.values()]
        await asyncio.gather(*jobs, *([self._beat(*self._config.heartbeat)] if self._config.heartbeat else []))

    def _observe(self, item: Input) -> None:
        self._observed(item)
        if isinstance(item.message, Probed):
            self._probed.set()
        if not (item.said or isinstance(item.message, Started)):
            return
        reply = self._service.peek(GetNotifications())
        found = reply.notifications if reply else None
        for name, courier in self._couriers.items():
            courier.update_pending([each for each in found.pending if each.channel == name] if found else [])

    async def _beat(self, given: Heartbeat, secrets: Secrets) -> None:
        """Call as long as this instance is active, its core takes messages in, and the journal answers."""
        while True:
            try:
                async with asyncio.timeout(given.every_s):
                    self._probed.clear()
                    alive = self._service.token and self._service.queue_input(Probed(source=OWN))
                    if alive:
                        await self._probed.wait()
                        await self._bus.tail()
                        await beat(given, secrets)
            except (TimeoutError, UnicronError) as error:
                log.warning("no heartbeat: %s", error or "the core or the journal did not answer in time")
            await asyncio.sleep(given.every_s)


class _Courier:
    """Delivers what one channel is to say, in order."""

    def __init__(self, reached: Reached, clock: Clock, service: Service) -> None:
        self._given, self._secrets = reached
        self._clock, self._service = clock, service
        self._pending: OrderedDict[str, Notice] = OrderedDict()
        self._done: OrderedDict[str, Message] = OrderedDict()
        self._news = asyncio.Event()
        self._began = clock.now()

    def update_pending(self, pending: list[Notice]) -> None:
        """Take note of all that is to be delivered now."""
        self._pending = OrderedDict((notice.id, notice) for notice in pending)
        self._news.set()

    async def run(self) -> None:
        while True:
            notice = next(iter(self._pending.values()), None)
            if notice is None or not self._service.token:
                self._news.clear()
                await self._news.wait()
                continue
            outcome = self._done.get(notice.id) or await self._outcome(notice)
            if outcome is not None:
                await self._report(notice, outcome)

    async def _outcome(self, notice: Notice) -> Message | None:
        """Return what became of a notice, in the end; None where it is not to be delivered any more."""
        pause_s, attempts = FIRST_PAUSE_S, 0
        while notice.id in self._pending and self._service.token:
            attempts += 1
            try:
                await deliver(notice, self._given, self._secrets)
                return Delivered(
                    id=notice.id, source=OWN, correlation=notice.chain, notice=notice.id, attempts=attempts
                )
            except DeliveryError as error:
                log.warning("%s: attempt %d at %s: %s", notice.channel, attempts, notice.id, error)
                late = self._clock.now() - max(notice.decided, self._began) >= self._given.give_up_s
                if error.final or late:
                    return _given_up(notice, f"{error}{'' if error.final else f', {attempts} times'}")
                wait_s = max(pause_s, error.after_s)
            except Exception as error:
                log.exception("%s: %s can't be delivered", notice.channel, notice.id)
                return _given_up(notice, f"it can't be delivered: {type(error).__name__}")
            await asyncio.sleep(wait_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return None

    async def _report(self, notice: Notice, outcome: Message) -> None:
        """Report to the core, and wait until it has processed that."""
        self._done[notice.id] = outcome
        if len(self._done) > REMEMBERED:
            self._done.popitem(last=False)
        while self._service.token and not self._service.queue_input(outcome):
            await asyncio.sleep(ROOM_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARD_S):
                while notice.id in self._pending and self._service.token:
                    self._news.clear()
                    await self._news.wait()


def _given_up(notice: Notice, reason: str) -> GivenUp:
    return GivenUp(id=notice.id, source=OWN, correlation=notice.chain, notice=notice.id, reason=reason)
