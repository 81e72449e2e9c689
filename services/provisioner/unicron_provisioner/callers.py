"""Asks providers what the core has decided, beside it: one caller for each pool, so that none waits for another.

What is to be asked stands in the core's state, and a caller sees it once that is committed. If the service ends between
a provider's answer and the commit of it, the next instance asks the same again, under the same id.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from unicron.contracts.base import Answer, MachinesListed, Message, ProviderAnswered
from unicron.contracts.pools import Errand, Verb
from unicron.contracts.queries import GetPools
from unicron.service.intake import Input
from unicron.service.service import Service
from unicron_provisioner.config import Supply
from unicron_provisioner.providers.protocol import (
    MachineReport,
    MachineRequest,
    ProviderError,
    QuotaError,
    RefusedError,
)

log = logging.getLogger(__name__)

HEARD_S = 10.0
"""Seconds after which a report is repeated that the core seems not to have got."""

ROOM_S = 0.1
"""Pause before a report is repeated for which the core had no room."""

OWN = "provisioner"
"""Source of the reports to the core."""


class Callers:
    """All callers of a service.

    Args:
        supplies: the sources of each pool's machines.
        service: whose core decides.
    """

    def __init__(self, supplies: Mapping[str, Supply], service: Service) -> None:
        self._service = service
        self._callers = {name: _Caller(supply, service) for name, supply in supplies.items()}
        self._observed = service.observe
        service.observe = self._observe

    async def run(self) -> None:
        """Ask until cancelled."""
        await asyncio.gather(*(caller.run() for caller in self._callers.values()))

    def _observe(self, item: Input) -> None:
        self._observed(item)
        reply = self._service.peek(GetPools())
        errands = {errand.pool: errand for errand in reply.pools.errands} if reply and reply.pools else {}
        for name, caller in self._callers.items():
            caller.see(errands.get(name))


class _Caller:
    """Asks one provider, one thing after another."""

    def __init__(self, supply: Supply, service: Service) -> None:
        self._supply, self._service = supply, service
        self._errand: Errand | None = None
        self._news = asyncio.Event()

    def see(self, errand: Errand | None) -> None:
        """Take note of what is to be asked now."""
        if errand != self._errand:
            self._errand = errand
            self._news.set()

    async def run(self) -> None:
        while True:
            errand = self._errand
            if errand is None or not self._service.token:
                self._news.clear()
                await self._news.wait()
                continue
            await self._report(errand, await self._carry_out(errand))

    async def _carry_out(self, errand: Errand) -> Message:
        """Ask the provider; return what became of it, whatever that is."""
        answer, reason, found = Answer.UNKNOWN, "", list[MachineReport]()
        try:
            async with asyncio.timeout(self._supply.deadline_s):
                if errand.verb is Verb.LIST:
                    found = checked(await self._supply.provider.list())
                else:
                    await self._call(errand)
            answer = Answer.DONE
        except QuotaError as error:
            answer, reason = Answer.QUOTA, str(error)
        except RefusedError as error:
            answer, reason = Answer.REFUSED, str(error)
        except ProviderError as error:
            reason = str(error)
        except TimeoutError:
            reason = (
                f"{errand.verb} had no answer within {self._supply.deadline_s:g} s: see whether the provider is up, or "
                "raise deadline_s"
            )
        except Exception as error:
            log.exception("pool %s: %s has failed", errand.pool, errand.verb)
            reason = f"{errand.verb} has failed by {type(error).__name__}: {error}; see the log of the provisioner"
        if errand.verb is Verb.LIST:
            return MachinesListed(pool=errand.pool, errand=errand.number, machines=found, problem=reason, source=OWN)
        return ProviderAnswered(pool=errand.pool, errand=errand.number, answer=answer, reason=reason, source=OWN)

    async def _call(self, errand: Errand) -> None:
        provider = self._supply.provider
        request = MachineRequest(
            machine=errand.machine,
            pool=errand.pool,
            slots=self._supply.pool.slots,
            rack=errand.rack,
            reason=errand.reason,
        )
        calls: dict[Verb, Callable[[], Coroutine[Any, Any, None]]] = {
            Verb.ASK: lambda: provider.ask(request),
            Verb.REPLACE: lambda: provider.replace(errand.replaces, request),
            Verb.RELEASE: lambda: provider.release(errand.machine, errand.instance),
        }
        await calls[errand.verb]()

    async def _report(self, errand: Errand, outcome: Message) -> None:
        """Report to the core, and wait until it has processed that."""
        while self._service.token and not self._service.queue_input(outcome):
            await asyncio.sleep(ROOM_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEARD_S):
                while self._errand == errand and self._service.token:
                    self._news.clear()
                    await self._news.wait()


def checked(found: Any) -> list[MachineReport]:
    """Return what a provider lists, if it is what the protocol says.

    Raises:
        ProviderError: it is not; names the field.
    """
    try:
        return msgspec.convert(msgspec.to_builtins(found), list[MachineReport])
    except (msgspec.ValidationError, TypeError) as error:
        raise ProviderError(f"list has answered what is no list of machines: {error}; mend the provider") from error
