"""Runs a program that knows nothing of Unicron, anew in each membership, as torchrun would.

The worker's process stays and talks with its agent; the program is a child of it. torch.distributed, and others
that read the same variables, get torchrun's values
(https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables).
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
from torch._C._distributed_c10d import TCPStore

from unicron.addresses import Address, family
from unicron.contracts.frames import LENGTH, frame, length_of
from unicron.contracts.tasks import WorkerPhase
from unicron.contracts.worker import (
    CAUSE,
    STOP_GRACE,
    Broken,
    Finished,
    Iterated,
    Joined,
    Membership,
    Ping,
    Pong,
    Progress,
    Raised,
    Ready,
    Timed,
    printable_cause,
    to_agent,
)
from unicron.errors import GroupBrokenError, InvalidInputError
from unicron.train.groups.rendezvous import Rendezvous, await_all_done
from unicron.train.restart import ending
from unicron.train.restart.forked import seed_anew
from unicron.train.worker import channel as channels

"""How long a program has, from SIGTERM on, before it is killed."""

PR_SET_PDEATHSIG = 1

ECHOES = (
    "torch.distributed.DistBackendError",
    "torch.distributed.DistNetworkError",
    "torch.distributed.DistStoreError",
)
"""Exceptions that stem from another rank's failure."""

OWN_TEXTS = ("EADDRINUSE", "ECC error", "NVLink error", "Cuda failure", "CUDA error", "Cuda error", "shared memory")
"""Texts of an exception that is this rank's own, or its device's, though others of its class are echoes."""

ECHO_TEXTS = ("third_party/gloo/", "NCCL communicator was aborted")
"""Texts that do, of any exception: gloo raises plain RuntimeErrors, with the place in its source."""


class Place(msgspec.Struct, frozen=True):
    """The location of a rank, as it is sent to the others.

    Attributes:
        node: name of it.
        device: what `CUDA_VISIBLE_DEVICES` is to name.
        starts: how often this worker has run the program before.
        host: of the first rank; empty of all others, as are the ports.
        store: port where the first rank's launcher has torch's store.
        coordinator: port where the first rank's program is to listen, if it uses JAX.
    """

    node: str
    device: str
    starts: int = 0
    host: str = ""
    store: int = 0
    coordinator: int = 0


def launch(request: dict[str, Any], run_script: Callable[[dict[str, Any]], int]) -> int:
    """Run a program, again in each membership, for the standby; return the worker's exit code."""
    channel = channels.connect()
    if channel is None:
        return 1
    command = request["argv"]
    program = (lambda: execute(command)) if request["module"] is None else (lambda: run_script(request))
    os.chdir(request["cwd"])
    try:
        return Launcher(channel, program).run()
    except Exception as error:  # noqa: BLE001 each is reported
        channels.report_exception(type(error), error, error.__traceback__)
        return 1


