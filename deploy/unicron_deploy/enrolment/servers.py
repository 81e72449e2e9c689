"""Has all NATS servers of the cluster read their configuration again, over the bus, wherever they run."""

import asyncio
import contextlib
import json
import logging

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from unicron.errors import BusUnavailableError
from unicron_deploy.rights import FIND_SERVERS, RELOAD

log = logging.getLogger(__name__)

QUIET_S = 0.2
"""When no more of them has answered for so long, all have."""

ANSWER_S = 5.0


async def reload(nc: Client) -> None:
    """Return when each server that is there has read its configuration again.

    Raises:
        BusUnavailableError: none answers, or one can't use its configuration; says which, and why.
    """
    found = await _servers(nc)
    if not found:
        raise BusUnavailableError(
            "no NATS server says that it is there; the next one that starts reads what was written"
        )
    try:
        answers = await asyncio.gather(
            *(nc.request(RELOAD.replace("*", server), b"", timeout=ANSWER_S) for server in found)
        )
    except nats.errors.Error as error:
        raise BusUnavailableError(f"a NATS server does not read its configuration again: {error!r}") from error
    for server, answer in zip(found.values(), answers, strict=True):
        if trouble := _json(answer).get("error"):
            raise BusUnavailableError(f"the NATS server {server} can't use its configuration: {trouble}; see its log")


async def _servers(nc: Client) -> dict[str, str]:
    """Return the names of the servers by their ids."""
    heard: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = nc.new_inbox()
    found: dict[str, str] = {}
    subscription = await nc.subscribe(inbox, cb=heard.put)
    try:
        await nc.publish(FIND_SERVERS, b"", reply=inbox)
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(QUIET_S if found else ANSWER_S):
                    server = _json(await heard.get()).get("server")
                if isinstance(server, dict) and str(server.get("id")).isalnum():
                    found[str(server["id"])] = str(server.get("name"))
    finally:
        with contextlib.suppress(nats.errors.Error):
            await subscription.unsubscribe()
    return found


def _json(message: Msg) -> dict[str, object]:
    try:
        told = json.loads(message.data)
    except ValueError:
        return {}
    return told if isinstance(told, dict) else {}
