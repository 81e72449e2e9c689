"""Every process of a cluster begins and is refused in the same way, and listens to what its core handles."""

import importlib
import os
import sys

import pytest

from unicron import codec, subjects
from unicron.contracts.base import LOCAL, Message
from unicron.contracts.events import Alert
from unicron.contracts.queries import InjectFault
from unicron.services import CONSOLE, NAMED
from unicron.settings import PREFIX, Settings

PROCESSES = {**{name: name for name in (*NAMED, CONSOLE)}, "agent": "unicron-agent"}


@pytest.fixture(params=PROCESSES)
def start(request, monkeypatch, capsys):
    """Run a process in this one; return its name, its exit status and what it wrote."""
    for name in list(os.environ):
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)
    module = importlib.import_module(f"unicron_{request.param}.main")

    def run(*flags, **environ):
        monkeypatch.setattr(sys, "argv", [request.param, *flags])
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        try:
            status = module.main()
        except SystemExit as ended:
            status = ended.code
        return PROCESSES[request.param], status, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("name", "value", "cure"),
    [
        ("LEASE_TTL_S", "abc", "--lease-ttl-s"),
        ("LEASE_TTL_S", "0", "use at least 0.1 s"),
        ("LOG_LEVEL", "loud", "use one of debug, info"),
        ("NATS_CA", "/no/such/file", "give the path of a readable file"),
    ],
)
def test_a_bad_setting_is_one_line_with_process_setting_and_cure(start, name, value, cure):
    process, status, error = start(**{f"{PREFIX}{name}": value})
    assert status == 1
    (line,) = error.splitlines()
    assert line.startswith(f"{process}: {PREFIX}{name}")
    assert value in line
    assert cure in line


def test_a_flag_that_does_not_exist_ends_with_the_usage(start):
    _, status, error = start("--lease-tll-s", "2")
    assert status == 2
    assert "--lease-ttl-s" in error
    assert "Traceback" not in error


def wired(name):
    module = importlib.import_module(f"unicron_{name}.main")
    kinds = [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, Settings)]
    (kind,) = {*kinds} - {Settings}
    return module.wiring(kind())


@pytest.mark.parametrize("name", NAMED)
def test_a_service_is_wired_under_its_name_and_listens_to_what_its_core_handles(name):
    wiring = wired(name)
    core = wiring.core(None)
    assert wiring.name == name
    bus = {kind for kind in core.handlers if kind not in LOCAL}
    assert bus <= set(codec.MESSAGES.values())
    facts = {text for text in subjects.events(*bus) if ".tel." not in text}
    every = {subjects.FACTS} | {text for text in facts if ".evt." not in text}
    assert set(wiring.facts) == (every if name == "registry" else facts)
    assert set(wiring.telemetry) >= set(subjects.events(*bus)) - facts


@pytest.mark.parametrize("name", NAMED)
def test_what_no_handler_is_for_changes_nothing(name):
    core = wired(name).core(None)
    assert core.handle(Alert(text="nobody handles this")) == []
    assert core.handle(Message()) == []


@pytest.mark.parametrize("name", NAMED)
def test_a_query_that_a_service_does_not_know_is_refused_with_those_that_it_does(name):
    core = wired(name).core(None)
    reply, out = core.answer(InjectFault(fault="x"))
    assert "does not answer InjectFault; it answers" in reply.error
    assert all(kind.__name__ in reply.error for kind in core.answers)
    assert out == []
