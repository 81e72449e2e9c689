"""Failures of a directory, and going back: the error names the cause, and the last good checkpoint is untouched."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest
import torch
from helpers.layouts import same
from helpers.stored import TASK, alter, of_model, save_trained, spread

from unicron.contracts.tasks import ParallelLayout
from unicron.errors import CheckpointError
from unicron.snapshots.storage import catalog, check
from unicron.snapshots.storage.manifest import MANIFEST, REWOUND
from unicron.snapshots.storage.root import MARKER, Storage, begin
from unicron.train.snapshots.stored.commit import abandon, commit
from unicron.train.snapshots.stored.parts import write_part
from unicron.train.snapshots.stored.reading import read

DAY = 24 * 3600.0
WHOLE = ParallelLayout()


def big(iteration, size=64 << 20):
    return of_model(iteration, w=torch.zeros(size, dtype=torch.uint8))


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def contents(folder):
    """Return all files below a folder."""
    every = Path(folder).rglob("*")
    return {str(path.relative_to(folder)): path.read_bytes() for path in every if path.is_file()}


@pytest.fixture
def storage(tmp_path):
    return Storage(str(tmp_path))


@pytest.fixture
def good(storage, tmp_path):
    """A good checkpoint on the storage."""
    stored, _ = save_trained(tmp_path, 1)
    before = contents(tmp_path)
    yield stored
    after = contents(tmp_path)
    assert {name: after.get(name) for name in before} == before, "the good one was touched"
    assert catalog.newest(storage, TASK).stored.folder == stored.folder


def unfinished(storage):
    return [each for each in catalog.list_checkpoints(storage, TASK) if each.unfinished]


# --- writers that fail -----------------------------------------------------------------------------------------------


WRITER = """
    import resource, signal, sys
    import msgspec, torch
    from unicron.contracts.storage import Saving
    from unicron.errors import CheckpointError
    from unicron.train.snapshots.stored.parts import write_part

    if sys.argv[2]:
        resource.setrlimit(resource.RLIMIT_FSIZE, 2 * (int(sys.argv[2]),))
    if sys.argv[3:] == ["killed"]:  # Python ignores the signal of that limit, and is told that the write failed
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    zeros = torch.zeros(1 << 18)
    try:
        state = {"model": {str(number): zeros for number in range(1000)}}
        write_part(msgspec.json.decode(sys.argv[1], type=Saving), 0, {"iteration": 2, "objects": state})
    except CheckpointError as error:
        sys.exit(str(error))
"""


def writer(saving, limit="", *how):
    """Start a process that writes a part of 1 GB."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER), msgspec.json.encode(saving).decode(), limit, *how]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def test_a_writer_that_is_killed_leaves_no_checkpoint(storage, good):
    # in the middle of its write, wherever that of a test would be by then
    process = writer(begin(storage.root, TASK, 2, WHOLE), str(5 << 20), "killed")
    _, told = process.communicate()
    assert process.returncode == -signal.SIGXFSZ, told
    [left] = unfinished(storage)
    assert names(left.address) == ["__0_0.distcp"]
    now = time.time()
    assert catalog.prune(storage, TASK, 2, now).removed == [], "it may be at work still"
    assert catalog.prune(storage, TASK, 2, now + 2 * DAY).removed == [left.address]
    assert unfinished(storage) == []


def test_one_that_was_never_given_its_name_is_no_checkpoint(storage, good):
    shutil.copytree(good.address, storage.address(TASK, "step-000001.0123abcd.part"))
    assert [each.folder for each in unfinished(storage)] == ["step-000001.0123abcd.part"]
    storage.remove(TASK, "step-000001.0123abcd.part")


def test_a_write_that_fails_half_way_leaves_nothing(storage, good):
    saving = begin(storage.root, TASK, 2, WHOLE)
    _, told = writer(saving, limit=str(5 << 20)).communicate()
    assert f"can't write {storage.root}/{TASK}/step-000002.{saving.attempt}.part/__0_0.distcp" in told
    assert "OSError: File too large; raise the limit" in told
    [left] = unfinished(storage)
    assert names(left.address) == []
    abandon(saving)
    abandon(saving)
    assert unfinished(storage) == []