class Launcher:
    """The worker's side of it.

    Args:
        channel: to the agent.
        program: runs the program in this process and returns its exit code.
    """

    def __init__(self, channel: channels.AgentChannel, program: Callable[[], int]) -> None:
        self._channel, self._program = channel, program
        self._rendezvous: Rendezvous | None = None
        self._epoch = -1
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._starts = 0
        self._echo: Raised | None = None
        self._connection: socket.socket | None = None
        self._store: TCPStore | None = None
        channel.on_membership, channel.on_ping = self._interrupt, self._on_ping

    def run(self) -> int:
        """Run the program until it has ended by itself; return its exit code, or end as it did."""
        self._channel.send(Ready())
        while True:
            membership = self._channel.await_membership(self._epoch)
            self._epoch, began = membership.epoch, time.monotonic()
            try:
                variables = self._exchange_places(membership)
            except GroupBrokenError as error:
                self._report_broken(str(error))
                continue
            child, connection = self._launch(variables)
            self._starts, self._echo = self._starts + 1, None
            self._channel.send(
                Joined(
                    epoch=membership.epoch,
                    rank=membership.rank,
                    world_size=membership.world_size,
                    iteration=max(0, self._channel.iteration),
                    kept=0,
                    recomputed=0,
                    state_from="",
                    seconds=time.monotonic() - began,
                )
            )
            status = self._forward_and_wait(child, connection)
            if self._channel.newest.epoch > self._epoch:
                continue
            if self._echo is not None:
                self._report_broken(f"{self._echo.exception}: {self._echo.text}")
                continue
            if status == 0 and not self._all_are_done(membership):
                continue
            return self._end_like_program(status)

    def _end_like_program(self, status: int) -> int:
        """Say that all is done, or end as the program did."""
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            if number != signal.SIGKILL:
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        code = os.waitstatus_to_exitcode(status)
        if code == 0:
            self._channel.send(Finished(iterations=int(os.environ["UNICRON_ITERATIONS"])))
        return code

    def _report_broken(self, why: str) -> None:
        """Report to the agent why this membership can't go on, unless there is a newer one already."""
        if self._channel.newest.epoch == self._epoch:
            iteration = max(0, self._channel.iteration)
            self._channel.send(Broken(epoch=self._epoch, iteration=iteration, error=why[:300]))

    def _interrupt(self, membership: Membership) -> bool:
        """Interrupt waits for other ranks, or for the program to end, if there is a newer membership."""
        if membership.epoch > self._epoch >= 0:
            os.write(self._woken, b"x")
            if self._rendezvous is not None:
                self._rendezvous.cut()
        return False

    def _on_ping(self, ping: Ping) -> None:
        """Answer for the program, which is asked for its collectives; one that is no Python may not hear that."""
        self._channel.send(Pong())
        connection = self._connection
        if ping.collectives and connection is not None:
            with contextlib.suppress(OSError):
                connection.send(frame(ping), socket.MSG_DONTWAIT)

    # --- the other ranks ----------------------------------------------------------------------------------------------

    def _exchange_places(self, membership: Membership) -> dict[str, str]:
        """Exchange places with the other ranks; return the environment variables for the program."""
        mine = Place(os.environ["UNICRON_NODE"], os.environ["CUDA_VISIBLE_DEVICES"], self._starts)
        self._store = None  # programs of an earlier membership meet nobody there any more
        if membership.rank == 0:
            host = os.environ["UNICRON_HOST"]
            # It listens before any program looks for it: torch tries again only after half a second or more. This
            # process reaches it by a name that needs no name service, as torch looks up whom it is connected to.
            self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            mine = msgspec.structs.replace(mine, host=host, store=self._store.port, coordinator=free_port(host))
        found = self._exchange(membership, "place", msgspec.json.encode(mine))
        places = [msgspec.json.decode(each, type=Place) for each in found]
        connection = variables_of(membership.rank, places, os.environ["UNICRON_TASK"])
        return {**connection, CAUSE: printable_cause(membership.cause)}

    def _all_are_done(self, membership: Membership) -> bool:
        """Wait until the program has ended well on all ranks; False: on one it has not, and all begin again."""
        iteration = max(0, self._channel.iteration)
        self._channel.send(Progress(iteration=iteration, phase=WorkerPhase.WAITING, done=0))
        return await_all_done(
            lambda: self._exchange(membership, "done", b""), lambda: self._channel.newest.epoch > membership.epoch
        )

    def _exchange(self, membership: Membership, what: str, mine: bytes) -> list[bytes]:
        """Return what each rank gives.

        Raises:
            GroupBrokenError: there is a newer membership, or the connection broke.
        """
        self._rendezvous = Rendezvous(membership)
        try:
            self._interrupt(self._channel.newest)  # one that came before there was anything to cut
            self._rendezvous.set(f"{what}-{membership.rank}", mine)
            return self._rendezvous.read([f"{what}-{rank}" for rank in range(membership.world_size)])
        finally:
            self._rendezvous.close()
            self._rendezvous = None

    # --- the program -------------------------------------------------------------------------------------------------

    def _launch(self, variables: dict[str, str]) -> tuple[int, socket.socket]:
        """Run the program in a child of ours; return its id, and the socket of its messages."""
        ours, theirs = socket.socketpair()
        us = os.getpid()
        child = os.fork()
        if child == 0:
            ours.close()
            self._exec_program(us, theirs, variables)
        theirs.close()
        self._connection = ours
        return child, ours

    def _exec_program(self, launcher: int, connection: socket.socket, variables: dict[str, str]) -> NoReturn:
        """Be the program."""
        code = 1
        try:
            os.setpgid(0, 0)  # what it starts ends with it
            seed_anew()
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != launcher:
                os._exit(1)
            os.environ.update(variables)
            os.environ.pop(channels.SOCKET_VARIABLE, None)
            connection.set_inheritable(True)  # programs that are no Python are executed
            os.environ[channels.LAUNCHER_VARIABLE] = str(connection.fileno())
            channels.use_launcher(connection)
            code = self._program()
            ending.end()
        finally:
            ending.flush()
            os._exit(code)

    def _forward_and_wait(self, child: int, connection: socket.socket) -> int:
        """Pass on the program's messages until it has ended; end it where there is a newer membership."""
        descriptor = os.pidfd_open(child)
        poll = select.poll()
        for each in (descriptor, connection.fileno(), self._wake):
            poll.register(each, select.POLLIN)
        kill_at: float | None = None
        try:
            while True:
                if self._channel.newest.epoch > self._epoch and kill_at is None:
                    kill_at = time.monotonic() + float(os.environ[STOP_GRACE])
                    _signal(child, signal.SIGTERM)
                elif kill_at is not None and time.monotonic() >= kill_at:
                    _signal(child, signal.SIGKILL)
                ready = {each for each, _ in poll.poll(200 if kill_at else None)}
                if self._wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                if connection.fileno() in ready and not self._forward_message(connection):
                    poll.unregister(connection.fileno())
                elif descriptor in ready:
                    break
        finally:
            _signal(child, signal.SIGKILL)  # what it has started and left behind
            os.close(descriptor)
            connection.close()
        return os.waitpid(child, 0)[1]

    def _forward_message(self, connection: socket.socket) -> bool:
        """Pass one message on; return whether more may come."""
        try:
            message = to_agent(channels.receive(connection, length_of(channels.receive(connection, LENGTH.size))))
        except (OSError, EOFError):
            return False
        except InvalidInputError as error:
            print(f"unicron: {error}", file=sys.stderr)  # noqa: T201 goes to the worker's log
            return False
        if isinstance(message, Raised):
            message = msgspec.structs.replace(message, iteration=self._channel.iteration)
            if is_echo(message):
                self._echo = message
                return True
        if isinstance(message, Iterated | Timed):
            message = msgspec.structs.replace(message, epoch=self._epoch)
        if isinstance(message, Iterated | Timed | Progress | Raised | Pong):
            self._channel.send(message)
        return True


