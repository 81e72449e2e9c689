"""Two instances of a service, scraped: the active one exports its state, and the other that it waits."""

import asyncio
import signal
import time
import urllib.request

from helpers.buses import say
from helpers.ports import free_port
from helpers.registry import SPEC, connected, eventually, registry
from prometheus_client.parser import text_string_to_metric_families

from unicron.contracts.events import NodeJoined
from unicron.contracts.tasks import Slot
from unicron.errors import BusUnavailableError


def scraped(port):
    """Return the value of each series by its name and labels."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            text = answer.read().decode()
    except OSError as error:
        raise BusUnavailableError("not yet") from error
    families = text_string_to_metric_families(text)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


async def test_who_is_active_tells_what_it_knows_and_who_takes_over_tells_the_same(nats_world):
    ports = [free_port(), free_port()]

    async def metrics_of(port, holds):
        return await eventually(lambda: asyncio.to_thread(scraped, port), holds)

    async with connected(nats_world) as client:
        with registry(nats_world, "--metrics", str(ports[0])) as first:
            await metrics_of(ports[0], lambda found: found["unicron_active", "registry"] == 1)
            with registry(nats_world, "--metrics", f"127.0.0.1:{ports[1]}"):
                waiting = await metrics_of(ports[1], lambda found: True)
                assert {name: value for name, value in waiting.items() if not name[0].startswith("process_")} == {
                    ("unicron_active", "registry"): 0
                }
                fields = {"id": "j", "at": time.time() - 2, "source": "n1"}
                node = NodeJoined(node="n1", incarnation="a", host="127.0.0.1", slots=[Slot(index=0)], **fields)
                await say(client.bus, node)
                await client.bus.append("unicron.v1.evt.n1.NodeJoined.n1", b"\xc1", "broken")
                await client.submit(SPEC)
                said = {("unicron_dead_letters_total", "registry"), ("unicron_alerts_total", "other", "registry")}
                found = await metrics_of(ports[0], lambda found: found.keys() >= said)
                assert found["unicron_nodes", "up"] == 1
                assert found["unicron_tasks", "waiting"] == 1
                assert found["unicron_task_workers", "gpt"] == 0
                assert found["unicron_dead_letters_total", "registry"] == 1
                assert found["unicron_alerts_total", "other", "registry"] == 1
                assert found["unicron_lease_changes_total", "registry"] == 1
                first.send_signal(signal.SIGTERM)
                later = await metrics_of(ports[1], lambda found: found["unicron_active", "registry"] == 1)
                assert later["unicron_nodes", "up"] == 1, "read of its state, not counted"
                assert ("unicron_dead_letters_total", "registry") not in later, "that was said by the other"
                await asyncio.to_thread(first.wait)
                assert first.returncode == 0
