"""A drill's parts: what is recorded, how a process on trial is started and confined, what becomes of its verdict."""

import contextlib
import inspect
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from unicron.contracts.worker import Drilled
from unicron.errors import InvalidInputError
from unicron.snapshots.memory import FOLDER_VARIABLE
from unicron.snapshots.trials import OUTCOME, Trial
from unicron.train.carry.kinds import NotCarriedError
from unicron.train.carry.variables import NAME
from unicron.train.groups.switched import Work
from unicron.train.inplace import drill, ghost, launch, sandbox
from unicron.train.inplace.abandon import abandons, end_process
from unicron.train.inplace.files_of_ghost import NOT_THERE, GhostFiles
from unicron.train.inplace.ghost import GhostCore, finish_trial, report_failure, state_difference
from unicron.train.inplace.recording import (
    BEGIN,
    LEAST,
    MOST,
    Called,
    NoRoomError,
    Recorded,
    Recording,
    contribution,
    record_of,
)
from unicron.train.inplace.seed import GHOST, OUTPUT, VERDICT, plant, read_verdict
from unicron.train.inplace.shell import WholeCore
from unicron.train.loops.active_loops import LoopSnapshot

STATE = {"objects": {"model": {"weight": torch.ones(3)}}, "setup": b"setup"}


def snapshot(epoch=0, batch=0):
    return LoopSnapshot([["train.py:3", 0, epoch, 0], ["train.py:5", 0, batch, 2]], [b"", b"at"], [b"outer", b"inner"])


