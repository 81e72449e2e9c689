"""What each host of a set-up gets: files by their paths, as texts without a secret, and whose keys. Pure."""

import ipaddress
import json
import re
from pathlib import Path
from string import Template
from typing import NamedTuple

from unicron.errors import InvalidInputError
from unicron.services import CONSOLE, SERVICES
from unicron_deploy import rights
from unicron_deploy.nats_server import Routes, config_text

ETC, UNITS = "etc/unicron", "etc/systemd/system"
"""Folders on a host."""

CLIENTS, ROUTES, MONITOR, METRICS = 4222, 6222, 8222, 9400
"""Ports: of NATS for clients, for its servers and for this machine only; of metrics the first, which agents have."""

STORE, RUN_DIR = "/var/lib/unicron/nats", "/var/lib/unicron/node"

INSTANCES = (*SERVICES, CONSOLE)
"""What runs beside each server: of each service one instance works, and the others stand by."""

SERVERS = 3
"""Of NATS: fewer keep no copies, more none that is of use."""

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")

TEMPLATES = Path(__file__).parent / "templates"


class Hosts(NamedTuple):
    """The hosts of a cluster: where the servers run, and its nodes."""

    servers: list[str]
    nodes: list[str]

    @property
    def url(self) -> str:
        """What clients connect to."""
        return ",".join(f"nats://{server}:{CLIENTS}" for server in self.servers)


def checked(servers: list[str], nodes: list[str]) -> Hosts:
    """Return these hosts.

    Raises:
        InvalidInputError: they are not three servers, a name can't be a host's or a node's, or stands there twice.
    """
    if len(servers) != SERVERS:
        raise InvalidInputError(f"--servers: {len(servers)} given; give three, such as a,b,c: then any may be lost")
    for server in servers:
        if not _is_host(server):
            raise InvalidInputError(f"--servers: {server!r} is no host name and no IPv4 address")
    for node in nodes:
        rights.node(node)
    names = [*servers, *nodes]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidInputError(f"{twice[0]} is named twice: a host is either a server or a node, and named once")
    return Hosts(servers, nodes)


def _is_host(text: str) -> bool:
    try:
        return isinstance(ipaddress.ip_address(text), ipaddress.IPv4Address)
    except ValueError:
        return bool(_HOST.fullmatch(text))


def texts(hosts: Hosts) -> dict[str, str]:
    """Return all files that hold no secret, by their paths in the folder."""
    found = {"README.md": _readme(hosts), "prometheus.json": _targets(hosts)}
    for server in hosts.servers:
        found |= {f"{server}/{path}": text for path, text in _server(hosts, server).items()}
    for node in hosts.nodes:
        found |= {f"{node}/{path}": text for path, text in _node(hosts, node).items()}
    return found


def keys(hosts: Hosts) -> dict[str, str]:
    """Return which folders of keys hosts get: by where they are to lie, names of users."""
    found = {f"{server}/{ETC}/server": "server" for server in hosts.servers}
    found |= {f"{server}/{ETC}/keys/{name}": name for server in hosts.servers for name in INSTANCES}
    return found | {f"{node}/{ETC}/keys/{node}": node for node in hosts.nodes}


def metrics_port(process: str) -> int:
    """Return where a process answers Prometheus."""
    return METRICS + 1 + INSTANCES.index(process) if process in INSTANCES else METRICS


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _server(hosts: Hosts, server: str) -> dict[str, str]:
    conf = config_text(
        STORE,
        port=CLIENTS,
        accounts=Path("server/accounts.conf"),
        name=server,
        routes=Routes(ROUTES, Path("server/routes.conf")),
        monitor=MONITOR,
        tls=Path("/", ETC, "server"),
    )
    own = {
        CONSOLE: {"UNICRON_CONSOLE_HOST": "127.0.0.1", "UNICRON_CONSOLE_TOKENS": f"/{ETC}/keys/{CONSOLE}/tokens"},
        "notifier": {"UNICRON_NOTIFY": ""},
    }
    environments = {
        f"{ETC}/{name}.env": _environment({"UNICRON_METRICS": f"0.0.0.0:{metrics_port(name)}", **own.get(name, {})})
        for name in INSTANCES
    }
    units = {f"{UNITS}/{name}": _template(name) for name in ("unicron-nats.service", "unicron@.service")}
    return {f"{ETC}/nats.conf": conf, f"{ETC}/cluster.env": _cluster(hosts), **environments, **units}


def _node(hosts: Hosts, node: str) -> dict[str, str]:
    own = {
        "UNICRON_NODE": node,
        "UNICRON_NATS_NKEY": f"/{ETC}/keys/{node}/{node}.nk",
        "UNICRON_FABRIC_KEY": f"/{ETC}/keys/{node}/fabric.key",
        "UNICRON_RUN_DIR": RUN_DIR,
        "UNICRON_METRICS": f"0.0.0.0:{METRICS}",
        "UNICRON_RACK": "",
        "UNICRON_SLOTS": "0",
    }
    unit = "unicron-agent.service"
    return {
        f"{ETC}/cluster.env": _cluster(hosts),
        f"{ETC}/agent.env": _environment(own),
        f"{UNITS}/{unit}": _template(unit),
    }


def _cluster(hosts: Hosts) -> str:
    return _environment({"UNICRON_NATS_URL": hosts.url, "UNICRON_CONNECT_TIMEOUT_S": "60"})


def _environment(values: dict[str, str]) -> str:
    return "".join(f"{name}={value}\n" for name, value in values.items())


def _targets(hosts: Hosts) -> str:
    at = [(f"{host}:{metrics_port(name)}", name) for host in hosts.servers for name in INSTANCES]
    at += [(f"{node}:{METRICS}", node) for node in hosts.nodes]
    return json.dumps([{"targets": [address], "labels": {"process": name}} for address, name in at], indent=2) + "\n"


def _readme(hosts: Hosts) -> str:
    units = " ".join(["unicron-nats", *(f"unicron@{name}" for name in INSTANCES)])
    listed = {"servers": ", ".join(hosts.servers), "nodes": ", ".join(hosts.nodes), "urls": hosts.url, "units": units}
    return Template(_template("README.md")).substitute(listed)
