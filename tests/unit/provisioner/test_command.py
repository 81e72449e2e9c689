"""A program that gives machines: what it says is checked, and refused by field, with the cure."""

import sys

import pytest
from unicron_provisioner.callers import checked
from unicron_provisioner.config import load
from unicron_provisioner.main import ProvisionerSettings, wiring
from unicron_provisioner.providers.protocol import MachineRequest, ProviderError, QuotaError, RefusedError

from unicron.contracts.base import MachineReport
from unicron.contracts.queries import GetPools
from unicron.errors import InvalidInputError

REQUEST = MachineRequest(machine="p-1", pool="p")


def provider(folder, body):
    """Return the provider of a program with this body."""
    program = folder / "give"
    program.write_text(f"#!{sys.executable}\nimport sys, json\nverb = sys.argv[1]\n{body}\n")
    program.chmod(0o700)
    (folder / "pools.toml").write_text(
        '[pool.p]\nprovider = "command"\nmax = 3\n[pool.p.command]\nprogram = ["give"]\n'
    )
    return load(str(folder / "pools.toml"), "nats://x")["p"].provider


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        pytest.param("", "Input data was truncated", id="nothing"),
        pytest.param("machines: none", "JSON is malformed", id="no-json"),
        pytest.param('{"machines": [{"machine": 7, "state": "running"}]}', r"machines\[0\].machine", id="type"),
        pytest.param('{"machines": [{"machine": "p-1", "state": "gone"}]}', r"machines\[0\].state", id="word"),
        pytest.param('{"machines": [{"machine": "../x", "state": "ended"}]}', r"machines\[0\].machine", id="path"),
        pytest.param('{"machines": [{"state": "ended"}]}', "missing required field `machine`", id="missing"),
        pytest.param("[]", "Expected `object`, got `array`", id="list"),
    ],
)
async def test_a_list_that_is_none_is_refused_by_field(tmp_path, answer, words):
    with pytest.raises(ProviderError, match=words):
        await provider(tmp_path, f"print({answer!r})").list()


@pytest.mark.parametrize(
    ("status", "error", "words"),
    [
        (75, QuotaError, "give ask: no more"),
        (77, RefusedError, "give ask: no more"),
        (1, ProviderError, r"no more \(exit status 1\); it is to exit with 0, 75 or 77"),
    ],
)
async def test_how_it_exits_says_whether_it_has_done_it(tmp_path, status, error, words):
    made = provider(tmp_path, f"print('first'); print('no more', file=sys.stderr); sys.exit({status})")
    with pytest.raises(error, match=words) as caught:
        await made.ask(REQUEST)
    assert type(caught.value) is error


async def test_it_is_told_what_it_is_asked_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("UNICRON_NATS_NKEY", "/the/provisioners/key")
    out = tmp_path / "told"
    body = f"import os; open({str(out)!r}, 'w').write(sys.stdin.read() + str(os.environ.get('UNICRON_NATS_NKEY')))"
    await provider(tmp_path, body).ask(REQUEST)
    assert out.read_text().startswith('{"pool":"p","machine":"p-1","slots":1,"rack":"","reason":""}')
    assert out.read_text().endswith("None")


async def test_what_it_writes_without_end_is_refused(tmp_path):
    with pytest.raises(ProviderError, match="writes more than 4194304 bytes"):
        await provider(tmp_path, "while True: print('x' * 65536)").list()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "there is no pool"),
        ("[pools.a]", "pools: there is no such table"),
        ('[pool.a]\nprovider = "cloud"', "provider 'cloud': use one of local"),
        ('[pool.a]\nprovider = "local"', "missing required field `max`"),
        ('[pool.a]\nprovider = "local"\nmax = 1\nmin = 2', "min 2 is more than max 1"),
        ("[pool.a]\nmax 3", r"\(at line 2, column 5\); mend that line"),
        ("[pool]", "there is no pool: write a table"),
        ("pool.a = 3", r"pool.a: write a table, as \[pool.a\]"),
        ("[pool.a]\nmax = 3", "provider None: use one of local"),
        ('[pool.a]\nprovider = "local"\nmax = 1\nspares = -1', "spares: Expected `int` >= 0; mend that entry"),
        ('[pool.a]\nprovider = "local"\nmax = "8"', "max: Expected `int`, got `str`; mend that entry"),
        ('[pool.a]\nprovider = "local"\nmax = 1\n[pool.a.slurm]\npartition = "p"', "slurm: there is no such key"),
        ('[pool.a]\nprovider = "local"\nmax = 1\n[pool.a.local]\nkey = "x"', "unknown field `key`; mend that entry"),
        ('[pool.a]\nprovider = "local"\nmax = 1\nlocal = 3', r"\[pool.a.local\]: Expected `object`, got `int`"),
        ('[pool.a]\nprovider = "slurm"\nmax = 1', r"\[pool.a.slurm\]: .* missing required field `partition`; mend"),
        ('[pool.a]\nprovider = "docker"\nmax = 1', r"\[pool.a.docker\]: .* missing required field `image`; mend"),
        ('[pool.a]\nprovider = "command"\nmax = 1\n[pool.a.command]\nprogram = []', "program: Expected `array` of"),
        ('[pool.a]\nprovider = "local"\nmax = -1', "max: Expected `int` >= 1"),
        ('[pool.a]\nprovider = "local"\nmax = 1\nsize = 3', "size: there is no such key"),
        ('[pool.a_b]\nprovider = "local"\nmax = 1', r"\[pool.a_b\] name"),
        ('[pool.a]\nprovider = "local"\nmax = 1\ndeadline_s = 0', "deadline_s: Expected `float` > 0"),
        ('[pool.a]\nprovider = "local"\nmax = 1\n[pool.a.local]\nkeys = "none"', "no folder there"),
        ('[pool.a]\nprovider = "command"\nmax = 1\n[pool.a.command]\nprogram = ["x"]', "no file there that we may"),
        ('[pool.a]\nprovider = "docker"\nmax = 1\n[pool.a.docker]\nimage = 3', r"\[pool.a.docker\] image"),
    ],
)
def test_a_file_of_pools_that_cant_be_used_is_refused_with_the_place(tmp_path, text, words):
    path = tmp_path / "pools.toml"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=words):
        load(str(path), "nats://x")


def test_what_is_no_list_of_machines_is_refused_whoever_says_it():
    good = MachineReport(machine="p-1", state="running")
    assert checked([good]) == [good]
    for bad in (None, ["p-1"], [MachineReport(machine="a b", state="running")], {"p-1": 1}):
        with pytest.raises(ProviderError, match="mend the provider"):
            checked(bad)


def test_a_cluster_that_only_observes_has_pools_that_do(tmp_path):
    provider(tmp_path, "")
    for observe in (True, False):
        settings = ProvisionerSettings(pools=str(tmp_path / "pools.toml"), observe_only=observe)
        reply, _ = wiring(settings).core(None).answer(GetPools())
        assert [view.pool.observe for view in reply.pools.pools] == [observe]
