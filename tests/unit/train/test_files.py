"""A new rank makes and empties no file that the others have, and its own is where the lost rank's was."""

import io
import os
import shutil
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from unicron.train.carry.files import FILE, Files
from unicron.train.carry.kinds import NotCarriedError
from unicron.train.carry.newer_files import FilesRead, born_at
from unicron.train.carry.own_folders import OwnFolders
from unicron.train.carry.variables import NAME

SCRIPT = """
import os, shutil
from pathlib import Path

os.mkdir(folder / "made")
log, more = open(folder / "log", "w"), open(folder / "more", "a")
own = open(folder / f"own-{fresh}", "w")  # as those are that have a process's number in their name
with (folder / "config").open("w") as out:
    out.write("first" if fresh else "second")
Path(folder / "gone").unlink(missing_ok=True)
shutil.rmtree(folder / "old", ignore_errors=True)
log.write("begins\\n")
more.write("begins\\n")
"""


@pytest.fixture(autouse=True)
def _all_is_put_back(monkeypatch):
    for module, names in (
        (os, ("remove", "unlink", "rmdir", "rename", "replace", "mkdir")),
        (shutil, ("rmtree", "move")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr("builtins.open", open)
    monkeypatch.setattr(io, "open", io.open)


def run(folder, *, first, late=False):
    files, variables = Files(first=first), {"folder": folder, "fresh": first, NAME: None, "__name__": "__main__"}
    if files.diverts_writes:
        files.install()
        files.set_joins_late(late=late) if late else None
    exec(SCRIPT, variables)
    return files, variables["log"], variables["more"], variables["own"]


def first_rank(folder):
    """Run the script as one of the first, up to its loop and some lines on; return the states of its files."""
    _, log, more, own = run(folder, first=True)
    (folder / "gone").write_text("kept")
    (folder / "old").mkdir()
    log.write("1\n2\n")
    own.write("1\n")
    states = FILE.state(log), FILE.state(more), FILE.state(own)
    log.write("3, and then it is lost")
    own.write("2, and then it is lost")
    log.close(), more.close(), own.close()
    return states


def test_a_new_rank_goes_on_in_its_files_and_leaves_all_others_alone(tmp_path, capfd):
    states = first_rank(tmp_path)
    files, log, more, own = run(tmp_path, first=False, late=True)
    log.write("of no interest")
    FILE.set_state(log, (states[0][0], "w", 3, False))  # on the way, at the head of a loop around
    for each, state in zip((log, more, own), states, strict=True):
        FILE.set_state(each, state)
    files.write_in_place()
    log.write("3\n")
    more.write("3\n")
    own.write("2\n")
    assert FILE.state(own)[0] == states[2][0], "so that a rank which replaces this one goes on there, too"
    log.close(), more.close(), own.close()
    assert (tmp_path / "log").read_text() == "begins\n1\n2\n3\n"
    assert (tmp_path / "own-True").read_text() == "1\n2\n", "where it was cut off, nothing of the lost rank's is left"
    assert (tmp_path / "more").read_text() == "begins\n3\n"
    assert ((tmp_path / "config").read_text(), (tmp_path / "gone").read_text()) == ("first", "kept")
    assert (tmp_path / "old").is_dir()
    assert f"unlink({str(tmp_path / 'gone')!r}) is skipped" in capfd.readouterr().err
    with Path(tmp_path / "log").open("w") as again:
        again.write("anew")
    assert (tmp_path / "log").read_text() == "anew", "from then on all is as ever"


def test_where_nobody_is_in_a_loop_all_is_as_the_script_has_it(tmp_path):
    first_rank(tmp_path)
    shutil.rmtree(tmp_path / "made")
    files, log, more, _ = run(tmp_path, first=False)
    files.set_joins_late(late=False)
    log.write("1\n")
    log.close(), more.close()
    assert (tmp_path / "log").read_text() == "begins\n1\n"
    assert (tmp_path / "config").read_text() == "second"
    assert not (tmp_path / "gone").exists()
    assert not (tmp_path / "old").exists()


OWN = """
import os, shutil, tempfile
from pathlib import Path

os.mkdir(folder / f"cache-{number}")
for path in (folder / f"cache-{number}" / "part", folder / f"part-{number}"):
    with path.open("w") as file:
        file.write("some")
    with path.open("a") as file:
        file.write(" and more")
os.close(os.open(folder / f"lock-{number}", os.O_CREAT))
found = (folder / f"part-{number}").read_text(), (folder / f"cache-{number}" / "part").read_text()
os.replace(folder / f"part-{number}", folder / f"whole-{number}")
shutil.move(folder / f"cache-{number}" / "part", folder / "all")
os.unlink(folder / f"lock-{number}")
os.rename(folder / f"whole-{number}", folder / "latest")
shutil.rmtree(folder / f"cache-{number}")
"""


def test_what_a_new_rank_has_made_itself_is_its_own_and_takes_no_place_of_the_others(tmp_path):
    for number in (1, 2):
        files = Files(first=number == 1)
        if files.diverts_writes:
            files.install()
            files.set_joins_late(late=True)
        variables = {"folder": tmp_path, "number": number, NAME: None, "__name__": "__main__"}
        exec(OWN, variables)
        assert variables["found"] == ("some and more", "some and more")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["all", "latest", "whole-2"]


LOOKS = """
import glob, os, shutil
from pathlib import Path

def tries(how):
    try:
        return how()
    except FileNotFoundError:
        return None

found = {
    name: [
        os.path.exists(folder / name), os.path.lexists(folder / name), (folder / name).exists(),
        os.access(folder / name, os.R_OK),
        name in os.listdir(folder), name in [each.name for each in folder.iterdir()],
        name in [each.name for each in os.scandir(folder)], bool(glob.glob(f"{folder}/{name}")),
        any(name in [*folders, *files] for _, folders, files in os.walk(folder)),
        tries(lambda: (folder / name).stat()) is not None,
    ]
    for name in ("older", "newer", "folder-older", "folder-newer", "latest", "mine")
}
opened = {name: tries(lambda: open(folder / name).close() or True) for name in ("older", "newer", "latest", "mine")}
tries(lambda: os.remove(folder / "newer"))
(folder / "newer").write_text("another")
exec('os.makedirs(folder / "folder-newer", exist_ok=True)', {"os": os, "folder": folder, "__name__": "library"})
assert os.path.isdir(folder / "folder-newer")
"""


PACKAGES = "from importlib.metadata import distributions; [*distributions"
"""Looks for installed packages, which libraries do as they are imported: beside the script, too."""


@pytest.fixture
def _looks_are_put_back(monkeypatch):
    for name in ("stat", "lstat", "access", "open", "readlink", "listdir", "scandir", "mkdir"):
        monkeypatch.setattr(os, name, getattr(os, name))


def tick():
    """Return a moment between what a file system has made before and what it makes then: its clock goes in steps."""
    time.sleep(0.02)
    now = time.time()
    time.sleep(0.02)
    return now


@pytest.mark.usefixtures("_looks_are_put_back")
def test_what_was_made_since_the_loops_began_is_not_there_for_a_new_rank_and_stays_as_it_is(tmp_path):
    (tmp_path / "older").write_text("x")
    (tmp_path / "folder-older").mkdir()
    if born_at(tmp_path / "older") is None:
        pytest.skip("this file system does not know when a file was made")
    began = tick()
    (tmp_path / "newer").write_text("y")
    (tmp_path / "folder-newer").mkdir()
    (tmp_path / "latest").symlink_to(tmp_path / "newer")
    (tmp_path / "older").write_text("written to later")
    tick()
    files = Files(first=False)
    files.install()
    files.set_joins_late(late=True)
    files.hide_made_since(began)
    tick()
    (tmp_path / "mine").write_text("z")
    variables = {"folder": tmp_path, NAME: None, "__name__": "__main__"}
    exec(LOOKS, variables)
    if not (child := os.fork()):  # such as a loader's worker, which lives on behind the takeover
        os._exit(not (tmp_path / "newer").exists())
    assert os.waitpid(child, 0)[1] == 0
    there = {name: all(found) for name, found in variables["found"].items()}
    assert there == {name: any(found) for name, found in variables["found"].items()}, "whoever asks is told the same"
    assert [name for name in there if there[name]] == ["older", "folder-older", "mine"]
    assert variables["opened"] == {"older": True, "newer": None, "latest": None, "mine": True}
    (tmp_path / "folder-newer" / "more").mkdir()  # what this process makes is there
    files.check_begin()
    files.write_in_place()
    assert (tmp_path / "newer").read_text() == "y"
    assert (tmp_path / "folder-newer").is_dir()


@pytest.mark.usefixtures("_looks_are_put_back")
@pytest.mark.parametrize("always", [False, True])
def test_where_all_begin_anew_what_was_made_is_there_once_it_is_made_anew_and_when_loops_begin(tmp_path, always):
    began = tick()
    for name in ("checkpoint", "data", "lock"):
        (tmp_path / name).write_text("of loops")
    (tmp_path / "cache").mkdir()
    if born_at(tmp_path / "data") is None:
        pytest.skip("this file system does not know when a file was made")
    tick()
    files = Files(first=False, anew=[began, 5.0], always=always)
    files.begin()
    if always:
        assert not (tmp_path / "checkpoint").exists()
    files.set_joins_late(late=False)  # behind init_process_group
    files.begin_anew()
    assert not (tmp_path / "checkpoint").exists()
    assert not [*tmp_path.iterdir()]
    if not (other := os.fork()):  # another rank makes what all read
        theirs = Files(first=False, anew=[began, 5.0], always=True)
        theirs.begin()
        (tmp_path / "cache").mkdir()
        with (tmp_path / "lock").open("a"):
            os._exit((tmp_path / "data").write_text("anew") != 4)
    assert os.waitpid(other, 0)[1] == 0
    assert (tmp_path / "data").read_text() == "anew"
    assert {each.name for each in tmp_path.iterdir()} == {"cache", "data", "lock"}
    assert files.begins_anew
    assert files.begin_loops() == 5.0, "for who comes later there is what was made on the way there"
    files.end()
    assert (tmp_path / "checkpoint").read_text() == "of loops"


@pytest.mark.usefixtures("_looks_are_put_back")
@pytest.mark.parametrize(
    "ask",
    [
        *('os.path.exists(folder / "newer")', 'os.access(folder / "newer", os.R_OK)', 'open(folder / "newer").close()'),
        *("os.listdir(folder)", "[*os.walk(folder)]", 'glob.glob(f"{folder}/n*")', '(folder / "newer").is_file()'),
        *('os.path.realpath(folder / "newer")', '(folder / "newer").resolve()', 'os.path.realpath(folder / "link")'),
        *('os.path.exists(folder / "older")', 'os.listdir(folder / "other")', f"{PACKAGES}(path=[str(folder)])]"),
    ],
)
def test_who_has_found_a_newer_file_before_that_was_known_finds_all_and_takes_no_place(tmp_path, ask):
    (tmp_path / "older").write_text("x")
    (tmp_path / "other").mkdir()
    if born_at(tmp_path / "older") is None:
        pytest.skip("this file system does not know when a file was made")
    began = tick()
    (tmp_path / "newer").write_text("y")
    (tmp_path / "link").symlink_to("older")
    tick()
    files = Files(first=False)
    files.install()
    files.begin()
    exec(f"import glob, os\n{ask}", {"folder": tmp_path, NAME: None, "__name__": "__main__"})
    files.set_joins_late(late=True)
    files.hide_made_since(began)
    found = {"is_there": os.path, "folder": tmp_path, "__name__": "__main__"}
    exec("found = is_there.exists(folder / 'newer')", found)
    files.write_in_place()
    files.read.end()
    with (
        pytest.raises(NotCarriedError, match=f"looked for {tmp_path}/(newer|link) before")
        if found["found"]
        else nullcontext()
    ):
        files.check_begin()
    harmless = ('"older"', '"other"', PACKAGES, 'realpath(folder / "newer")', "resolve()")
    assert found["found"] == all(each not in ask for each in harmless)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ("write_text('other')", True),
        ("unlink()", True),
        ("unlink(), __import__('os').mkfifo(path)", True),
        ("rename(path.with_name('moved'))", True),
        ("exists()", False),
        ("write_text('first')", False),
        ("with_name('same').rename(path)", False),
    ],
)
def test_a_file_that_was_read_before_the_loops_and_has_other_contents_now_is_named(
    tmp_path, monkeypatch, change, names
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    path, read = tmp_path / "checkpoint", FilesRead()
    for each in (path, tmp_path / "log", tmp_path / "later", tmp_path / "same"):
        each.write_text("first")
    read.begin()
    exec("open(path).read(); open(path.with_name('log'), 'a').write('more')", {"path": path, "__name__": "__main__"})
    read.end()
    exec("open(path).read()", {"path": tmp_path / "later", "__name__": "__main__"})
    (tmp_path / "later").write_text("other")
    exec(f"path.{change}", {"path": path})
    assert (str(path) in read.changed_reason()) == names


@pytest.mark.parametrize("make", ["tempfile.mkdtemp()", "tempfile.TemporaryDirectory()"])
@pytest.mark.parametrize(("whose", "named"), [({NAME: None}, True), ({}, False)], ids=["script", "library"])
def test_a_temporary_folder_that_the_loop_has_put_files_into_is_named(tmp_path, monkeypatch, make, whose, named):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("tempfile.mkdtemp", tempfile.mkdtemp)
    folders, variables = OwnFolders(), {"tempfile": tempfile, "__name__": "__main__", **whose}
    folders.begin()
    exec(f"kept = {make}; path = getattr(kept, 'name', kept); open(path + '/before', 'w').close()", variables)
    assert folders.written() == folders.written() == ""
    tick()
    (Path(variables["path"]) / "of the loop").write_text("x")
    assert (variables["path"] in folders.written()) == named
