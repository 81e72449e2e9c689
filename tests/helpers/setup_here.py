"""A set-up that `unicron init` wrote, made to run on this machine: hosts are its addresses, and ports are free ones."""

from typing import NamedTuple

from unicron_deploy.production.hosts import CLIENTS, INSTANCES, METRICS, MONITOR, ROUTES, metrics_port

from helpers.ports import free_port

SERVERS = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
NODES = {"n1": "127.0.0.4", "n2": "127.0.0.5"}


class Here(NamedTuple):
    """Where it is reached: what clients connect to, and the new port of each that was replaced."""

    url: str
    ports: dict[str, str]


def settle(folder, slots):
    """Have a set-up of these servers and nodes run here: ports, addresses, racks, and slots without GPUs."""
    ports = {str(port): str(free_port()) for port in (CLIENTS, ROUTES, METRICS, *map(metrics_port, INSTANCES))}
    for host in (*SERVERS, *NODES, "prometheus"):
        own = {**ports, str(MONITOR): str(free_port())}  # it is each server's on 127.0.0.1
        for path in [each for each in (folder / host).rglob("*") if each.is_file() and "keys" not in each.parts]:
            text = path.read_text()
            for old, new in own.items():
                text = text.replace(f":{old}", f":{new}")
            for node, address in NODES.items():
                text = text.replace(f'"{node}:', f'"{address}:')
            path.write_text(text.replace("0.0.0.0", NODES.get(host, host)))
    for server in SERVERS:
        with (folder / server / "etc/unicron/console.env").open("a") as file:
            file.write(f"UNICRON_CONSOLE_PORT={free_port()}\n")
    for node, address in NODES.items():
        env = folder / node / "etc/unicron/agent.env"
        text = env.read_text().replace("UNICRON_SLOTS=0", f"UNICRON_SLOTS={slots}")
        env.write_text(text.replace("UNICRON_RACK=", f"UNICRON_RACK=r-{node}") + f"UNICRON_HOST={address}\n")
    return Here(",".join(f"nats://{server}:{ports[str(CLIENTS)]}" for server in SERVERS), ports)
