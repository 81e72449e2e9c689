"""What each host of a set-up gets: files by their paths, as texts without a secret, and whose keys. Pure."""

import json
from pathlib import Path
from string import Template

from unicron.addresses import Address
from unicron.services import CONSOLE, PROVISIONER
from unicron_deploy.nats_server import Routes, config_text
from unicron_deploy.production.hosts import CLIENTS, METRICS, MONITOR, ROUTES, Hosts, Kind, metrics_port
from unicron_deploy.production.wanted import SEEN_BY_ALL
from unicron_deploy.quoting import environment_file

ETC, UNITS = "etc/unicron", "etc/systemd/system"
"""Folders on a host."""

STORE, RUN_DIR = "/var/lib/unicron/nats", "/var/lib/unicron/node"

RULES = "rules/own.toml"
"""Where rules of one's own begin, in a folder that agents and detectors have."""

TARGETS = "prometheus/targets/cluster.json"

TEMPLATES = Path(__file__).parent / "templates"
PROMETHEUS = Path(__file__).parents[1] / "prometheus"

_UNITS = {f"{UNITS}/{name}": f"systemd/{name}" for name in ("unicron-nats.service", "unicron@.service")}

SERVER_STARTS = {
    Kind.SYSTEMD: _UNITS,
    Kind.COMPOSE: {"docker-compose.yml": "compose/server.yml"},
    Kind.SLURM: {
        **_UNITS,
        f"{UNITS}/unicron@provisioner.service.d/shared.conf": "slurm/provisioner.conf",
        f"{ETC}/pools.toml": "slurm/pools.toml",
    },
}
"""What starts the processes of a server: templates, by the path of what is made of each."""

NODE_STARTS = {
    Kind.SYSTEMD: {f"{UNITS}/unicron-agent.service": "systemd/unicron-agent.service"},
    Kind.COMPOSE: {"docker-compose.yml": "compose/node.yml"},
}
"""Likewise of a node that is named."""

AGAIN = {
    Kind.SYSTEMD: "`systemctl restart unicron@notifier`",
    Kind.COMPOSE: "`docker compose up -d --force-recreate notifier`",
    Kind.SLURM: "`systemctl restart unicron@notifier`",
}
"""How the notifier is started again."""


def texts(hosts: Hosts) -> dict[str, str]:
    """Return all files that hold no secret, by their paths in the folder."""
    found = {"README.md": _readme(hosts), TARGETS: _targets(hosts)}
    found |= {f"prometheus/{name}": (PROMETHEUS / name).read_text("utf-8") for name in ("prometheus.yml", "rules.yml")}
    for server in hosts.servers:
        found |= {f"{server}/{path}": text for path, text in _server(hosts, server).items()}
    for node in hosts.nodes if hosts.kind in NODE_STARTS else []:
        found |= {f"{node}/{path}": text for path, text in _node(hosts, node).items()}
    if hosts.kind is Kind.SLURM:
        found[f"{SEEN_BY_ALL}/etc/slurm/unicron.conf"] = _template("slurm/unicron.conf")
        found[f"{SEEN_BY_ALL}{hosts.shared}/{RULES}"] = _template("rules.toml")
    return found


def keys(hosts: Hosts) -> dict[str, str]:
    """Return which folders of keys hosts get: by where they are to lie, names of users."""
    found = {f"{server}/{ETC}/server": "server" for server in hosts.servers}
    found |= {f"{server}/{ETC}/keys/{name}": name for server in hosts.servers for name in hosts.instances}
    if hosts.kind is Kind.SLURM:
        return found | {f"{SEEN_BY_ALL}{hosts.shared}/keys/{name}": name for name in hosts.members}
    return found | {f"{node}/{ETC}/keys/{node}": node for node in hosts.nodes}


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


def _filled(name: str, hosts: Hosts) -> str:
    """Return a template with what is known of the hosts in it."""
    units = " ".join(["unicron-nats", *(f"unicron@{instance}" for instance in hosts.instances)])
    return Template(_template(name)).safe_substitute(
        partition=hosts.partition, shared=hosts.shared, max=len(hosts.nodes), units=units
    )


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
        "detector": {"UNICRON_RULES": f"/{ETC}/rules"},
        "notifier": {"UNICRON_NOTIFY": f"/{ETC}/notify/notify.toml"},
        PROVISIONER: {"UNICRON_POOLS": f"/{ETC}/pools.toml"},
    }
    environments = {
        f"{ETC}/{name}.env": environment_file(
            {
                "UNICRON_NATS_NKEY": f"/{ETC}/keys/{name}/{name}.nk",
                "UNICRON_METRICS": str(Address(hosts.everywhere, metrics_port(name))),
                **own.get(name, {}),
            }
        )
        for name in hosts.instances
    }
    return {
        f"{ETC}/nats.conf": conf,
        f"{ETC}/cluster.env": _cluster(hosts),
        **environments,
        f"{ETC}/notify/notify.toml": _template("notify.toml"),
        f"{ETC}/{RULES}": _template("rules.toml"),
        **{path: _filled(name, hosts) for path, name in SERVER_STARTS[hosts.kind].items()},
    }


def _node(hosts: Hosts, node: str) -> dict[str, str]:
    own = {
        "UNICRON_NODE": node,
        "UNICRON_NATS_NKEY": f"/{ETC}/keys/{node}/{node}.nk",
        "UNICRON_FABRIC_KEY": f"/{ETC}/keys/{node}/fabric.key",
        "UNICRON_RUN_DIR": RUN_DIR,
        "UNICRON_METRICS": str(Address(hosts.everywhere, METRICS)),
        "UNICRON_RULES": f"/{ETC}/rules",
        "UNICRON_RACK": "",
        "UNICRON_SLOTS": "0",
    }
    return {
        f"{ETC}/cluster.env": _cluster(hosts),
        f"{ETC}/agent.env": environment_file(own),
        f"{ETC}/{RULES}": _template("rules.toml"),
        **{path: _filled(name, hosts) for path, name in NODE_STARTS[hosts.kind].items()},
    }


def _cluster(hosts: Hosts) -> str:
    return environment_file({"UNICRON_NATS_URL": hosts.url, "UNICRON_CONNECT_TIMEOUT_S": "60"})


def _targets(hosts: Hosts) -> str:
    at = [(str(Address(host, metrics_port(name))), name) for host in hosts.servers for name in hosts.instances]
    at += [(str(Address(node, METRICS)), node) for node in hosts.nodes if hosts.kind in NODE_STARTS]
    return json.dumps([{"targets": [address], "labels": {"process": name}} for address, name in at], indent=2) + "\n"


def _readme(hosts: Hosts) -> str:
    rules = f"nodes{hosts.shared}/rules and HOST/etc/unicron/rules" if hosts.partition else "HOST/etc/unicron/rules"
    return Template(_template("README.md")).substitute(
        servers=", ".join(hosts.servers),
        nodes=", ".join(hosts.nodes),
        urls=hosts.url,
        steps=_filled(f"{hosts.kind}/README.md", hosts),
        again=AGAIN[hosts.kind],
        rules=rules,
    )
