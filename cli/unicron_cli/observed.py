"""What was seen of a running cluster, and what a check makes of it."""

from typing import Literal

from unicron_deploy.production.wanted import Wanted

from unicron.addresses import Address, is_loopback
from unicron.contracts.answers import RunningSettings, Status
from unicron.contracts.base import Record
from unicron.contracts.notices import NotificationsView
from unicron.contracts.pools import PoolsView

State = Literal["ok", "warning", "missing", "fail"]

NAMED = 5
"""Names that a line lists."""


class Check(Record, kw_only=True, frozen=True):
    """One thing that was looked at.

    Attributes:
        state: "missing" keeps a cluster from working, "fail" from being fit for production, a "warning" only some of
            it.
        found: what there is, or what is wrong.
        cure: how to mend it; empty where nothing is wrong.
    """

    name: str
    state: State
    found: str
    cure: str = ""


class ServerSeen(Record, kw_only=True, frozen=True):
    """A NATS server, by its greeting.

    Attributes:
        version: empty where it does not greet.
        tls: whether it takes TLS only.
    """

    address: str
    version: str = ""
    tls: bool = False

    @property
    def is_local(self) -> bool:
        """Whether nothing that is said to it leaves this machine."""
        return is_loopback(Address.of_url(self.address).host)


class StreamSeen(Record, kw_only=True, frozen=True):
    """A stream: on how many servers it is to lie, and on which of them it is not up to date."""

    name: str
    replicas: int
    behind: list[str] = []


class TargetSeen(Record, kw_only=True, frozen=True):
    """A process, as a scrape of its metrics shows it.

    Attributes:
        up: whether it answers.
        service: that it is an instance of; empty for an agent.
        active: whether it is the instance that works.
    """

    address: str
    up: bool
    service: str = ""
    active: bool = False


class FileSeen(Record, kw_only=True, frozen=True):
    """A key or a certificate.

    Attributes:
        mode: of a key, the rights on its file; 0 for a certificate.
        days: that a certificate has left; None for a key.
    """

    path: str
    mode: int = 0
    days: float | None = None


class Observed(Record, kw_only=True, frozen=True):
    """What was seen of a cluster.

    Attributes:
        version: of this program.
        active: by service, whether an instance works.
        targets: what was scraped; None where nobody said whom to scrape.
        files: of keys and certificates that lie here; None where no folder of them is known.
        ahead: of this machine's clock, by node, in seconds.
        storages: by address, why it can't be read from here; empty where it can.
        agents: by node that is up, with what its agent runs; None where it did not say.
        wanted: with what agents are to run; None where nobody said.
        status, notifications, pools: as services answered; None where they did not.
    """

    version: str
    servers: list[ServerSeen] = []
    streams: list[StreamSeen] = []
    active: dict[str, bool] = {}
    targets: list[TargetSeen] | None = None
    files: list[FileSeen] | None = None
    ahead: dict[str, float] = {}
    storages: dict[str, str] = {}
    agents: dict[str, RunningSettings | None] = {}
    wanted: Wanted | None = None
    status: Status | None = None
    notifications: NotificationsView | None = None
    pools: PoolsView | None = None


def listed(names: list[str]) -> str:
    """Return some of these names, and how many more there are."""
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
