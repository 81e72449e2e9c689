"""How the parts of a cluster are, by what gets through them: the journal, and each control service."""

import asyncio

from unicron import codec, subjects
from unicron.bus.protocol import Bus
from unicron.contracts.answers import Health, PartHealth, Reply
from unicron.contracts.queries import GetHealth
from unicron.errors import BusUnavailableError, NobodyAnswersError, UnicronError
from unicron.services import SERVICES

ASK_S = 2.5
"""How long a service may take to show that facts get through it."""

JOURNAL = "journal"
"""As the name of a part."""

STORES_NOTHING = "the journal takes no facts"
"""How the problem of a service begins that is the journal's."""

OF_JOURNAL = (
    "see to the disk of nats-server: is it full, read-only, slow? Its log says more; of several servers more than half "
    "must run"
)
OF_SERVICE = "its process is stopped, or hangs: end it, and start it again; its log may say why"
OF_SERVER = "start it again, or mend the way to it: another one lost may end healing"
SILENT_SERVER = "the other servers do not hear it; they go on without"
NONE_ACTIVE = "no instance of it is active: it has ended, is stopped, or hangs"
START = "start it: python -m unicron_{name}; where it runs, its log says what it lacks"
BEHIND = "it is behind, or hangs: see its log; end it, and start it again"


async def examine(bus: Bus) -> list[PartHealth]:
    """Return how the journal and each service are, and which server is lost, within seconds whatever is wrong."""
    services = asyncio.gather(*(_service(bus, name) for name in SERVICES))
    journal, lost, found = await asyncio.gather(_journal(bus), _lost_servers(bus), services)
    storing = [each.problem for each in found if each.problem.startswith(STORES_NOTHING)]
    if storing and not journal.problem:
        journal = PartHealth(name=JOURNAL, problem=storing[0].removeprefix("the journal "), cure=OF_JOURNAL)
    if journal.problem:  # what services lack then is the journal, but for those that do not even answer
        found = [each for each in found if each.cure == OF_SERVICE or not each.problem]
    return [journal, *found, *lost]


async def _lost_servers(bus: Bus) -> list[PartHealth]:
    try:
        async with asyncio.timeout(ASK_S):
            silent = await bus.silent_servers()
    except (UnicronError, TimeoutError):  # as the journal's problem says
        return []
    return [PartHealth(name=name, problem=SILENT_SERVER, cure=OF_SERVER) for name in silent]


async def _journal(bus: Bus) -> PartHealth:
    try:
        async with asyncio.timeout(ASK_S):
            await bus.tail()
    except (UnicronError, TimeoutError) as error:
        return PartHealth(name=JOURNAL, problem=f"is not there: {error or 'no answer'}", cure=OF_JOURNAL)
    return PartHealth(name=JOURNAL)


async def _service(bus: Bus, name: str) -> PartHealth:
    try:
        async with asyncio.timeout(ASK_S):
            found = await _ask(bus, name)
    except NobodyAnswersError:
        return PartHealth(name=name, problem=NONE_ACTIVE, cure=START.format(name=name))
    except (BusUnavailableError, TimeoutError):
        return PartHealth(name=name, problem=f"does not answer within {ASK_S:g} s", cure=OF_SERVICE)
    if found is None:
        return PartHealth(
            name=name, problem="is of an older version, and can't show what gets through", cure="upgrade it"
        )
    cure = BEHIND if found.problem else ""
    return PartHealth(name=name, seconds=found.seconds, at=found.at, problem=found.problem, cure=cure)


async def _ask(bus: Bus, name: str) -> Health | None:
    """Return what a service says, or, where no instance is active, one that is not; None where it knows no such query.

    Raises:
        BusUnavailableError: nobody answers.
    """
    query = codec.encode(GetHealth())
    try:
        data = await bus.ask(subjects.rpc(name), query, ASK_S)
    except NobodyAnswersError:
        data = await bus.ask(subjects.standby(name), query, ASK_S)
    return codec.decode(data, Reply).health


def sentence(part: PartHealth) -> str:
    """Return what is wrong with a part, and the cure, in one line; empty where nothing is."""
    return f"{part.name}: {part.problem}; {part.cure}" if part.problem else ""