def in_fork(what):
    """Return what a function returns in a fork of this process, which may be confined there."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writer, json.dumps(what()).encode())
        except BaseException as error:  # noqa: BLE001 the test shows it
            os.write(writer, json.dumps(repr(error)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return json.loads(text)


# --- what is recorded -------------------------------------------------------------------------------------------------


def test_a_recording_is_read_as_it_was_made(tmp_path):
    made = Recording(tmp_path / "trial")
    made.begin(2, snapshot(), STATE)
    given, reduced = torch.arange(4.0), torch.arange(4.0) * 2
    made.add_iteration(2, given, reduced)
    made.wait()
    given.zero_()  # from here on it may change
    made.add_collective(called := Called("allreduce", [], []))
    made.keep(called.given, lambda: [torch.ones(1)])
    made.keep(called.left, lambda: [torch.zeros(1)])
    made.end(4, snapshot(1), STATE)
    read = Recorded(tmp_path / "trial")
    assert (read.begin["iteration"], read.end["iteration"], bytes(read.begin["setup"])) == (2, 4, b"setup")
    assert [list(each) for each in record_of(read.end).chain] == list(map(list, snapshot(1).chain))
    assert record_of(read.begin).snapshots == [b"outer", b"inner"]
    assert torch.equal(read.iteration(2)[0], torch.arange(4.0))
    found = read.next_collective()
    assert (found.name, found.given, found.left) == ("allreduce", [torch.ones(1)], [torch.zeros(1)])
    assert read.next_collective() is None
    assert (tmp_path / "trial").stat().st_mode & 0o77 == 0, "nobody else may write what is unpickled"


@pytest.mark.parametrize(
    ("done", "epoch", "enough"),
    [(LEAST - 1, 0, False), (LEAST - 1, 1, False), (LEAST, 0, False), (LEAST, 1, True), (MOST, 0, True)],
)
def test_a_recording_ends_behind_an_epoch_if_one_ends_soon(tmp_path, done, epoch, enough):
    made = Recording(tmp_path / "trial")
    made.begin(5, snapshot(), STATE)
    assert made.is_enough(5 + done, snapshot(epoch)) is enough


def test_without_room_nothing_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(NoRoomError, match="no room for a trial"):
        Recording(tmp_path / "trial").begin(2, snapshot(), STATE)


def test_a_collective_that_is_too_large_is_never_copied(tmp_path):
    made = Recording(tmp_path / "trial")
    kept = []
    made.keep(kept, lambda: [torch.empty(1 << 50, device="meta")])  # which no copy has room for
    assert (kept, made.problem) == ([], "its own collectives take more than 64 MiB")


ONE, TWO = torch.ones(1), torch.ones(2)


@pytest.mark.parametrize(
    ("name", "arguments", "contributed"),
    [
        ("allreduce", ([ONE],), [ONE]),
        ("reduce", ([ONE],), [ONE]),
        ("broadcast", ([ONE], SimpleNamespace(rootRank=0)), []),
        ("broadcast", ([ONE], SimpleNamespace(rootRank=1)), [ONE]),
        ("allgather", ([[ONE, ONE]], [TWO]), [TWO]),
        ("_reduce_scatter_base", (ONE, TWO), [TWO]),
        ("reduce_scatter", ([ONE], [[TWO, TWO]]), [TWO, TWO]),
        ("alltoall_base", (ONE, TWO, [], []), [TWO]),
        ("send", ([ONE], 0, 0), [ONE]),
        ("recv", ([ONE], 0, 0), []),
        ("barrier", (), []),
    ],
)
def test_what_a_rank_contributes_to_a_collective_is_known(name, arguments, contributed):
    found = contribution(name, arguments, rank=1)
    assert len(found) == len(contributed)
    assert all(each is other for each, other in zip(found, contributed, strict=True))


# --- a process on trial -----------------------------------------------------------------------------------------------


def test_a_ghost_is_a_fork_from_before_and_knows_that_it_is_one(tmp_path):
    seen = []

    def run():
        idle = os.sched_getscheduler(0) == os.SCHED_IDLE
        line = f"{os.environ[GHOST]} {len(seen)} {os.nice(0)} {idle} {os.environ.get('UNICRON_WORKER_SOCKET')}\n"
        os.write(1, line.encode())
        return 3

    seed = plant(run)
    seen.append("what came later")
    (tmp_path / "trial").mkdir()
    for is_first in (True, False):
        assert "with exit code 3 before it came there" in seed.run(tmp_path / "trial", is_first=is_first)["problem"]
    seed.cut()
    lines = (tmp_path / "trial" / OUTPUT).read_text().splitlines()
    assert lines == [f"{tmp_path / 'trial'} 0 10 False None", f"{tmp_path / 'trial'} 0 19 True None"]
    assert GHOST not in os.environ


def test_a_ghost_that_is_killed_is_told_as_such(tmp_path):
    (tmp_path / "trial").mkdir()
    seed = plant(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert seed.run(tmp_path / "trial") == {"unproven": "the process on trial was ended by SIGKILL"}
    seed.cut()
    assert seed.run(tmp_path / "trial") == {"unproven": "its trial took too long"}, "there is none any more"


def test_a_second_ghost_shows_what_differs_by_itself(tmp_path):
    (folder := tmp_path / "trial").mkdir()

    def run():
        number = len((folder / OUTPUT).read_text().splitlines())
        os.write(1, b"a ghost\n")
        (folder / VERDICT).write_text(json.dumps([{"again": True}, {"by_itself": ["a clock"]}][number]))

    seed = plant(run)
    assert seed.run(folder) == {"by_itself": ["a clock"]}
    seed.cut()


def worker_that_ends_amid_a_trial(folder, run):
    """Have a worker end while a ghost of it runs; return what both, and their seed, hold open."""
    reader, writer = os.pipe()
    folder.mkdir(exist_ok=True)
    if (worker := os.fork()) == 0:
        os.close(reader)
        seed = plant(run)
        threading.Thread(target=seed.run, args=(folder,), daemon=True).start()
        while not (folder / OUTPUT).exists():
            pass
        os._exit(0)
    os.close(writer)
    os.waitpid(worker, 0)
    return reader


def test_a_seed_ends_with_its_worker_and_takes_its_ghost_along(tmp_path):
    held = worker_that_ends_amid_a_trial(tmp_path / "trial", lambda: threading.Event().wait() or 0)
    assert os.read(held, 1) == b"", "all that held it has ended"


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_ghost_whose_outcome_is_awaited_goes_on_without_its_worker_until_nobody_waits(tmp_path, is_given_up):
    (folder := tmp_path / "trial").mkdir()
    trial, go = Trial(folder), tmp_path / "go"
    trial.begin(Drilled(iteration=2, rank=1, under_way=True))

    def run():
        while not go.exists():
            time.sleep(0.01)
        finish_trial(problem="it has a lock")

    held = worker_that_ends_amid_a_trial(folder, run)
    assert trial.outcome() is None
    if is_given_up:
        trial.remove()
    else:
        go.touch()
    assert os.read(held, 1) == b""
    told = Drilled(iteration=2, rank=1, problem="it has a lock")
    assert trial.outcome() == (None if is_given_up else told)


@pytest.mark.parametrize("left", [b"", b"{", b'{"problem": 3}', b'{"problem": "' + b"x" * (1 << 17) + b'"}'])
def test_an_outcome_that_can_not_be_read_is_none(tmp_path, left):
    trial = Trial(tmp_path)
    trial.begin(Drilled(iteration=2, rank=1, under_way=True))
    (tmp_path / OUTCOME).write_bytes(left)
    assert trial.outcome() is None


@pytest.mark.skipif(sandbox._version() < sandbox.NETWORK_SINCE, reason="this kernel has no Landlock, or an old one")
def test_who_is_confined_writes_nowhere_else_and_connects_to_nobody(tmp_path):
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    allowed.mkdir()
    other.mkdir()
    (other / "there").write_text("as it was")

    def confined():
        assert sandbox.confine_writes([allowed])
        assert sandbox.confine_connections()
        (allowed / "file").write_text("mine")
        attempts = {
            "create": lambda: (other / "new").write_text("x"),
            "write": lambda: (other / "there").write_text("x"),
            "truncate": lambda: os.truncate(other / "there", 0),
            "remove": (other / "there").unlink,
            "rename": lambda: (allowed / "file").rename(other / "moved"),
            "folder": (other / "folder").mkdir,
            "program": lambda: subprocess.run(["cp", allowed / "file", other], check=True, stderr=subprocess.DEVNULL),
            "connect": lambda: __import__("socket").create_connection(("127.0.0.1", 9)),
        }
        done = []
        for name, attempt in attempts.items():
            with contextlib.suppress(PermissionError, subprocess.CalledProcessError):
                attempt()
                done.append(name)
        return done

    assert in_fork(confined) == []
    assert [each.name for each in other.iterdir()] == ["there"]
    assert (other / "there").read_text() == "as it was"
    assert (allowed / "file").read_text() == "mine"


def fails(why):
    raise AssertionError(why)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("os.listdir('.')", "it reads ., which was changed since its trial began"),
        ("[*Path('.').glob('*.pt')]", "it reads ., which was changed"),
        ("open('late')", "it reads late, which was changed"),
        ("open('late', 'w').close(); open('late')", ""),
        (
            "os.makedirs('mine'); os.listdir('mine')",
            "it looks into mine, and the rank has made a folder of another name",
        ),
        ("[*os.scandir('early')], open('early/old').read()", ""),
    ],
)
def test_where_a_ghost_would_find_what_its_rank_has_not_the_trial_shows_nothing(tmp_path, script, told):
    folder, here = tmp_path / "trial", tmp_path / "work"
    (here / "early").mkdir(parents=True)
    (here / "early" / "old").write_text("old")
    folder.mkdir()
    (folder / BEGIN).write_text("")
    os.utime(here / "early", (1, 1))
    os.utime(here / "early" / "old", (1, 1))
    os.utime(folder / BEGIN, (2, 2))
    (here / "late").write_text("written by the rank")

    def look():
        found = []
        os.chdir(here)
        files = GhostFiles(folder, folder / "copies", found.append)
        files.install()
        files.write_in_place()
        with contextlib.suppress(FileNotFoundError):
            exec(script, {"os": os, "Path": Path, NAME: None})
        return found[:1]

    assert [each[: len(told)] for each in in_fork(look)] == [told] * bool(told)


def test_a_file_that_is_gone_no_other_process_finds_either_and_of_later_ones_nobody_knows(tmp_path, monkeypatch):
    def look():
        found = list[dict[str, str]]()
        monkeypatch.setattr(ghost, "finish_trial", lambda **verdict: found.append(verdict))
        os.chdir(tmp_path)
        (tmp_path / "trial").mkdir()
        (tmp_path / "trial" / BEGIN).touch()
        files = GhostFiles(tmp_path / "trial", tmp_path / "trial" / "copies", fails)
        files.install()
        for _ in range(2):
            try:
                exec(compile("\nopen('gone')", "util.py", "exec"), {NAME: None})
            except FileNotFoundError as error:
                report_failure(error)
            files.write_in_place()
        return [[*found[0].items()], [*found[3].items()]]  # nothing ends this process, so more is said each time

    gone = "FileNotFoundError at util.py:2: [Errno 2] No such file or directory: 'gone'"
    first, later = ([tuple(each) for each in verdict] for verdict in in_fork(look))
    cant = "a process on trial can't do what the script does with files or connections"
    assert first == [("problem", f"{gone}, {NOT_THERE}")]
    assert later == [("unproven", f"{cant}: {gone}")]


def test_what_a_ghost_writes_it_reads_again_and_nobody_else(tmp_path):
    folder, here = tmp_path / "trial", tmp_path / "work"
    folder.mkdir()
    here.mkdir()
    (here / "kept").mkdir()
    for name in ("log", "best.pt", "old"):
        (here / name).write_text(name)

    script = """
