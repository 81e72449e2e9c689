"""The files of an image, gathered on this machine."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from helpers import ROOT

SPEC = importlib.util.spec_from_file_location("image", ROOT / "deploy" / "image.py")
image = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(image)

ENCODE = "import sys; sys.path.insert(0, sys.argv[1]); import msgspec; print(msgspec.json.encode([1]).decode())"


def tables(path: Path) -> int:
    """Return how many sections a shared object says it has."""
    return int.from_bytes(path.read_bytes()[60:62], "little")


def test_packages_work_without_what_is_cut_off(tmp_path):
    copy = shutil.copytree(Path(msgspec.__file__).parent, tmp_path / "msgspec")
    (core,) = copy.glob("_core*.so")
    size = core.stat().st_size
    for name in ("tests", "inner/tests"):
        (copy / name).mkdir(parents=True)
        (copy / name / "test_it.py").touch()
    for name in ("a.h", "b.c", "c.pyx", "d.pyi", "kept.py", "kept.json"):
        (copy / name).touch()
    assert tables(core)
    image.prune(tmp_path)
    assert (core.stat().st_size < size, tables(core)) == (True, 0)
    left = {path.name for path in copy.rglob("*")}
    assert {"kept.py", "kept.json", "inner"} <= left
    assert not left & {"tests", "a.h", "b.c", "c.pyx", "d.pyi"}
    done = subprocess.run([sys.executable, "-I", "-c", ENCODE, tmp_path], capture_output=True, check=False)
    assert done.stdout == b"[1]\n", done.stderr.decode()
    after = core.read_bytes()
    image.strip(core)
    assert core.read_bytes() == after


def test_what_is_no_shared_object_stays_as_it_is(tmp_path):
    script = tmp_path / "linked.so.txt"
    script.write_bytes(b"GROUP ( libc.so.6 )" * 9)
    image.strip(script)
    assert script.read_bytes() == b"GROUP ( libc.so.6 )" * 9


def test_the_libraries_that_python_is_linked_to_are_found():
    found = {path.name for path in image.linked([Path(sys.executable).resolve()])}
    assert any(name.startswith("libc.so") for name in found)
    assert any(name.startswith("ld-linux") for name in found)
    assert all(path.is_file() for path in image.linked([Path(sys.executable).resolve()]))


def test_the_library_comes_without_what_installs_or_tests(tmp_path):
    names = {path.name for path in image.library(tmp_path).iterdir()}
    assert {"asyncio", "ssl.py", "lib-dynload", "encodings"} <= names
    assert not names & {"test", "ensurepip", "idlelib", "tkinter", "site-packages", "venv"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_store_is_given_to_the_servers_user_once(tmp_path):
    store = tmp_path / "stores" / "nats"
    (store / "deep").mkdir(parents=True)
    (store / "deep" / "1.blk").touch()
    words = [sys.executable, "-m", "unicron_deploy.keys", "--dir", tmp_path / "keys", "--owner", "10001", "node-1"]
    command = [*words, "--give", tmp_path / "stores"]
    subprocess.run(command, check=True)
    assert {path.stat().st_uid for path in [store, *store.rglob("*")]} == {10001}
    later = store / "2.blk"
    later.touch()
    subprocess.run(command, check=True)
    assert later.stat().st_uid == 0, "a server may be at work there"
