"""Wires the provisioner up: settings, core, and the callers beside it."""

from functools import cache, partial
from typing import ClassVar

from msgspec.structs import replace

from unicron import subjects
from unicron.bus.protocol import Bus
from unicron.service.runner import run_service
from unicron.service.service import Service, Wiring
from unicron.settings import Settings
from unicron_provisioner.callers import Callers
from unicron_provisioner.config import Supply, load
from unicron_provisioner.core import ProvisionerCore
from unicron_provisioner.state import State


class ProvisionerSettings(Settings, kw_only=True, frozen=True):
    """The provisioner: which machines come and go.

    Attributes:
        pools: TOML file of pools ([how](../howto/pools.md)). Empty: there are none.
        pool_dir: folder of a cluster of this machine, such as .unicron, with the keys and machines of `local` pools.
            Empty: the folder of the file of pools.
        observe_only: whether all pools only say what they would do, as by their own `observe`.
    """

    process: ClassVar[str] = "provisioner"

    pools: str = ""
    pool_dir: str = ""
    observe_only: bool = False


configured = cache(load)
"""Reads a file once: core and callers go by the same, whatever becomes of it meanwhile."""


def supplies(settings: ProvisionerSettings) -> dict[str, Supply]:
    """Return the pools, with the providers of their machines."""
    return configured(settings.pools, settings.nats_url, settings.pool_dir)


def wiring(settings: ProvisionerSettings) -> Wiring:
    """Return what the provisioner is made of."""
    pools = [supply.pool for supply in supplies(settings).values()]
    if settings.observe_only:
        pools = [replace(pool, observe=True) for pool in pools]
    core = partial(ProvisionerCore, pools=pools)
    facts, telemetry = subjects.listened(core(None).handlers)
    return Wiring(name=settings.process, core=core, state=State, facts=facts, telemetry=telemetry)


async def call(settings: ProvisionerSettings, _: Bus, service: Service) -> None:
    """Ask providers for what the core decides."""
    await Callers(supplies(settings), service).run()


def main() -> int:
    """Run the provisioner until it is stopped; return the exit status."""
    return run_service(ProvisionerSettings, wiring, beside=call)
