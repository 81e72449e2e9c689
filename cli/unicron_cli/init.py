"""`unicron init`: a set-up for production, for hosts that have systemd, Compose or Slurm."""

from pathlib import Path
from typing import Annotated

import typer
from unicron_deploy.production.hosts import Kind, checked
from unicron_deploy.production.setup import write

from unicron.slurm.nodelist import expand
from unicron_cli.output import Json, done


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where it is written: an empty folder, or a new one.")],
    servers: Annotated[
        str, typer.Option(metavar="HOSTS", help="The three hosts of NATS and the services, such as a,b,c.")
    ],
    nodes: Annotated[str, typer.Option(metavar="HOSTS", help="The hosts that train, such as n[01-16].")],
    kind: Annotated[
        Kind, typer.Option(help="What starts the processes: units of systemd, Compose, or units and Slurm.")
    ] = Kind.SYSTEMD,
    partition: Annotated[
        str, typer.Option(metavar="NAME", help="With slurm: the nodes' partition; the pool is called so too.")
    ] = "",
    shared: Annotated[
        str, typer.Option(metavar="DIR", help="With slurm: a folder that servers and nodes see under this path.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Write what a cluster in production needs: keys, certificates, configuration and what starts it, by host."""
    hosts = checked(expand(servers), expand(nodes), kind, partition, shared)
    write(folder, hosts)
    text = (
        f"a set-up of three servers and {len(hosts.nodes)} nodes is in {folder}; {folder / 'README.md'} says what next"
    )
    done(text, as_json, dir=str(folder), servers=hosts.servers, nodes=hosts.nodes)
