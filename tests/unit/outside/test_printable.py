"""Text from elsewhere on a terminal, in a table and in a log."""

import getpass
import io
import logging
import os
import socket
import subprocess
import sys

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text
from unicron_cli.output import console, say, to_json

from unicron import codec
from unicron.contracts.queries import DrainNode
from unicron.printable import listed, one_line, printable, shown
from unicron.service.bootstrap import own_name
from unicron.service.runner import set_up_logging

EVIL = "\x1b]0;pwned\x07\x9b2J\u202egpt\r\x7f"
TAMED = r"\u001b]0;pwned\u0007\u009b2J\u202egpt\u000d\u007f"


@pytest.mark.parametrize("plain", ["gpt", "a\tb\nc", "Übung 火 😀", "é\u200d"])
def test_what_people_write_stays_as_it_is(plain):
    assert printable(plain) == plain


def test_control_characters_are_shown():
    assert printable(EVIL) == TAMED
    assert printable("\ud83d") == r"\ud83d"
    assert one_line("a\nb") == r"a\nb"


def test_values_and_lists_of_problems_are_cut():
    assert len(shown("a" * 10_000)) < 200
    assert len(shown([["a" * 10_000] * 1000] * 1000)) < 2000
    assert listed([str(number) for number in range(25)]).splitlines()[-2:] == ["19", "... and 5 more like these"]
    assert listed(["a", "b"]) == "a\nb"


def test_commands_print_no_control_character_from_elsewhere(capsys):
    say(EVIL)
    table = Table()
    table.add_column("task")
    table.add_row(Text(EVIL, "red"))
    console().print(table)
    printed = capsys.readouterr().out
    assert printed.count(r"\u001b") == 2
    assert not set(printed) & set("\x1b\x07\x9b\u202e\r\x7f")
    assert to_json({"task": "\x9b\u202e"}) == r'{"task":"\u009b\u202e"}'


def test_colours_of_our_own_stay(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    screen = console()
    screen.file = io.StringIO()
    screen.print(Text(EVIL, "red"))
    theirs = Console(file=io.StringIO(), force_terminal=True)
    theirs.print(Text(TAMED, "red"))
    assert "\x1b[" in screen.file.getvalue()
    assert "pwned" in screen.file.getvalue()
    assert "\x07" not in screen.file.getvalue()


def test_brackets_in_a_text_are_shown_and_no_style(capsys):
    texts = "RuntimeError: [/__w/gloo/pair.cc:553] closed", "[rank1]:I1124 [red]"
    table = Table("reason")
    for text in texts:
        console().print(text)
        table.add_row(text)
    console().print(table)
    printed = capsys.readouterr().out
    assert [printed.count(text) for text in texts] == [2, 2]


def test_an_error_that_quotes_a_file_does_not_steer_the_terminal(tmp_path):
    path = tmp_path / "task.yaml"
    path.write_bytes(b'"a\\e]0;pwned\\a": 1\n')
    ran = subprocess.run([sys.executable, "-m", "unicron_cli", "submit", str(path)], capture_output=True, check=False)
    assert ran.returncode == 1
    assert b"pwned" in ran.stderr
    assert b"\x1b" not in ran.stderr


def test_a_text_in_the_log_passes_for_no_other_line_of_it(capsys):
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        set_up_logging("info", "test")
        logging.getLogger("a").warning("node %s is gone", "x\n2026-11-21 10:00:00 registry INFO all is well\x1b[1A")
        try:
            int("bad\u202e")
        except ValueError:
            logging.getLogger("a").exception("it failed")
    finally:
        root.handlers[:], root.level = before, level
    printed = capsys.readouterr().err
    assert printed.splitlines()[0].endswith(r"node x\n2026-11-21 10:00:00 registry INFO all is well\u001b[1A is gone")
    assert "\x1b" not in printed
    assert "bad\u202e" not in printed


@pytest.mark.parametrize("user", ["ada", "Åda", "a\x1b[2J\tb\nc\udcff", "x" * 999])
def test_whoever_runs_a_process_has_a_name_that_an_order_may_bear(user, monkeypatch):
    monkeypatch.setattr(getpass, "getuser", lambda: user)
    order = DrainNode(node="n1", by=own_name())
    assert codec.decode_query(codec.encode(order)) == order
    assert order.by.startswith(user[:1])


def test_a_user_without_a_name_is_a_number(monkeypatch):
    def unknown():
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(getpass, "getuser", unknown)
    assert own_name() == f"{os.getuid()}@{socket.gethostname()}"
