"""The journal and the buckets in one file, as the server itself lays them out: each message keeps its sequence.

JetStream's snapshots (docs of `$JS.API.STREAM.SNAPSHOT` and `.RESTORE`). A stream that is restored must not be there.
The buckets are saved first: what the services have committed is then no newer than the journal.
"""

import asyncio
import contextlib
import hashlib
import json
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats.errors
from nats.aio.msg import Msg

from unicron.bus import topology
from unicron.bus.nats import NatsBus
from unicron.errors import BusUnavailableError, InvalidInputError

CHUNK_BYTES = 128 * 1024
CHUNK_S = 10.0
"""How long the server may take for the next piece."""

MANIFEST = "manifest.json"
STREAMS = [str(stream.name) for stream in reversed(topology.streams())]
SNAPSHOT, RESTORE = "$JS.API.STREAM.SNAPSHOT", "$JS.API.STREAM.RESTORE"


async def backup(bus: NatsBus, path: Path) -> dict[str, int]:
    """Write all streams to a file; return the last sequence of each.

    Raises:
        InvalidInputError: the file is there already, or can't be written.
        BusUnavailableError: the server did not give all.
    """
    scratch = path.with_name(f"{path.name}.part")
    manifest: dict[str, Any] = {}
    try:
        if path.exists():
            raise InvalidInputError(f"{path} is there already: give another name, or remove it")
        with zipfile.ZipFile(scratch, "x", zipfile.ZIP_STORED, allowZip64=True) as file:  # the server compresses it
            for stream in STREAMS:
                head, pieces = await _snapshot(bus, stream)
                digest = hashlib.sha256()
                with file.open(stream, "w", force_zip64=True) as out:
                    async for piece in pieces:
                        digest.update(piece)
                        out.write(piece)
                manifest[stream] = {"config": head["config"], "state": head["state"], "sha256": digest.hexdigest()}
            file.writestr(MANIFEST, json.dumps(manifest))
        verify(scratch)
        scratch.rename(path)
    except OSError as error:
        raise InvalidInputError(f"{path} can't be written: {error.strerror}") from error
    finally:
        scratch.unlink(missing_ok=True)
    return {stream: manifest[stream]["state"]["last_seq"] for stream in STREAMS}


def verify(path: Path) -> dict[str, Any]:
    """Return what a backup holds, after every byte of it was held against its checksum.

    Raises:
        InvalidInputError: it is none, or is damaged.
    """
    try:
        with zipfile.ZipFile(path) as file:
            found = json.loads(file.read(MANIFEST))
            for stream in STREAMS:
                with file.open(stream) as data:
                    digest = hashlib.file_digest(data, "sha256").hexdigest()  # type: ignore[arg-type]
                if digest != found[stream]["sha256"]:
                    raise InvalidInputError(f"{path}: {stream} is damaged: its checksum is another one")
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise InvalidInputError(f"{path} is no backup: {error!r}; give a file that `unicron backup` wrote") from error
    return found  # type: ignore[no-any-return]


async def restore(bus: NatsBus, path: Path, copies: int | None) -> dict[str, int]:
    """Make all streams as they are in a backup; return the last sequence of each.

    Args:
        bus: of servers that have none of them.
        path: of the backup.
        copies: servers that are to keep each.

    Raises:
        InvalidInputError: the file is no whole backup, or a stream is there.
        BusUnavailableError: the server did not take all.
    """
    found = verify(path)
    for stream in STREAMS:
        if await _stream_exists(bus, stream):
            raise InvalidInputError(
                f"stream {stream} is there: what it holds would be lost. Restore to servers that never had it, such as "
                "those of a cluster that was just set up, before its services are started"
            )
    done = {}
    with zipfile.ZipFile(path) as file:
        for stream in STREAMS:
            config = {**found[stream]["config"], "num_replicas": copies or 1}
            state = found[stream]["state"]
            upload = await _ask(bus, f"{RESTORE}.{stream}", {"config": config, "state": state})
            with file.open(stream) as data:
                while piece := data.read(CHUNK_BYTES):
                    await _request(bus, upload["deliver_subject"], piece)
            made = _checked(await _request(bus, upload["deliver_subject"], b""), stream)
            done[stream] = made["state"]["last_seq"]
            if done[stream] != state["last_seq"]:
                raise BusUnavailableError(
                    f"{stream} ends at {done[stream]}, not at {state['last_seq']} as it was saved"
                )
    return done


async def _stream_exists(bus: NatsBus, stream: str) -> bool:
    said = json.loads((await _request(bus, f"$JS.API.STREAM.INFO.{stream}", b"")).data)
    return bool(said.get("error", {}).get("code") != 404)


async def _snapshot(bus: NatsBus, stream: str) -> tuple[dict[str, Any], AsyncIterator[bytes]]:
    inbox = bus.client.new_inbox()
    waiting: asyncio.Queue[Msg] = asyncio.Queue()
    subscription = await bus.client.subscribe(inbox, cb=waiting.put)
    request = {"deliver_subject": inbox, "no_consumers": True, "chunk_size": CHUNK_BYTES, "jsck": True}
    head = await _ask(bus, f"{SNAPSHOT}.{stream}", request)

    async def pieces() -> AsyncIterator[bytes]:
        try:
            while True:
                piece = await asyncio.wait_for(waiting.get(), CHUNK_S)
                status = (piece.headers or {}).get("Status", "")
                if status and status != "204":
                    raise BusUnavailableError(f"the server ended the backup of {stream}: {piece.headers}; try again")
                if not piece.data:
                    return
                yield piece.data
                if piece.reply:  # the last ones are not waited for
                    await piece.respond(b"")
        except TimeoutError as error:
            raise BusUnavailableError(f"the server gives no more of {stream}; try again") from error
        finally:
            with contextlib.suppress(nats.errors.Error):
                await subscription.unsubscribe()

    return head, pieces()


async def _ask(bus: NatsBus, subject: str, request: dict[str, Any]) -> dict[str, Any]:
    return _checked(await _request(bus, subject, json.dumps(request).encode()), subject)


def _checked(message: Msg, what: str) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(message.data)
    if "error" in said:
        raise BusUnavailableError(f"{what}: {said['error'].get('description')}")
    return said


async def _request(bus: NatsBus, subject: str, data: bytes) -> Msg:
    try:
        return await bus.client.request(subject, data, timeout=CHUNK_S)
    except nats.errors.Error as error:
        cure = "the operator's key gives the right to back up and restore"
        raise BusUnavailableError(f"no answer on {subject} ({error!r}); {cure}") from error
