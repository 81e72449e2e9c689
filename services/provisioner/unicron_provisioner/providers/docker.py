"""Machines that are containers of a Docker engine, each with one agent: found again by their labels."""

import asyncio
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from unicron.contracts.pools import Pool
from unicron.contracts.ranges import Label, Seconds
from unicron.contracts.sentences import after
from unicron.errors import InvalidInputError
from unicron.printable import one_line
from unicron_provisioner.providers.names import credentials, first_free, folder_of_keys, free_name, in_order, named
from unicron_provisioner.providers.protocol import (
    ByRelease,
    MachineReport,
    MachineRequest,
    ProviderError,
    RefusedError,
    Surroundings,
)

T = TypeVar("T")

MACHINE, POOL, NODE = "unicron.machine", "unicron.pool", "unicron.node"
"""Labels of containers."""

KEYS = "/run/unicron/keys"
"""Folder of a container with the keys of its node."""

STATES: dict[str, Literal["coming", "running", "ended"]] = {
    "created": "coming",
    "restarting": "running",
    "running": "running",
    "paused": "running",
}
"""The engine's states of a container; in all others it has ended."""

CALL_S = 20
"""Seconds after which a call to the engine has failed."""

SHOWN = 300
"""Characters of the last line of a container's log, at most."""

GONE, TAKEN, FULL = 404, 409, 507
"""HTTP statuses of an engine."""


