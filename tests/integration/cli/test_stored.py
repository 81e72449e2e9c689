"""The commands `unicron checkpoints`, as a user types them, on real checkpoints."""

import json
import os
from pathlib import Path

import pytest
import torch
from helpers.cli import CLEAN, UNICRON, call, data, invoke, unicron
from helpers.stored import TASK, alter, of_model, save, save_trained, spread, trained
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from unicron.contracts.tasks import ParallelLayout
from unicron.errors import CheckpointError
from unicron.snapshots.storage.root import begin
from unicron.train.snapshots.gathering import collect_state


@pytest.fixture
def root(tmp_path):
    """Two good checkpoints of a task, an attempt that is unfinished, and one of another task in two parts."""
    for iteration in (100, 200):
        save_trained(tmp_path, iteration)
    saving = begin(str(tmp_path), TASK, 300, ParallelLayout())
    (tmp_path / TASK / f"step-000300.{saving.attempt}.part").mkdir()
    shards = spread(torch.arange(8.0), 2)
    save(tmp_path, 5, [of_model(5, w=each) for each in shards], task="other")
    return tmp_path


def test_list_shows_what_there_is(root):
    told = data("checkpoints", "list", "--at", str(root))
    assert [(each["task"], each["iteration"], each["state"]) for each in told] == [
        (TASK, 300, "unfinished"),
        (TASK, 200, "complete"),
        (TASK, 100, "complete"),
        ("other", 5, "complete"),
    ]
    assert told[1]["address"] == str(root / TASK / "step-000200")
    assert told[1]["size"] == sum(
        path.stat().st_size for path in Path(told[1]["address"]).iterdir() if path.name != "unicron.json"
    )
    lines = unicron("checkpoints", "list", "other", "--at", str(root)).splitlines()
    assert lines[0].split() == ["TASK", "ITERATION", "STATE", "WRITTEN", "MB", "LAYOUT", "ADDRESS"]
    assert "shard 2" in lines[1]
    assert len(lines) == 2


def test_show_names_the_files_of_one(root):
    text = unicron("checkpoints", "show", TASK, "--at", str(root))
    assert f"iteration 200 of {TASK}, whole models" in text
    assert "__0_0.distcp" in text
    told = data("checkpoints", "show", TASK, "--step", "100", "--at", str(root))
    assert told["manifest"]["iteration"] == 100
    assert "of iteration 7; there are: 200, 100" in unicron(
        "checkpoints", "show", TASK, "--step", "7", "--at", str(root), code=1
    )


def test_verify_tells_what_is_damaged_and_fails(root):
    assert unicron("checkpoints", "verify", "--at", str(root)).count("as it was written") == 3
    alter(root / TASK / "step-000200" / "__0_0.distcp", at=700)
    (root / TASK / "step-000100" / "notes.txt").write_text("mine")
    done = call([*UNICRON, "checkpoints", "verify", TASK, "--at", str(root)], CLEAN)
    assert done.returncode == 1
    assert f"{root / TASK / 'step-000200'}: damaged\n    __0_0.distcp: altered in model.0.weight" in done.stdout
    assert "step-000100: as it was written\n    notes.txt: not of this checkpoint" in done.stdout
    done = call([*UNICRON, "checkpoints", "verify", TASK, "--step", "100", "--at", str(root), "--json"], CLEAN)
    assert done.returncode == 0
    [row] = json.loads(done.stdout)
    assert (row["faults"], row["strangers"]) == ([], ["notes.txt"])


def test_prune_removes_the_oldest_but_never_the_newest_good_one(root):
    save_trained(root, 400)
    for step in ("000200", "000400"):
        os.truncate(root / TASK / f"step-{step}" / "__0_0.distcp", 9)
    told = data("checkpoints", "prune", TASK, "--at", str(root))
    assert told["removed"] == []
    assert [each["address"] for each in told["skipped"]] == [
        str(root / TASK / f"step-{step}") for step in ("000400", "000200")
    ]
    save_trained(root, 500)
    text = unicron("checkpoints", "prune", TASK, "--keep", "2", "--at", str(root))
    assert text.count("removed") == 2
    assert sorted(path.name for path in (root / TASK).glob("step-*0")) == ["step-000400", "step-000500"]


def test_what_cannot_be_had_is_one_line(tmp_path):
    assert "is no directory: make it" in unicron("checkpoints", "list", "--at", str(tmp_path / "none"), code=1)
    assert unicron("checkpoints", "list", "--at", str(tmp_path)) == f"{tmp_path} has no checkpoints\n"


def test_no_command_loads_torch(root):
    code = "import sys; sys.argv[1:] = ['checkpoints', 'verify']\nfrom unicron_cli.main import main\ntry: main()\n"
    code += "except SystemExit: print('torch' in sys.modules)"
    done = call([UNICRON[0], "-c", code], CLEAN | {"UNICRON_CHECKPOINTS": str(root)})
    assert done.stdout.splitlines()[-1] == "False", done.stderr


def test_restore_writes_one_file_that_a_plain_process_goes_on_from(root, tmp_path):
    protected, file = trained(seed=7), tmp_path / "whole.pt"
    save(root, 210, [collect_state(210, protected)])
    told = data("checkpoints", "restore", TASK, "--to", str(file), "--at", str(root))
    assert (told["iteration"], told["holds"]) == (210, ["iteration", "model", "optimizer"])
    found, other = torch.load(file, weights_only=True), trained(seed=8)
    other["model"].load_state_dict(found["model"])
    set_optimizer_state_dict(other["model"], other["optimizer"], found["optimizer"])
    for one, two in zip(protected["model"].parameters(), other["model"].parameters(), strict=True):
        assert torch.equal(one, two)
        moments, theirs = protected["optimizer"].state[one], other["optimizer"].state[two]
        assert moments.keys() == theirs.keys()
        assert all(torch.equal(moments[name], theirs[name]) for name in moments)


def test_restore_puts_parts_together(root, tmp_path):
    file = tmp_path / "whole.pt"
    text = invoke("checkpoints", "restore", "other", "--step", "5", "--to", file, "--at", root)
    assert "iteration 5 of other, with iteration, model" in text
    assert torch.equal(torch.load(file, weights_only=True)["model"]["w"], torch.arange(8.0))


def test_restore_believes_no_damaged_checkpoint(root, tmp_path):
    file = tmp_path / "whole.pt"
    alter(root / TASK / "step-000200" / "__0_0.distcp", at=700)
    with pytest.raises(CheckpointError, match="is not as it was written"):
        invoke("checkpoints", "restore", TASK, "--step", "200", "--to", file, "--at", root)
    assert not file.exists()
    text = invoke("checkpoints", "restore", TASK, "--to", file, "--at", root)
    assert "iteration 100 of gpt" in text
    assert torch.load(file, weights_only=True)["iteration"] == 100


def test_restore_tells_where_it_can_not_write(root, tmp_path):
    nowhere = tmp_path / "nothing" / "whole.pt"
    with pytest.raises(CheckpointError, match=f"{nowhere} can't be saved: No such file or directory"):
        invoke("checkpoints", "restore", TASK, "--to", nowhere, "--at", root)
