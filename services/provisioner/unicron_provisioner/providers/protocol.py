"""The interface of every provider of machines; tests/contract/test_providers.py tests all of them.

A machine is known by an id, which the provisioner makes up before it asks. Whatever is asked for twice under one id is
there once: an answer may get lost, and the provisioner may be started again between a call and its answer.
"""

from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import msgspec

from unicron.contracts.base import MachineReport
from unicron.contracts.ranges import Label, Name, Text
from unicron.errors import UnicronError

__all__ = [
    "ByRelease",
    "MachineReport",
    "MachineRequest",
    "Provider",
    "ProviderError",
    "QuotaError",
    "RefusedError",
    "Surroundings",
]


class Surroundings(NamedTuple):
    """The arguments of a provider besides its options in the file of pools.

    Attributes:
        folder: of that file; relative paths in it begin there.
        cluster: folder of a cluster of this machine, in which its keys are and its machines are kept.
        nats_url: where machines reach the bus, as the provisioner does.
    """

    folder: Path
    cluster: Path
    nats_url: str


class MachineRequest(msgspec.Struct, kw_only=True, frozen=True):
    """A machine that is asked for.

    Attributes:
        machine: its id. Its agent is to be started with UNICRON_MACHINE set to it, and UNICRON_POOL to the pool.
        pool: that it is for.
        slots: workers that it is to take.
        rack: where it is to be, for UNICRON_RACK; empty for anywhere.
        reason: why it is wanted, for a person who looks at what the provider lists.
    """

    machine: Annotated[Name, msgspec.Meta(min_length=1)]
    pool: Name
    slots: int = 1
    rack: Label = ""
    reason: Text = ""


class ProviderError(UnicronError):
    """A call did not come to an end: nobody knows what it has done. The text says why, and the cure."""


class RefusedError(ProviderError):
    """The provider has said no, and has done nothing. The text says why, and the cure."""


class QuotaError(RefusedError):
    """The provider has given all the machines that it may; it can be asked again later."""


class Provider(Protocol):
    """Gives machines of one pool.

    Its shell calls one method at a time, each with a deadline, after which the call is cancelled; what takes long or
    blocks runs in a thread or process of its own. Where a method returns or raises `RefusedError`, its effect is
    certain. Any other error, or none in time, leaves it open, and the same call is made again later.
    """

    async def list(self) -> list[MachineReport]:
        """Return every machine of this pool that is there, is about to be, or has ended and was not released.

        It has all those whose `ask` has returned and whose `release` has not, and no machine that this pool's
        provisioner has not asked for.
        """

    async def ask(self, request: MachineRequest) -> None:
        """Have a machine started under the id in `request`; return once that is certain, not when it has joined.

        Where one of that id is there already, nothing changes.

        Raises:
            QuotaError: it can't have more machines now.
            RefusedError: it will not start this one.
        """

    async def release(self, machine: str, instance: str = "") -> None:
        """End the machine in an orderly way (SIGTERM before SIGKILL), and forget it; return once that is certain.

        Where there is none of that id, nothing changes.

        Args:
            machine: its id.
            instance: which one of several that have this id, as `list` names it; empty for all.

        Raises:
            RefusedError: it can't be ended, and stays.
        """

    async def replace(self, machine: str, request: MachineRequest) -> None:
        """Release a machine that is lost, and ask for another in its place; each as above, each certain on return.

        Raises:
            QuotaError, RefusedError: as `ask` does; the old one is released all the same.
        """


class ByRelease:
    """Replaces by a release before the request: so it needs no more quota than the machine that is lost had."""

    async def replace(self: Provider, machine: str, request: MachineRequest) -> None:
        """Release one machine, then ask for the other."""
        try:
            await self.release(machine)
        except RefusedError as error:  # where `replace` is refused, the old one is released all the same
            raise ProviderError(str(error)) from error
        await self.ask(request)
