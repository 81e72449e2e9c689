"""Looks at a running cluster, for `unicron doctor --cluster`: asks all, changes nothing."""

import asyncio
import contextlib
import json
import re
import time
import urllib.request
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

from unicron_deploy.production.wanted import read

from unicron import __version__
from unicron.bus import topology
from unicron.bus.nats import NatsBus
from unicron.client import Client
from unicron.contracts.answers import RunningSettings, Status
from unicron.contracts.events import NodeHeartbeat
from unicron.contracts.tasks import NodeState
from unicron.errors import CheckpointError, InvalidInputError, UnicronError
from unicron.files import MB, read_text
from unicron.service.bootstrap import connected
from unicron.services import PROVISIONER, SERVICES
from unicron.settings import Settings
from unicron_cli.observed import FileSeen, Observed, ServerSeen, StreamSeen, TargetSeen

T = TypeVar("T")

PORT, GREETING_S = 4222, 2.0
"""Usual port of a NATS server, and how long it may take to greet."""

HEARING_S = 1.2
"""How long nodes are listened to, which beat twice a second."""

SCRAPE_S, STORAGE_S = 3.0, 5.0
"""How long a process may take to answer a scrape, and a storage to be listed."""

AT_ONCE = 64
"""Agents that are asked at the same time."""

