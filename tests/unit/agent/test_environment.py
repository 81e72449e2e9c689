"""What a worker is told by its environment."""

from pathlib import Path

from unicron_agent.node import own_checkpoints

from unicron.contracts.tasks import TaskSpec


def told(checkpoints, name="gpt"):
    return own_checkpoints(TaskSpec(name=name, command=["x"], checkpoints=checkpoints)).get("UNICRON_CHECKPOINT_DIR")


def test_a_script_is_told_where_to_keep_checkpoints_of_its_own():
    assert told("/shared/checkpoints") == told("/shared/checkpoints/") == "/shared/checkpoints/gpt.own"
    assert told("s3://bucket/folder") == told("s3://bucket/folder/") == "s3://bucket/folder/gpt.own"
    assert told("here") == f"{Path.cwd()}/here/gpt.own"


def test_where_no_storage_is_shared_no_place_is_named():
    assert told("") is None
