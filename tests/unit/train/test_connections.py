"""Connections of process groups: a machine that goes without a word is noticed by the kernel."""

import contextlib
import gc
import os
import resource
import socket
import subprocess
import sys
import textwrap

import pytest

from unicron.errors import GroupBrokenError, tells_lack
from unicron.train.groups.connections import Connections
from unicron.train.groups.sockets import PROBE_S, PROBES, QUIET_S, wait_for_end


@contextlib.contextmanager
def connected():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            yield one, other


def probed(connection):
    return connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


def test_what_is_connected_while_groups_form_is_probed_and_nothing_else():
    with connected() as older:
        connections = Connections()
        with contextlib.ExitStack() as stack:
            with connections.forming(0):
                own = stack.enter_context(connected())
            assert all(map(probed, own))
            limit = own[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert limit == 1000 * (QUIET_S + PROBE_S * PROBES)
        assert not any(map(probed, older))


def test_those_that_were_never_formed_are_not_cut_and_leave_nothing_to_wait_for():
    connections = Connections()
    assert not connections.cut_below(5)
    with connected(), connections.forming(1):
        pass
    assert not connections.cut_below(1)
    assert connections.cut_below(2)


def test_a_machine_without_descriptors_is_named_with_the_cure_and_ends_no_process():
    connections = Connections()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(GroupBrokenError) as raised, connections.forming(0):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert tells_lack(str(raised.value))
    assert "raise `ulimit -n`" in str(raised.value)


@pytest.mark.parametrize("end", ["socket: Too many open files", "connect: Cannot assign requested address"])
def test_what_gloo_says_of_a_lack_is_told_with_the_cure(end):
    def connect():
        raise RuntimeError(f"[enforce fail at gloo/transport/tcp/socket.cc:24] rv != -1. -1 vs -1. {end}")

    with pytest.raises(GroupBrokenError) as raised:
        Connections()._connect_interruptibly(connect)
    assert end in str(raised.value)
    assert tells_lack(str(raised.value))


LOST = """
    import socket, subprocess, sys, time
    from unicron.train.groups import sockets
    from unicron.train.groups.connections import Connections

    sockets.QUIET_S, sockets.PROBE_S, sockets.PROBES = 1, 1, 2
    subprocess.run("ip link set lo up", shell=True, check=True)
    server = socket.create_server(("127.0.0.1", 0))
    with Connections().forming(0):
        one = socket.create_connection(server.getsockname())
    subprocess.run("ip link set lo down", shell=True, check=True)
    try:
        one.recv(1)
    except TimeoutError as error:
        print(error.strerror)
"""


@pytest.mark.slow
def test_who_waits_for_a_machine_that_is_gone_is_told():
    script = ["unshare", "--net", sys.executable, "-c", textwrap.dedent(LOST)]
    if subprocess.run(
        ["unshare", "--net", "ip", "link", "set", "lo", "up"], check=False, capture_output=True
    ).returncode:
        pytest.skip("needs root, unshare and iproute2: a network of its own is taken down")
    told = subprocess.run(script, check=True, capture_output=True, text=True).stdout
    assert told == "Connection timed out\n"


def test_what_a_script_forks_collects_none_of_the_garbage_of_its_parent():
    """There gloo would wait for ever for threads that it does not have."""
    parent = os.getpid()

    class Group:
        def __del__(self):
            if os.getpid() != parent:
                os._exit(1)

    gc.disable()
    try:
        left = Group()
        left.itself = left
        del left
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("end", [0, 1], ids=["here", "there"])
def test_a_connection_that_somebody_has_closed_wait_for_end(end):
    pair = socket.socketpair()
    known = {pair[0].fileno(): f"socket:[{os.fstat(pair[0].fileno()).st_ino}]"}
    changed = os.eventfd(1)
    assert not wait_for_end(known, changed, None)
    assert not wait_for_end(known, changed, 0.0)
    pair[end].close()
    assert wait_for_end(known, changed, None)
    os.close(changed)