@pytest.fixture
def small(tmp_path):
    """Make a file system of few megabytes and inodes."""
    mounted = []

    def mount(options):
        folder = tmp_path / f"small-{len(mounted)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("mounting a small tmpfs takes root, and a mount namespace that allows it")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_with_too_little_room_is_not_begun_with(small):
    root = small("size=4m")
    _, state = save_trained(root, 1)
    before = contents(root)
    saving = begin(str(root), TASK, 2, WHOLE)
    with pytest.raises(CheckpointError, match=r"MB free of 8\.4 MB that are needed: make room there"):
        write_part(saving, 0, big(2, 8 << 20))
    assert contents(root) == before
    assert same(read(Storage(str(root)), catalog.newest(Storage(str(root)), TASK).stored, 0), state)


def test_a_disk_that_fills_meanwhile_is_told_and_gets_its_room_back(small):
    root = small("size=4m")
    save_trained(root, 1)
    saving, free = begin(str(root), TASK, 2, WHOLE), shutil.disk_usage(root).free
    state = big(2, 1000)
    state["objects"]["log"] = {"text": "x" * (8 << 20)}  # only tensors count beforehand
    with pytest.raises(
        CheckpointError, match=r"can't write .*__0_0\.distcp: OSError: No space left on device; make room"
    ):
        write_part(saving, 0, state)
    abandon(saving)
    assert shutil.disk_usage(root).free == free
    assert catalog.newest(Storage(str(root)), TASK).stored.iteration == 1


def test_a_disk_without_inodes_is_told(small):
    root = small("size=4m,nr_inodes=6")
    (root / TASK).mkdir()
    (root / TASK / MARKER).touch()
    with pytest.raises(CheckpointError, match="has 3 inodes free of 4 that are needed"):
        write_part(begin(str(root), TASK, 2, WHOLE), 0, big(2, 1000))
    assert contents(root) == {f"{TASK}/{MARKER}": b""}


# --- parts that are not as they should be ----------------------------------------------------------------------------


def parts_of(storage, layout=None):
    layout = layout or ParallelLayout(shard=2)
    saving = begin(storage.root, TASK, 2, layout)
    shards = spread(torch.arange(16.0), layout.replica_workers)
    return saving, [write_part(saving, place, of_model(2, w=each)) for place, each in enumerate(shards)]


