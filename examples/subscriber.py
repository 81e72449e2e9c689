"""A tool of your own: prints every failure and every plan of a running cluster, past ones first.

It needs nats-py and msgpack, and nothing of Unicron; any language with a NATS and a msgpack library can do the same.
docs/events.md lists the subjects and the fields of each message.

    python examples/subscriber.py [nats://127.0.0.1:4222]
"""

import asyncio
import os
import sys
import time
from typing import Any

import msgpack
import nats

WANTED = ["unicron.v1.evt.*.FailureDetected.*", "unicron.v1.evt.*.PlanDecided.*"]


def describe(event: dict[str, Any]) -> str:
    """Return one line about a failure or a plan. Fields that are not known are ignored, absent ones have defaults."""
    clock = time.strftime("%H:%M:%S", time.localtime(event.get("at", 0)))
    if event["type"] == "FailureDetected":
        where = " ".join(filter(None, (event.get("task"), event.get("worker"), event.get("node"))))
        return f"{clock} FAILURE sev{event['severity']} {event['status']} {where}: {event.get('reason', '')}"
    plan = event["plan"]
    workers = ", ".join(f"{share['task']} {len(share.get('slots', []))}" for share in plan.get("shares", []))
    return f"{clock} PLAN {plan['number']} after {plan['trigger']}: {workers or 'no change'} of {plan['workers']} slots"


async def main(url: str) -> None:
    """Follow the journal, a stream that keeps all facts in one order; past messages come first, then new ones."""
    client = await nats.connect(url, name="subscriber-example", max_reconnect_attempts=-1, reconnect_time_wait=1)
    journal = client.jetstream()
    config = nats.js.api.ConsumerConfig(filter_subjects=WANTED)
    events = await journal.subscribe("", stream="UNICRON", config=config, ordered_consumer=True, idle_heartbeat=1)
    async for message in events.messages:
        print(describe(msgpack.unpackb(message.data)), flush=True)


if __name__ == "__main__":
    address = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("UNICRON_NATS_URL", "nats://127.0.0.1:4222")
    try:
        asyncio.run(main(address))
    except KeyboardInterrupt:
        sys.exit(0)