with open("log", "a") as log:
    log.write(" and more")
torch.save({"lr": 1.0}, "best.pt")
os.replace("best.pt", "renamed.pt")
os.remove("old")
os.makedirs("folder/inner", exist_ok=True)
os.makedirs("kept")  # as the rank has
Path("folder/inner/new").write_text("new")
with os.fdopen(os.open("lock", os.O_CREAT | os.O_RDWR), "w") as lock:
    lock.write("locked")
loaded = torch.load("renamed.pt", weights_only=True)
found = [Path("log").read_text(), loaded, Path("folder/inner/new").read_text(), Path("lock").read_text()]
"""

    def write():
        os.chdir(here)
        files = GhostFiles(folder, folder / "copies", fails)
        files.install()
        exec(script, space := {"os": os, "torch": torch, "Path": Path})
        named = [files.has_copy_named_in(f"C++ finds no {here}/{each}") for each in ("folder/inner/new", "old")]
        return [*space["found"], named]

    assert in_fork(write) == ["log and more", {"lr": 1.0}, "new", "locked", [True, False]]
    assert sorted(each.name for each in here.iterdir()) == ["best.pt", "kept", "log", "old"]
    assert [(here / name).read_text() for name in ("log", "best.pt", "old")] == ["log", "best.pt", "old"]


def test_temporary_files_of_a_process_on_trial_have_short_paths_as_sockets_need_and_are_its_own(tmp_path):
    memory = Path(tempfile.mkdtemp(prefix="u", dir="/dev/shm"))
    trial = memory / f"{'a-long-name-of-a-task' * 4}-1.trial"

    recording = Recording(trial)

    def bind():
        GhostFiles(trial, trial / "files-1", fails).install()
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(f"{tempfile.mkdtemp()}/manager.sock")
        Path(tempfile.gettempdir(), "mine").write_text("mine")
        return [(trial / "files-1" / "tmp" / "mine").read_text(), len([*memory.iterdir()])]

    try:
        assert in_fork(bind) == ["mine", 2]
        recording.remove()
        assert [*memory.iterdir()] == []
    finally:
        shutil.rmtree(memory)


# --- the drill --------------------------------------------------------------------------------------------------------


ONE_DRILL = 6
"""Iterations in which there is one drill, however fast that is: with an epoch's end behind five it ends there."""


