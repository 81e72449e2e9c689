"""Any text in any place of a file that we write is read back equal by the program that reads the file, or refused."""

import json
import os
import shlex
import socket
import string
import subprocess
import sys
import tomllib
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from helpers.ports import free_port
from helpers.waiting import block_until
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unicron_deploy.nats_server import config_text, find_binary
from unicron_deploy.production import hosts, layout
from unicron_deploy.quoting import environment_file, nats_include, nats_string
from unicron_deploy.slurm.script import batch_script
from unicron_provisioner.providers.slurm import machine_script

from unicron.errors import InvalidInputError
from unicron.slurm.tools import literal

# what some grammar tells apart from letters, often; and everything else
SPECIAL = st.sampled_from("\"'\\$`#%{}[]()!&;|<>*?~=:,@ \t\n\r\x01\x1b\x7fuxü漢🙂\udcff" + string.digits)
ANY = st.text(SPECIAL | st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
NAMES = ANY.filter(lambda name: name not in {"", ".", ".."} and "/" not in name)


def log_in(port, password):
    """Return what a server says to a client with this password."""
    with closing(socket.create_connection(("127.0.0.1", port))) as end, end.makefile("rb") as told:
        told.readline()
        named = json.dumps({"user": "u", "pass": password, "verbose": False}, ensure_ascii=False)
        end.sendall(os.fsencode(f"CONNECT {named}\r\nPING\r\n"))
        return told.readline()


@settings(max_examples=6)
@given(store=NAMES, log=NAMES, accounts=NAMES, password=ANY.filter(bool))
@example(store="ü", log="\u2028 \x7f", accounts="a\\b c", password='"\\u00fc')
def test_nats_server_reads_what_was_written(store, log, accounts, password):
    with TemporaryDirectory() as made, ExitStack() as ending:
        folder, port = Path(made), free_port()
        who = f"authorization {{ user: u, password: {nats_string(password)} }}"
        (folder / accounts).write_bytes(os.fsencode(who))
        try:
            nats_include(accounts)
        except InvalidInputError:
            assert {"'", '"'} <= set(accounts)
            return
        text = config_text(str(folder / store), "127.0.0.1", port, accounts=Path(accounts), log=folder / f"{log}.log")
        (folder / f"{store}.conf").write_bytes(os.fsencode(text))
        server = subprocess.Popen([find_binary(), "-c", folder / f"{store}.conf"], stderr=subprocess.DEVNULL)
        ending.callback(server.wait)
        ending.callback(server.kill)

        def answers():
            return server.poll() is not None or socket.socket().connect_ex(("127.0.0.1", port)) == 0

        block_until(answers)
        assert server.poll() is None
        assert "\udcff" in password or log_in(port, password) == b"PONG\r\n"
        assert {path.name for path in folder.iterdir()} == {store, f"{log}.log", f"{store}.conf", accounts}


@settings(max_examples=10)
@given(words=st.lists(ANY, min_size=1))
def test_a_shell_reads_the_words_of_a_command(words):
    script = batch_script(["printf", "%s\\0", "-", *words])
    told = subprocess.run(["sh"], input=os.fsencode(script), stdout=subprocess.PIPE, check=True).stdout
    assert told.split(b"\0")[1:-1] == [os.fsencode(word) for word in words]


@settings(max_examples=10)
@given(values=st.lists(ANY, min_size=1), folder=NAMES, python=NAMES)
def test_a_shell_reads_the_settings_of_a_machine(values, folder, python):
    named = {f"UNICRON_{number}": value for number, value in enumerate(values)}
    with TemporaryDirectory() as made, pytest.MonkeyPatch.context() as patch:
        shows = Path(made, python)
        shows.write_text("#!/bin/sh\nenv -0\nprintf 'words=%s\\0' \"$@\"\n")
        shows.chmod(0o700)
        patch.setattr(sys, "executable", str(shows))
        script = os.fsencode(machine_script("m-1", Path("/", folder), named))
        told = subprocess.run(["sh"], input=script, stdout=subprocess.PIPE, check=True).stdout.split(b"\0")[:-1]
    assert told[-1] == os.fsencode(f"words=/{folder}/m-1")
    assert {os.fsencode(f"{name}={value}") for name, value in named.items()} <= set(told)


@given(folder=NAMES)
def test_slurm_reads_the_path_of_an_output(folder):
    try:
        pattern = literal(Path("/", folder))
    except InvalidInputError:
        assert "\\" in folder  # Slurm removes it, and takes none of its own symbols then
    else:
        assert pattern.replace("%%", "") == f"/{folder}".replace("%", "")
        assert pattern.count("%") == 2 * folder.count("%")


@given(value=ANY)
def test_systemd_compose_and_a_shell_read_variables_alike(value):
    """What they agree on is no quotes and no blanks; the rest is refused."""
    try:
        text = environment_file({"UNICRON_X": value})
    except InvalidInputError:
        assert not value.isalnum() or not value.isascii()
    else:
        assert shlex.split(text) == [f"UNICRON_X={value}"]


@settings(max_examples=20)
@given(
    partition=ANY | st.from_regex(r"[A-Za-z0-9-]{1,9}", fullmatch=True),
    folder=NAMES | st.from_regex(r"[\w.-]+", fullmatch=True),
)
def test_the_provisioner_reads_the_partition_and_the_folder_of_a_set_up(partition, folder):
    try:
        found = hosts.checked(["a", "b", "c"], ["n1"], hosts.Kind.SLURM, partition, f"/{folder}")
    except InvalidInputError:
        return
    [pools] = [
        text for path, text in layout.texts(found).items() if path.startswith("a/") and path.endswith("pools.toml")
    ]
    pool = tomllib.loads(pools)["pool"][partition]["slurm"]
    assert (pool["partition"], pool["keys"]) == (partition, f"/{folder}/keys")