class Options(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """The options of containers in the file of pools.

    Attributes:
        image: that has the agent, such as unicron-node.
        command: in place of the image's own.
        engine: address of the engine, such as ssh://host; empty: as DOCKER_HOST says, or the local one.
        network: that the containers are in.
        keys: folder of the nodes' keys on the engine's machine; empty for none.
        key_volumes: what the names of volumes begin with that hold a node's keys each, as Compose makes them, such as
            unicron_key- for unicron_key-box-1; empty for none.
        nats_url: how containers reach the bus; empty: as the provisioner does.
        env: further settings of the agents.
        volumes: HOST:CONTAINER[:ro], further folders that they see.
        gpus: whether they get all GPUs of the engine's machine.
        shm_size: of the memory in which states lie.
        grace_s: seconds that an agent may take to leave, before it is killed.
    """

    image: Annotated[Label, msgspec.Meta(min_length=1)]
    command: list[Label] = []
    engine: Label = ""
    network: Label = "host"
    keys: Label = ""
    key_volumes: Label = ""
    nats_url: Label = ""
    env: dict[str, str] = {}
    volumes: list[Label] = []
    gpus: bool = False
    shm_size: Label = "1g"
    grace_s: Seconds = 10.0


class DockerProvider(ByRelease):
    """Containers of one engine.

    Args:
        pool: its name.
        options: how they are started.
        keys: folder of the nodes' keys, None for none.
        nats_url: how they reach the bus.
    """

    def __init__(self, pool: str, options: Options, keys: Path | None, nats_url: str) -> None:
        self._pool, self._options, self._keys, self._nats_url = pool, options, keys, nats_url
        self._engine: Any = None

    async def list(self) -> list[MachineReport]:
        """Return all containers of the pool."""
        return [*await self._thread(self._listed)]

    async def ask(self, request: MachineRequest) -> None:
        """Start a container; its name, made of the id, can be there once only."""
        await self._thread(partial(self._run, request))

    async def release(self, machine: str, instance: str = "") -> None:  # noqa: ARG002 an id is there once
        """Stop and remove a container."""
        await self._thread(partial(self._remove, machine))

    async def _thread(self, job: Callable[[], T]) -> T:
        """Do what blocks in a thread; say what the engine says, where that is an error."""
        import docker.errors  # noqa: PLC0415 only for such pools
        import requests  # noqa: PLC0415 it comes with docker

        try:
            return await asyncio.to_thread(job)
        except docker.errors.ImageNotFound as error:
            cure = f"docker pull {self._options.image}, or build it (docs/start/containers.md)"
            raise RefusedError(f"the engine has no image {self._options.image}: {cure}") from error
        except docker.errors.APIError as error:
            status = error.response.status_code if error.response is not None else 0
            kind = RefusedError if 400 <= status < 500 else ProviderError
            raise kind(f"the engine says: {error.explanation or error}; see [pool.{self._pool}.docker]") from error
        except (docker.errors.DockerException, requests.RequestException, OSError) as error:
            self._engine = None
            raise ProviderError(f"the engine can't be reached: {error}; see whether it runs (docker info)") from error

    def _containers(self, machine: str = "") -> Sequence[Any]:
        import docker  # noqa: PLC0415 only for such pools

        if self._engine is None:
            where = {"base_url": self._options.engine} if self._options.engine else {}
            environment = {} if where else {"environment": os.environ}
            make = docker.DockerClient if where else docker.from_env
            self._engine = make(timeout=CALL_S, **where, **environment)
        labels = [f"{POOL}={self._pool}", *([f"{MACHINE}={machine}"] if machine else [])]
        found: Sequence[Any] = self._engine.containers.list(all=True, filters={"label": labels}, ignore_removed=True)
        return found

    def _listed(self) -> Sequence[MachineReport]:
        return [
            MachineReport(
                machine=each.labels.get(MACHINE, ""),
                state=STATES.get(each.status, "ended"),
                node=each.labels.get(NODE, ""),
                instance=each.id,
                reason="" if each.status in STATES else _why(each),
            )
            for each in self._containers()
            if each.labels.get(MACHINE)
        ]

    def _run(self, request: MachineRequest) -> None:
        import docker.errors  # noqa: PLC0415 only for such pools

        there = self._containers()
        mine: Sequence[Any] = [each for each in there if each.labels.get(MACHINE) == request.machine]
        if not mine:
            node = self._free_node([each.labels.get(NODE, "") for each in there])
            try:
                mine = [self._engine.containers.create(**self._given(request, node))]
            except docker.errors.APIError as error:
                if error.response is None or error.response.status_code != TAKEN:
                    raise
                mine = self._containers(request.machine)
        for each in mine:
            if each.status == "created":
                each.start()

    def _free_node(self, used: Sequence[str]) -> str:
        prefix = self._options.key_volumes
        if not prefix:
            return free_name(self._keys, self._pool, used)
        volumes: Sequence[Any] = self._engine.volumes.list(filters={"name": prefix})
        keyed = in_order(self._pool, [each.name.removeprefix(prefix) for each in volumes])
        cure = f"add {prefix}{self._pool}-{len(used) + 1} and that node's keys to docker-compose.yml"
        return first_free(keyed, used, f"pool {self._pool} with a volume {prefix}NODE", cure)

    def _given(self, request: MachineRequest, node: str) -> dict[str, Any]:
        options = self._options
        files = named(Path(KEYS), node) if options.key_volumes else credentials(self._keys, node)
        variables = {
            "UNICRON_NATS_URL": self._nats_url,
            "UNICRON_NODE": node,
            "UNICRON_MACHINE": request.machine,
            "UNICRON_POOL": self._pool,
            "UNICRON_RACK": request.rack,
            "UNICRON_SLOTS": str(request.slots),
            **{setting: f"{KEYS}/{path.name}" for setting, path in files.items()},
        }
        source = f"{options.key_volumes}{node}" if options.key_volumes else self._keys and self._keys / node
        keys = [f"{source}:{KEYS}:ro"] if source else []
        gpus = [{"Driver": "nvidia", "Count": -1, "Capabilities": [["gpu"]]}] if options.gpus else None
        return {
            "image": options.image,
            "command": options.command or None,
            "name": f"unicron-{request.machine}",
            "labels": {MACHINE: request.machine, POOL: self._pool, NODE: node},
            "environment": {**variables, **options.env},
            "network": options.network,
            "volumes": [*keys, *options.volumes],
            "device_requests": gpus,
            "init": True,
            "shm_size": options.shm_size,
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges:true"],
        }

    def _remove(self, machine: str) -> None:
        import docker.errors  # noqa: PLC0415 only for such pools

        for each in self._containers(machine):
            try:
                each.stop(timeout=round(self._options.grace_s))
                each.remove(force=True, v=True)
            except docker.errors.APIError as error:
                if error.response is None or error.response.status_code not in {GONE, TAKEN}:
                    raise  # else it is gone, or is just being removed


def _why(container: Any) -> str:
    """Return how a container has ended, and the last line that it wrote: it is removed soon, and its log with it."""
    import docker.errors  # noqa: PLC0415 only for such pools

    state = container.attrs.get("State", {})
    code = state.get("ExitCode", "") if isinstance(state, dict) else ""
    try:
        lines = container.logs(tail=5).decode(errors="replace").splitlines()
    except docker.errors.APIError:  # its engine keeps no log, or keeps it elsewhere
        lines = []
    last = next((one_line(line)[:SHOWN] for line in reversed(lines) if line.strip()), "")
    return f"its container is {container.status}{f', exit status {code}' if code != '' else ''}{after(': ', last)}"


def make(pool: Pool, options: Options, around: Surroundings) -> DockerProvider:
    """Return the provider of a pool.

    Raises:
        InvalidInputError: the package docker is not installed, the folder of keys is not there, or keys are to be in
            folders and in volumes.
    """
    if options.keys and options.key_volumes:
        raise InvalidInputError("keys and key_volumes: keys lie in one of them; leave the other out")
    try:
        import docker  # noqa: F401, PLC0415 only for such pools
    except ImportError as error:
        raise InvalidInputError("the package docker is not installed: pip install '.[docker]'") from error
    keys = folder_of_keys(options.keys, around.folder)
    return DockerProvider(pool.name, options, keys, options.nats_url or around.nats_url)