class FakeSeed:
    """Ghosts that leave these verdicts, one after the other."""

    def __init__(self, *verdicts):
        self.verdicts, self.ran, self.may_end = list(verdicts), 0, threading.Event()
        self.are_first, self.awaited = [], []
        self.may_end.set()

    def run(self, folder, *, is_first):
        self.are_first.append(is_first)
        self.may_end.wait()
        self.ran += 1
        self.awaited.append(Trial(folder).is_awaited)
        if verdict := self.verdicts.pop(0):
            return verdict
        (folder / OUTPUT).write_text("Traceback:\nKeyError: 'x'\n")
        return read_verdict(folder, 1 << 8)

    def cut(self):
        self.may_end.set()


class OfRank:
    def __init__(self, monkeypatch, tmp_path, *verdicts):
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
        monkeypatch.setenv("UNICRON_WORKER", "gpt-1")
        self.sent, self.begun, self.shown = [], [], []
        self.seed = FakeSeed(*verdicts)
        self.drill = drill.Drill(SimpleNamespace(send=self.send), 1, self.seed, self.shown.append)

    def iterate(self, until, begin=0, epoch=0, record=None, epochs_of=100):
        for iteration in range(begin, until):
            there = record or snapshot(iteration // epochs_of, iteration % epochs_of)
            self.drill.at_snapshot(there, iteration, epoch, lambda: STATE)
            if self.drill.recording is not None:
                self.drill.recording.add_iteration(iteration, torch.ones(1), torch.ones(1))

    def send(self, drilled):
        (self.begun if drilled.under_way else self.sent).append(drilled)

    def over(self):
        assert self.drill._over.wait(10)
        return self.sent


@pytest.fixture
def rank(monkeypatch, tmp_path):
    return lambda *verdicts: OfRank(monkeypatch, tmp_path, *verdicts)


@pytest.mark.parametrize(
    ("verdict", "said"),
    [
        ({}, {}),
        ({"by_itself": ["`seconds` of __main__"]}, {}),
        ({"problem": "`step` of __main__: 3 here, 4 there"}, {"problem": "`step` of __main__: 3 here, 4 there"}),
        ({"unproven": "it may not write there"}, {"unproven": "it may not write there"}),
        (None, {"problem": "one on trial ended with exit code 1 before it came there: KeyError: 'x'"}),
    ],
)
def test_what_a_trial_has_shown_is_reported_once(rank, tmp_path, verdict, said):
    one = rank({"by_itself": []} if verdict == {} else verdict)
    one.iterate(ONE_DRILL, epochs_of=5)
    assert one.over() == [Drilled(iteration=2, rank=1, **said)]
    assert one.shown == [text for key, text in said.items() if key == "problem"]
    assert not list(tmp_path.iterdir()), "nothing is left of it"


def test_it_is_repeated_when_four_times_as_many_iterations_are_done_and_never_after_a_problem(rank):
    one = rank({"by_itself": []}, {"problem": "it has a lock"})
    one.iterate(11)
    one.over()
    one.iterate(30, begin=11)
    one.over()
    assert [each.iteration for each in one.sent] == [2, 11]
    one.iterate(60, begin=30)
    assert one.seed.ran == 2


def test_it_is_repeated_once_when_the_first_epoch_is_over(rank):
    one = rank(*[{"by_itself": []}] * 9)
    for iteration in range(60):
        one.iterate(iteration + 1, begin=iteration, epochs_of=5)
        one.over()  # none is under way when the next may be due
        if iteration == 20:
            one.drill._due = 1000  # nor is one due by the number of iterations
    assert [each.iteration for each in one.sent] == [2, 6], "in the first epoch, and once behind it"


@pytest.mark.parametrize(
    ("change", "close"),
    [
        (lambda state: state["model"]["weight"].mul_(1 + 1e-5), True),
        (lambda state: state["model"]["weight"].mul_(1.1), False),
        (lambda state: state["model"]["weight"][0].fill_(torch.nan), False),
        (lambda state: state["optimizer"]["groups"].append(1), False),
        (lambda state: state["optimizer"].update(step=4), False),
        (lambda state: state["optimizer"]["groups"][0]["mask"].fill_(1), False),
    ],
)
def test_states_are_the_same_bits_or_on_gpus_as_good_as_that(change, close):
    def made():
        group = {"lr": 0.1, "mask": torch.zeros(2, dtype=torch.int64)}
        return {"model": {"weight": torch.ones(3)}, "optimizer": {"step": 3, "groups": [group]}}

    ours, theirs = made(), made()
    assert state_difference(ours, theirs, 0.0) == state_difference(ours, theirs, 1e-3) == ""
    change(theirs)
    assert state_difference(ours, theirs, 0.0)
    assert bool(state_difference(ours, theirs, 1e-3)) is not close


def test_a_later_trial_without_an_outcome_takes_nothing_from_what_an_earlier_one_has_shown(rank):
    one = rank({"by_itself": []}, {"unproven": "its trial took too long"})
    one.iterate(11)
    one.over()
    one.iterate(30, begin=11)
    assert one.over() == [Drilled(iteration=2, rank=1)]
    assert one.seed.are_first == one.seed.awaited == [True, False], "only the first one is in a hurry, and waited for"
    assert one.begun == [Drilled(iteration=2, rank=1, under_way=True)]


def test_a_rank_lost_meanwhile_makes_it_begin_once_more(rank):
    one = rank({"by_itself": []})
    one.iterate(4)
    one.iterate(14, begin=4, epoch=1)
    assert one.over() == [Drilled(iteration=5, rank=1)]


def test_where_it_is_known_otherwise_that_none_can_no_trial_says_anything(rank):
    one = rank({"by_itself": []})
    one.seed.may_end.clear()
    one.iterate(12)  # a trial is under way
    one.drill.refuse("a model is made in the loop")
    one.seed.may_end.set()
    assert one.over() == []
    one.iterate(60, begin=12)
    one.iterate(70, begin=60, record=NotCarriedError("a model is made in the loop"))
    one.drill.warn("it trains nothing that is known")
    assert (one.over(), one.drill.recording) == ([], None)


def test_where_nothing_can_be_carried_it_is_unproven_and_no_fault(rank):
    one = rank()
    one.iterate(drill.LATEST + 5, record=NotCarriedError("a lock"))
    assert one.sent == [Drilled(iteration=drill.LATEST, rank=1, unproven="a lock", undecided=True)]
    assert (one.shown, one.seed.ran) == ([], 0)


@pytest.mark.parametrize("since", [True, False])
def test_a_trial_that_is_passed_says_nothing_of_other_places_where_none_can_begin(rank, since):
    one, why = rank({"by_itself": []}), "it makes more than one update"
    one.iterate(drill.LATEST + 1, record=NotCarriedError(why))
    one.seed.may_end.clear()
    one.iterate(drill.LATEST + 12, begin=drill.LATEST + 1)
    if since:
        one.drill.at_snapshot(NotCarriedError(why), drill.LATEST + 12, 0, lambda: STATE)
    one.seed.may_end.set()
    passed = Drilled(iteration=drill.LATEST + 1, rank=1)
    again = Drilled(iteration=drill.LATEST + 1, rank=1, unproven=f"{drill.PASSED}{why}", undecided=True)
    assert one.over()[1:] == [passed, *[again] * since]


def test_without_room_on_its_gpu_it_is_unproven(rank, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 20, 1 << 30))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5 << 20)
    one = rank()
    one.iterate(4)
    [said] = one.sent
    assert said.unproven == "its GPU has 1 MiB left, and a ghost may need 5 MiB"


