"""Checkpoints in a bucket of a real S3 server: the same as in a directory, but that the manifest makes them exist."""

import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from helpers.buckets import BUCKET, client, refuse, served
from helpers.cli import CLEAN, UNICRON, call
from helpers.layouts import plain_state, same
from helpers.stored import TASK, of_model, save, save_trained, trained

from unicron.contracts.tasks import ParallelLayout
from unicron.errors import CheckpointError
from unicron.snapshots.storage import catalog
from unicron.snapshots.storage.manifest import MANIFEST
from unicron.snapshots.storage.root import Storage, begin
from unicron.train.snapshots.gathering import collect_state, load_state
from unicron.train.snapshots.stored.commit import abandon, commit
from unicron.train.snapshots.stored.parts import write_part
from unicron.train.snapshots.stored.reading import gather_state, read

ROOT = f"s3://{BUCKET}/runs"
DAY = 24 * 3600.0

pytestmark = pytest.mark.filterwarnings("ignore")  # of botocore, and of torch that has no group


@pytest.fixture(scope="module")
def server():
    with served() as environment:
        yield environment


@pytest.fixture
def s3(server, monkeypatch):
    """An empty bucket."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    found = client()
    found.create_bucket(Bucket=BUCKET)
    yield found
    for each in keys(found):
        found.delete_object(Bucket=BUCKET, Key=each)


def keys(s3):
    return [each["Key"] for each in s3.list_objects_v2(Bucket=BUCKET).get("Contents", [])]


def test_a_checkpoint_in_a_bucket_is_read_by_unicron_and_by_torch(s3):
    stored, state = save_trained(ROOT, 4, seed=1)
    storage, other = Storage(ROOT), trained(2)
    assert catalog.newest(storage, TASK).stored.manifest == stored.manifest
    load_state(gather_state(storage, stored, ParallelLayout(), 0, other), other)
    assert same(plain_state(other), state["objects"])
    found = {"model": trained(3)["model"].state_dict()}
    dcp.load(found, checkpoint_id=stored.address)
    assert same(found["model"], state["objects"]["model"])


def test_what_takes_several_requests_comes_back(s3):
    whole = torch.arange(56 << 18, dtype=torch.int32)  # s3fs sends 50 MB at once
    stored = save(ROOT, 0, [of_model(0, w=whole)])
    assert torch.equal(read(Storage(ROOT), stored, 0)["objects"]["model"]["w"], whole)


def test_without_its_manifest_there_is_no_checkpoint(s3):
    good, _ = save_trained(ROOT, 1)
    storage = Storage(ROOT)
    saving = begin(ROOT, TASK, 2, ParallelLayout())
    part = write_part(saving, 0, collect_state(2, trained()))
    assert [each.unfinished for each in catalog.list_checkpoints(storage, TASK)] == [True, False]
    assert catalog.newest(storage, TASK).stored.folder == good.folder
    now = time.time()
    assert catalog.prune(storage, TASK, 2, now).removed == []
    stored = commit(saving, [part])
    assert catalog.newest(storage, TASK).stored.folder == stored.folder
    assert commit(saving, [part]).manifest == stored.manifest, "it is complete already"
    abandon(saving)
    assert catalog.newest(storage, TASK).stored.folder == stored.folder, "it is complete"
    gone = begin(ROOT, TASK, 3, ParallelLayout())
    write_part(gone, 0, collect_state(3, trained()))
    assert len(catalog.prune(storage, TASK, 2, now + 2 * DAY).removed) == 1
    assert [each.iteration for each in catalog.list_checkpoints(storage, TASK)] == [2, 1]


def test_pruning_a_bucket_leaves_the_newest(s3):
    every = [save_trained(ROOT, iteration)[0] for iteration in range(1, 4)]
    done = catalog.prune(Storage(ROOT), TASK, 2, time.time())
    assert done.removed == [every[0].address]
    assert {key.split("/")[2] for key in keys(s3) if MANIFEST in key} == {each.folder for each in every[1:]}
    assert not [key for key in keys(s3) if every[0].folder in key]


def test_a_bucket_that_refuses_is_told_and_what_is_there_stays(s3, server):
    good, state = save_trained(ROOT, 1)
    before = keys(s3)
    saving = begin(ROOT, TASK, 2, ParallelLayout())
    refuse(server, after=0)
    try:
        with pytest.raises(
            CheckpointError, match=rf"can't write {ROOT}/gpt/step-000002.*PermissionError: .*; allow it to this user"
        ):
            write_part(saving, 0, collect_state(2, trained()))
        with pytest.raises(CheckpointError, match=rf"can't list {ROOT}/gpt: PermissionError"):
            catalog.newest(Storage(ROOT), TASK)
    finally:
        refuse(server, after=1_000_000)
    assert keys(s3) == before
    assert same(read(Storage(ROOT), good, 0)["objects"], state["objects"])


def test_a_bucket_that_is_not_there_is_told(s3):
    with pytest.raises(CheckpointError, match=r"can't list s3://nobodys/x/gpt: .*bucket does not exist"):
        begin("s3://nobodys/x", TASK, 1, ParallelLayout())
    with pytest.raises(CheckpointError, match="bucket does not exist"):
        catalog.tasks(Storage("s3://nobodys/x"))
    assert catalog.tasks(Storage(ROOT)) == []


def test_a_server_that_is_gone_is_told(s3, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    client()
    with pytest.raises(CheckpointError, match=rf"can't list {ROOT}/gpt: .*http://127\.0\.0\.1:1/"):
        begin(ROOT, TASK, 1, ParallelLayout())
    client()


def test_somebody_elses_folder_in_a_bucket_is_left_alone(s3):
    s3.put_object(Bucket=BUCKET, Key=f"runs/{TASK}/step-000001/weights", Body=b"years of work")
    with pytest.raises(CheckpointError, match="was not made by Unicron"):
        begin(ROOT, TASK, 2, ParallelLayout())
    assert keys(s3) == [f"runs/{TASK}/step-000001/weights"]


def test_the_commands_see_a_bucket(s3, server):
    stored, _ = save_trained(ROOT, 7)
    environment = {**CLEAN, **server, "UNICRON_CHECKPOINTS": ROOT}
    done = call([*UNICRON, "checkpoints", "verify"], environment)
    assert (done.returncode, done.stdout) == (0, f"{stored.address}: as it was written\n"), done.stderr