def test_a_part_that_is_missing_is_named(storage, good):
    saving, parts = parts_of(storage)
    with pytest.raises(CheckpointError, match=r"has the parts of places \[1\] instead of \[0, 1\]"):
        commit(saving, parts[1:])
    with pytest.raises(CheckpointError, match=r"has the parts of places \[0, 0\] instead of \[0, 1\]"):
        commit(saving, [parts[0], parts[0]])
    (Path(unfinished(storage)[0].address) / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__1_0\.distcp: missing; every node must see the same storage"):
        commit(saving, parts)


@pytest.mark.parametrize("name", ["__1_0.distcp", "__1.index.json"])
def test_a_part_that_is_not_as_its_writer_told_is_named(storage, good, name):
    saving, parts = parts_of(storage)
    path = Path(unfinished(storage)[0].address) / name
    alter(path)
    with pytest.raises(CheckpointError, match=rf"{name}.*(altered|not as it was written)"):
        commit(saving, parts)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{name}: cut short"):
        commit(saving, parts)


def test_a_part_of_another_attempt_is_refused(storage, good):
    saving, parts = parts_of(storage)
    other, others = parts_of(storage)
    for name in (others[1].index.name, others[1].data.name):
        shutil.copy(
            storage.address(TASK, f"step-000002.{other.attempt}.part", name),
            storage.address(TASK, f"step-000002.{saving.attempt}.part", name),
        )
    with pytest.raises(CheckpointError, match=rf"place 1 is of iteration 2 of gpt, attempt {other.attempt}, and not"):
        commit(saving, [parts[0], others[1]])


def test_a_state_that_is_no_part_is_refused(storage, good):
    saving = begin(storage.root, TASK, 2, WHOLE)
    for place, iteration in ((1, 2), (-1, 2), (0, 3)):
        with pytest.raises(CheckpointError, match=f"place {place} of iteration {iteration} is no part of iteration 2"):
            write_part(saving, place, big(iteration, 10))
    assert unfinished(storage) == []


def test_the_same_iteration_twice_leaves_the_first_alone(storage, good):
    save_trained(storage.root, 1, seed=3)
    every = catalog.list_checkpoints(storage, TASK)
    assert [each.iteration for each in every] == [1, 1]
    assert every[1].folder == good.folder == "step-000001"
    assert catalog.newest(storage, TASK).stored == every[0], "the later one"
    storage.remove(TASK, every[0].folder)


def test_what_was_completed_is_completed_again_without_harm(storage, good):
    saving, parts = parts_of(storage)
    stored = commit(saving, parts)
    before = contents(storage.address(TASK))
    again = commit(saving, parts)
    assert (again.folder, again.manifest) == (stored.folder, stored.manifest)
    abandon(saving)
    assert contents(storage.address(TASK)) == before
    storage.remove(TASK, stored.folder)


# --- damage ----------------------------------------------------------------------------------------------------------


DATA, INDEX = "__0_0.distcp", "__0.index.json"


def lengthen(folder):
    with (folder / DATA).open("ab") as file:
        file.write(b"more")


def replace_in_manifest(old, new):
    def damage(folder):
        (folder / MANIFEST).write_bytes((folder / MANIFEST).read_bytes().replace(old, new))

    return damage


def exchange_files(folder):
    for path in (folder.parent / "step-000001").glob("__0*"):
        shutil.copy(path, folder)


def move(folder):
    shutil.rmtree(folder)
    shutil.copytree(folder.parent / "step-000001", folder)


DAMAGE = {
    "shorten": (lambda folder: os.truncate(folder / DATA, 100), r"__0_0\.distcp: cut short, 100 of \d+ bytes"),
    "lengthen": (lengthen, r"__0_0\.distcp: longer than was written"),
    "lose": (lambda folder: (folder / ".metadata").unlink(), r"\.metadata: missing"),
    "change_data": (
        lambda folder: alter(folder / DATA, at=700),
        r"__0_0\.distcp: altered in model\.0\.weight, bytes 0 and after",
    ),
    "change_index": (lambda folder: alter(folder / INDEX), r"__0\.index\.json is not as it was written"),
    "change_metadata": (lambda folder: alter(folder / ".metadata"), r"\.metadata: altered"),
    "change_manifest": (replace_in_manifest(b'"written":1', b'"written":2'), r"unicron\.json was altered"),
    "cut_manifest": (
        lambda folder: os.truncate(folder / MANIFEST, 100),
        r"unicron\.json is not what Unicron writes there",
    ),
    "raise_version": (
        replace_in_manifest(b'"version":1', b'"version":2'),
        "is of format 2, and this Unicron reads 1: use a newer one",
    ),
    "exchange_files": (exchange_files, r"__0\.index\.json is not as it was written"),
    "move": (move, "is iteration 1 of gpt: it was moved"),
}


@pytest.mark.parametrize(("damage", "told"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_skipped_and_told(storage, good, damage, told):
    stored, _ = save_trained(storage.root, 2)
    assert catalog.newest(storage, TASK).stored.folder == stored.folder
    damage(Path(stored.address))
    found = catalog.newest(storage, TASK)
    assert found.stored.folder == good.folder
    assert [each.address for each in found.skipped] == [stored.address]
    [fault] = found.skipped[0].faults
    assert re.search(told, fault), fault


def test_a_file_of_somebody_else_is_told_and_harms_nobody(storage, good):
    (Path(good.address) / "notes.txt").write_text("mine")
    assert check.strangers(storage, (TASK, good.folder), good.manifest) == ["notes.txt"]
    assert check.faults(storage, (TASK, good.folder), good.manifest) == []


# --- folders of somebody else ----------------------------------------------------------------------------------------


def test_a_folder_of_somebody_else_is_left_alone(storage, tmp_path):
    (tmp_path / TASK / "step-000001").mkdir(parents=True)
    (tmp_path / TASK / "step-000001" / "weights").write_text("years of work")
    before = contents(tmp_path)
    for ask in (
        lambda: begin(str(tmp_path), TASK, 1, WHOLE),
        lambda: catalog.list_checkpoints(storage, TASK),
        lambda: catalog.prune(storage, TASK, 2, time.time() + 9 * DAY),
    ):
        with pytest.raises(CheckpointError, match=r"gpt has step-000001 in it and was not made by Unicron"):
            ask()
    assert catalog.tasks(storage) == []
    assert contents(tmp_path) == before


def test_what_is_no_storage_is_told(tmp_path):
    with pytest.raises(CheckpointError, match="is no directory: make it, or mount what is to be there"):
        begin(str(tmp_path / "none"), TASK, 1, WHOLE)
    with pytest.raises(CheckpointError, match="no URL of a known kind"):
        Storage("nowhere://x")
    with pytest.raises(CheckpointError, match=r"'\.\./x' names no task"):
        begin(str(tmp_path), "../x", 1, WHOLE)
    with pytest.raises(CheckpointError, match="has nothing of gpt"):
        catalog.list_checkpoints(Storage(str(tmp_path)), TASK)
    assert names(tmp_path) == []


# --- pruning ---------------------------------------------------------------------------------------------------------


def test_the_newest_stay_and_so_does_the_newest_that_is_good(storage, tmp_path):
    every = [save_trained(tmp_path, iteration)[0] for iteration in range(1, 6)]
    (tmp_path / TASK / "notes").mkdir()
    with pytest.raises(CheckpointError, match="1 checkpoints are too few to keep"):
        catalog.prune(storage, TASK, 1, time.time())
    for each in every[2:]:
        os.truncate(Path(each.address) / DATA, 100)
    done = catalog.prune(storage, TASK, 2, time.time())
    assert done.kept == [every[4].address, every[3].address, every[1].address]
    assert sorted(done.removed) == [every[0].address, every[2].address]
    assert [each.address for each in done.skipped] == [each.address for each in every[:1:-1]]
    assert names(tmp_path / TASK) == [MARKER, "notes", "step-000002", "step-000004", "step-000005"]
    assert catalog.newest(storage, TASK).stored.iteration == 2
    assert catalog.newest(storage, TASK, before=2) == catalog.Newest(stored=None, skipped=[])
    assert catalog.prune(storage, TASK, 2, time.time()).removed == []


# --- going back to an earlier checkpoint: later ones count no more, and are removed after a day -----------------------


@pytest.fixture
def three(tmp_path):
    for iteration in (1, 2, 3):
        save_trained(tmp_path, iteration)
    return Storage(str(tmp_path))


def newest(three):
    return catalog.newest(three, TASK).stored.iteration


def known(three):
    """Return the iteration of each checkpoint, and whether it was put aside."""
    return [(each.iteration, each.rewound) for each in catalog.list_checkpoints(three, TASK)]


def test_the_newest_is_then_the_one_that_was_gone_back_to(three):
    assert newest(three) == 3
    assert catalog.rewind(three, TASK, 1).stored.iteration == 1
    assert newest(three) == 1
    assert known(three) == [(3, True), (2, True), (1, False)]
    for each in catalog.list_checkpoints(three, TASK):
        assert check.strangers(three, (TASK, each.folder), each.manifest) == []


def test_one_that_is_written_later_counts_even_where_it_is_of_an_earlier_iteration(three, tmp_path):
    catalog.rewind(three, TASK, 1)
    save_trained(tmp_path, 2)
    assert newest(three) == 2
    assert sorted(known(three)) == [(1, False), (2, False), (2, True), (3, True)]


@pytest.mark.parametrize("iteration", [7, 2])
def test_where_that_one_is_not_there_or_damaged_nothing_is_put_aside(three, iteration):
    second = next(each for each in catalog.list_checkpoints(three, TASK) if each.iteration == 2)
    alter(next(Path(second.address).glob("*.distcp")))
    assert catalog.rewind(three, TASK, iteration).stored is None
    assert known(three) == [(3, False), (2, False), (1, False)]
    assert newest(three) == 3


def test_what_no_longer_counts_does_not_make_others_superfluous_and_is_removed_after_a_day(three):
    catalog.rewind(three, TASK, 1)
    assert catalog.prune(three, TASK, 2, time.time()).removed == []
    removed = catalog.prune(three, TASK, 2, time.time() + 2 * DAY).removed
    assert len(removed) == 2
    assert [each.iteration for each in catalog.list_checkpoints(three, TASK)] == [1]
    assert not list(Path(three.address(TASK)).rglob(REWOUND))


def test_looking_for_a_checkpoint_does_not_wait_for_torch(tmp_path):
    run = "from unicron.train.snapshots.stored import __main__ as it; sys.exit(it.main())"
    code = f"import sys; sys.modules['torch'] = None\n{run}"
    request = {"do": "find", "root": str(tmp_path), "task": "t", "since": 0.0, "before": -1, "iteration": -1}
    ended = subprocess.run([sys.executable, "-c", code, json.dumps(request)], capture_output=True, check=True)
    assert json.loads(ended.stdout) == {"stored": None, "skipped": []}