class Odd(torch.Tensor):
    """A tensor that nobody can copy."""

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), named=None):
        raise RuntimeError("not for you")


def raising():
    raise ValueError("nobody's business")


@pytest.mark.parametrize("at", ["begin", "end", "iteration", "collective"])
def test_whatever_can_not_be_recorded_the_script_goes_on(rank, tmp_path, at):
    one, odd = rank(), torch.Tensor._make_subclass(Odd, torch.ones(1))
    for iteration in range(12):
        fails = at == "begin" or (at == "end" and one.drill.recording is not None)
        at_which = snapshot(iteration // 3, iteration % 3), iteration, 0
        one.drill.at_snapshot(*at_which, raising if fails else lambda: STATE)
        if (recording := one.drill.recording) is not None:
            recording.add_iteration(iteration, *([odd] * 2 if at == "iteration" else [torch.ones(1)] * 2))
            given = odd if at == "collective" else torch.ones(1)
            one.drill.run_collective("allreduce", ([given],), 1, Work).wait()
    [said] = one.sent
    assert said.unproven.startswith("what it has can't be recorded: ")
    assert (said.problem, one.shown, list(tmp_path.iterdir())) == ("", [], [])


def test_the_end_of_a_script_waits_a_moment_for_a_trial_and_says_that_it_is_not_over(rank, monkeypatch):
    monkeypatch.setattr(drill, "PATIENCE_S", 0.0)
    one = rank({"by_itself": []})
    one.seed.may_end.clear()
    one.iterate(ONE_DRILL, epochs_of=5)
    one.drill.finish()
    assert one.sent == [Drilled(iteration=2, rank=1, unproven="the script had ended before the trial was over")]


def test_collectives_are_recorded_in_the_order_in_which_they_begin(rank):
    one = rank({"by_itself": []})
    one.iterate(3)
    out = [torch.zeros(1), torch.zeros(1)]

    def begin(number):
        return Work(lambda: out[number].fill_(number + 5))

    works = [
        one.drill.run_collective("allreduce", ([out[number]],), 1, lambda number=number: begin(number))
        for number in (0, 1)
    ]
    for work in reversed(works):
        work.wait()
    folder = one.drill.recording.folder
    one.drill.recording.end(5, snapshot(1), STATE)
    read = Recorded(folder)
    found = [read.next_collective() for _ in range(2)]
    assert [(each.given[0].item(), each.left[0].item()) for each in found] == [(0.0, 5.0), (0.0, 6.0)]


def test_what_stands_for_a_workers_core_on_trial_can_be_called_as_that_is():
    own = {name: each for name, each in vars(GhostCore).items() if inspect.isfunction(each) and name[0] != "_"}
    assert {"enter", "next_microbatch", "computed", "step"} <= own.keys()
    for name, each in own.items():
        theirs = inspect.signature(getattr(WholeCore, name)).parameters
        assert [(*pair,) for pair in inspect.signature(each).parameters.items()] == [*theirs.items()], name


@pytest.mark.parametrize(
    ("error", "kind", "ours"), [(KeyError, "problem", True), (KeyError, "problem", False), (OSError, "unproven", False)]
)
def test_an_error_in_a_line_of_ours_is_said_to_be_ours(tmp_path, monkeypatch, error, kind, ours):
    """Of the script nothing is to be found there."""
    told = []
    monkeypatch.setattr(ghost, "finish_trial", lambda **verdict: told.append(verdict))
    monkeypatch.setattr(ghost, "OURS", Path(__file__).parent if ours or error is OSError else tmp_path)
    try:
        raise error("x")  # noqa: TRY301 with a traceback
    except error as raised:
        report_failure(raised)
    assert f"{error.__name__} at test_trial.py:" in told[0][kind]
    assert ("a line of Unicron" in told[0][kind]) == ours


HIDES_IT = """
import sys
try:
    {}["lost"]
except Exception:
    print("Set HYDRA_FULL_ERROR=1 for more")
    sys.exit(CODE)
"""


@pytest.mark.parametrize(("code", "told"), [(1, ["KeyError('lost')"]), (0, [])])
def test_what_a_script_hides_by_an_end_of_its_own_is_what_a_ghost_tells(monkeypatch, code, told):
    found = []
    monkeypatch.setenv("UNICRON_GHOST", "here")
    monkeypatch.setattr(launch, "report_failure", lambda error: found.append(repr(error)))
    monkeypatch.setattr(launch.run, "execute", lambda *_: exec(HIDES_IT.replace("CODE", str(code)), {}))

    def run_script(_, execute):
        with pytest.raises(SystemExit):
            execute("script.py")
        return 7

    assert launch.launch({"module": False}, run_script) == 7
    assert found == told


@pytest.mark.parametrize(("error", "whole"), [(InvalidInputError("keep x"), False), (TypeError("odd"), True)])
def test_an_end_that_says_all_by_itself_is_one_line(monkeypatch, capfd, error, whole):
    class Called:
        abandon = staticmethod(end_process)

        @abandons(Exception)
        def method(self):
            raise error

    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    Called().method()
    told = capfd.readouterr().err
    assert ended == [1]
    assert ("Traceback" in told) == whole
    assert told == f"unicron: {error}\n" or whole
