"""Replies of any size: what is more than a server takes in one message comes in several, one after the other."""

import asyncio
import contextlib

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error, NoRespondersError
from nats.micro.request import Request

PIECE = 512 * 1024
"""Bytes of a reply that go into one message."""

MORE = {"Unicron-More": "1"}
"""Header of each message of a reply but the last."""


async def respond(request: Request, reply: bytes) -> None:
    """Answer a request."""
    at = 0
    while len(reply) - at > PIECE:
        await request.respond(reply[at : at + PIECE], MORE)
        at += PIECE
    await request.respond(reply[at:])


async def request(nc: Client, subject: str, data: bytes, timeout_s: float) -> Msg:
    """Ask, and return the last message of the reply with the data of all.

    Raises:
        NoRespondersError: nobody answers on `subject`.
        TimeoutError: the reply is not there in time.
    """
    inbox = nc.new_inbox()
    messages: asyncio.Queue[Msg] = asyncio.Queue()
    subscription = await nc.subscribe(inbox, cb=messages.put)
    try:
        await nc.publish(subject, data, reply=inbox)
        async with asyncio.timeout(timeout_s):
            pieces = []
            while True:
                message = await messages.get()
                pieces.append(message.data)
                headers = message.headers or {}
                if headers.get("Status") == "503":
                    raise NoRespondersError
                if not headers.keys() & MORE.keys():
                    message.data = b"".join(pieces)
                    return message
    finally:
        with contextlib.suppress(Error):
            await subscription.unsubscribe()
