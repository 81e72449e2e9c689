"""Wires the enroller up."""

from pathlib import Path
from typing import ClassVar

from unicron.bus import nats
from unicron.errors import InvalidInputError
from unicron.service.runner import run_process
from unicron.settings import PREFIX, Settings
from unicron_deploy.enrolment.enroller import Enroller
from unicron_deploy.keys import Keyring


class EnrollerSettings(Settings, kw_only=True, frozen=True):
    """The enroller.

    Attributes:
        keys: folder of the cluster's keys, in whose `server/accounts.conf` the NATS servers look who is let in.
    """

    process: ClassVar[str] = "enroller"

    keys: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.keys and Keyring(Path(self.keys)).accounts.is_file()):
            raise InvalidInputError(
                f"{PREFIX}KEYS {self.keys!r}: no cluster's keys there; give the folder that `unicron_deploy.keys` made"
            )


async def _run(settings: EnrollerSettings) -> None:
    bus = await nats.connect(settings, EnrollerSettings.process)
    try:
        await Enroller(bus, Keyring(Path(settings.keys))).run()
    finally:
        await bus.close()


def main() -> int:
    """Let nodes in until told to stop; return the exit status."""
    return run_process(EnrollerSettings, _run)