def _signal(child: int, number: signal.Signals) -> None:
    """Send a signal to a program and to all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, number)


def is_echo(raised: Raised) -> bool:
    """Return whether an exception stems from the failure of another rank, which is then the one to heal."""
    if any(text in raised.text for text in OWN_TEXTS):
        return False
    return raised.exception in ECHOES or any(text in raised.text for text in ECHO_TEXTS)


def free_port(host: str) -> int:
    """Return a port of `host` on which nobody listens now."""
    with socket.socket(family(host), socket.SOCK_STREAM) as free:
        free.bind((host, 0))
        return int(free.getsockname()[1])


def variables_of(rank: int, places: list[Place], task: str) -> dict[str, str]:
    """Return a rank's environment variables: torchrun's and, for JAX, its coordinator's.

    All ranks of a node see the devices of all of them, and each takes the one that its local rank names.

    Args:
        rank: of the program.
        places: of all ranks.
        task: name of the task.
    """
    first = places[0]
    node = places[rank].node
    here = [number for number, each in enumerate(places) if each.node == node]
    nodes = list(dict.fromkeys(each.node for each in places))
    local = here.index(rank)
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": len(places),
        "LOCAL_RANK": local,
        "LOCAL_WORLD_SIZE": len(here),
        "GROUP_RANK": nodes.index(node),
        "GROUP_WORLD_SIZE": len(nodes),
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": len(places),
        "MASTER_PORT": first.store,
        "TORCHELASTIC_RESTART_COUNT": max(each.starts for each in places),  # all ranks have to say the same
        "TORCHELASTIC_MAX_RESTARTS": 10**6,
        "JAX_NUM_PROCESSES": len(places),
        "JAX_PROCESS_ID": rank,
    }
    devices = [places[number].device for number in here if places[number].device]
    return {
        **{name: str(value) for name, value in numbers.items()},
        "MASTER_ADDR": first.host,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": task,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "JAX_COORDINATOR_ADDRESS": str(Address(first.host, first.coordinator)),
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
    }


def execute(command: list[str]) -> Any:
    """Be a program that is no Python."""
    try:
        os.execvp(command[0], command)  # noqa: S606 the user's own program, with no shell in between
    except OSError as error:
        print(f"unicron: {json.dumps(command[0])}: {error.strerror}", file=sys.stderr)  # noqa: T201 goes to the log
        return 127