DAY_S = 86400.0

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Opens addresses of the cluster: a proxy of the environment is the way out of it."""

_ACTIVE = re.compile(r'^unicron_active\{source="([\w-]+)"\} ([\d.]+)', re.MULTILINE)


async def look(
    settings: Settings, keys: Path, targets: Path | None, setup: Path | None, *, patient: bool = False
) -> Observed:
    """Return what is to be seen of the cluster that `settings` lead to.

    Args:
        settings: address of the bus, and the credentials.
        keys: folder of the cluster's keys; there need not be one.
        targets: file in which Prometheus finds whom to scrape; None where there is none.
        setup: folder that `unicron init` wrote; None where there is none.
        patient: whether to wait for a bus that is not there yet.

    Raises:
        BusUnavailableError: the bus can't be reached.
        InvalidInputError: the file of targets, the set-up, or our key, can't be used.
    """
    wanted = None if setup is None else read(setup)
    scraped = None if targets is None else addresses(targets)
    async with connected(settings, "unicron-doctor", patient=patient) as bus:
        client = Client(bus)
        status = await _answer(client.status())
        active = {name: bool(await _answer(client.active(name))) for name in SERVICES}
        pools = await _answer(client.pools()) if await _answer(client.active(PROVISIONER)) else None
        return Observed(
            version=__version__,
            servers=await asyncio.gather(*map(greeting, settings.nats_servers)),
            streams=await _streams(bus),
            active=active,
            targets=None if scraped is None else await asyncio.gather(*map(scrape, scraped)),
            files=list(files(keys, time.time())) if keys.is_dir() else None,
            ahead=await heard(client),
            storages=await _storages(status) if status else {},
            agents=await _agents(client, status) if status else {},
            wanted=wanted,
            status=status,
            notifications=await _answer(client.notifications()) if active["notifier"] else None,
            pools=pools,
        )


async def _answer(asked: Awaitable[T]) -> T | None:
    try:
        return await asked
    except UnicronError:
        return None


async def greeting(address: str) -> ServerSeen:
    """Return the greeting of a NATS server."""
    url = urlsplit(address if "://" in address else f"nats://{address}")
    shown = f"{url.scheme}://{url.netloc.rpartition('@')[2]}"
    try:
        async with asyncio.timeout(GREETING_S):
            reader, writer = await asyncio.open_connection(url.hostname, url.port or PORT)
            kind, _, said = (await reader.readline()).partition(b" ")
            writer.close()
        info = json.loads(said) if kind == b"INFO" else {}
    except (OSError, ValueError):
        info = {}
    if not isinstance(info, dict):
        info = {}
    return ServerSeen(address=shown, version=str(info.get("version", "")), tls=info.get("tls_required") is True)


async def _agents(client: Client, status: Status) -> dict[str, RunningSettings | None]:
    """Return what the agent of each node that is up runs with; None where it does not say."""
    turns = asyncio.Semaphore(AT_ONCE)

    async def ask(node: str) -> RunningSettings | None:
        async with turns:
            return await _answer(client.settings(node))

    up = [each.node for each in status.nodes if each.state in {NodeState.UP, NodeState.DRAINING}]
    return dict(zip(up, await asyncio.gather(*map(ask, up)), strict=True))


async def _streams(bus: NatsBus) -> list[StreamSeen]:
    found = await asyncio.gather(*(_answer(_stream(bus, str(stream.name))) for stream in topology.streams()))
    return [each for each in found if each is not None]


async def _stream(bus: NatsBus, name: str) -> StreamSeen:
    info = await bus.stream(name)
    peers = (info.cluster.replicas if info.cluster else None) or []
    behind = [str(peer.name) for peer in peers if not peer.current]
    return StreamSeen(name=name, replicas=info.config.num_replicas or 1, behind=behind)


async def heard(client: Client) -> dict[str, float]:
    """Return how far ahead of ours the clocks of nodes are, in seconds, by node."""
    ahead: dict[str, float] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HEARING_S):
            async for beat in client.telemetry(NodeHeartbeat):
                ahead[beat.source] = beat.at - time.time()
    return ahead


def addresses(targets: Path) -> list[str]:
    """Return whom Prometheus scrapes, by a file of `file_sd_configs`.

    Raises:
        InvalidInputError: it is none.
    """
    cure = "give the JSON file of `file_sd_configs` that Prometheus reads"
    try:
        groups = json.loads(read_text(targets, cure, MB))
        found = [address for group in groups for address in group["targets"]]
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidInputError(f"{targets}: not a list of targets: {error!r}; {cure}") from error
    if not all(isinstance(each, str) for each in found):
        raise InvalidInputError(f"{targets}: a target is no address; {cure}")
    return found


async def scrape(address: str) -> TargetSeen:
    """Return the metrics that a process exports."""

    def read() -> str:
        with _DIRECT.open(f"http://{address}/metrics", timeout=SCRAPE_S) as answer:
            return str(answer.read(16 * MB).decode(errors="replace"))

    try:
        text = await asyncio.to_thread(read)
    except (OSError, ValueError):
        return TargetSeen(address=address, up=False)
    matched = _ACTIVE.search(text)
    if matched is None:
        return TargetSeen(address=address, up=True)
    return TargetSeen(address=address, up=True, service=matched[1], active=float(matched[2]) > 0)


def files(keys: Path, now: float) -> Iterator[FileSeen]:
    """Yield the keys and certificates in a folder of keys."""
    from cryptography import x509  # noqa: PLC0415 slow to import

    for path in sorted(keys.rglob("*")):
        with contextlib.suppress(OSError):
            if path.suffix in {".nk", ".key"} or path.name in {"tokens", "routes.conf"}:
                yield FileSeen(path=str(path), mode=path.stat().st_mode & 0o777)
            elif path.suffix == ".pem":
                with contextlib.suppress(ValueError):
                    ends = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
                    yield FileSeen(path=str(path), days=(ends.timestamp() - now) / DAY_S)


async def _storages(status: Status) -> dict[str, str]:
    roots = sorted({view.spec.checkpoints for view in status.tasks if view.spec.checkpoints and not view.state.ended})
    problems = await asyncio.gather(*map(_problem, roots))
    return dict(zip(roots, problems, strict=True))


async def _problem(root: str) -> str:
    """Return why a storage can't be read from here; empty where it can."""
    from unicron.snapshots.storage.root import Storage  # noqa: PLC0415 slow to import

    try:
        async with asyncio.timeout(STORAGE_S):
            await asyncio.to_thread(lambda: Storage(root).entries())
    except TimeoutError:
        return f"no answer within {STORAGE_S:g} s"
    except (CheckpointError, OSError, ImportError) as error:
        return str(error)
    return ""
