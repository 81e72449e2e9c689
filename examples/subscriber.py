"""A tool of your own: prints every failure and every plan of a running cluster, past ones first.

It needs nats-py and msgpack, and nothing of Unicron; any language with a NATS and a msgpack library can do the same.
`unicron docs` lists the subjects and the fields of each message. `unicron credentials subscriber` says where the key is
that it may read with; where the cluster was started with --insecure it needs none. Servers that speak TLS are known by
the `ca.pem` beside the key.

    UNICRON_NATS_NKEY=.unicron/keys/subscriber/subscriber.nk python examples/subscriber.py [nats://127.0.0.1:4222]
"""

import asyncio
import contextlib
import json
import os
import ssl
import sys
import time
from pathlib import Path
from typing import Any

import msgpack
import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

WANTED = {"FailureDetected", "PlanDecided"}


def describe(event: dict[str, Any]) -> str:
    """Return one line about a failure or a plan. Fields that are not known are ignored, absent ones have defaults."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.get("at", 0)))
    if event["type"] == "FailureDetected":
        where = " ".join(filter(None, (event.get("task"), event.get("worker"), event.get("node"))))
        return f"{clock} FAILURE sev{event['severity']} {event['status']} {where}: {event.get('reason', '')}"
    plan = event["plan"]
    workers = ", ".join(f"{share['task']} {len(share.get('slots', []))}" for share in plan.get("shares", []))
    return f"{clock} PLAN {plan['number']} after {plan['trigger']}: {workers or 'no change'} of {plan['workers']} slots"


async def main(urls: list[str], key: str | None) -> None:
    """Follow the journal, a stream that keeps all facts in one order: read what is there, then wait for more."""
    options: dict[str, Any] = {"nkeys_seed": key, "inbox_prefix": "_INBOX.subscriber"} if key else {}
    if key and (authority := Path(key).with_name("ca.pem")).exists():
        options["tls"] = ssl.create_default_context(cafile=authority)
    client = await nats.connect(
        urls, name="subscriber-example", max_reconnect_attempts=-1, reconnect_time_wait=1, **options
    )
    grown, position = asyncio.Event(), 0

    async def on_stored(_: Msg) -> None:
        grown.set()

    for kind in WANTED:  # subjects of the server's notices of stored entries
        await client.subscribe(f"unicron.stored.evt.*.{kind}.*", cb=on_stored)
    while True:
        grown.clear()
        with contextlib.suppress(nats.errors.Error):  # the server is away: again in a moment
            while (message := await get_next(client, position)) is not None:
                position = int((message.headers or {})["Nats-Sequence"])
                event = msgpack.unpackb(message.data)
                if event.get("type") in WANTED:
                    print(describe(event), flush=True)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(grown.wait(), 2)


async def get_next(client: Client, position: int) -> Msg | None:
    """Return the next fact behind `position`, None where there is none yet."""
    request = {"seq": position + 1, "next_by_subj": "unicron.v1.evt.>"}
    reply = await client.request("$JS.API.DIRECT.GET.UNICRON", json.dumps(request).encode())
    return None if "Status" in (reply.headers or {}) else reply


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("UNICRON_NATS_URL", "nats://127.0.0.1:4222")
    try:
        asyncio.run(main(address.split(","), os.environ.get("UNICRON_NATS_NKEY")))
    except KeyboardInterrupt:
        sys.exit(0)
