"""The environment variables of a worker."""

from pathlib import Path

from msgspec.structs import replace
from unicron_agent.environment import of_checkpoints, of_torchrun, of_worker

from unicron.contracts.commands import StartWorker
from unicron.contracts.tasks import Slot, TaskSpec


def checkpoint_dir(checkpoints, name="gpt"):
    return of_checkpoints(TaskSpec(name=name, command=["x"], checkpoints=checkpoints)).get("UNICRON_CHECKPOINT_DIR")


def test_a_script_is_told_where_to_keep_checkpoints_of_its_own():
    assert (
        checkpoint_dir("/shared/checkpoints") == checkpoint_dir("/shared/checkpoints/") == "/shared/checkpoints/gpt.own"
    )
    assert checkpoint_dir("s3://bucket/folder") == checkpoint_dir("s3://bucket/folder/") == "s3://bucket/folder/gpt.own"
    assert checkpoint_dir("here") == f"{Path.cwd()}/here/gpt.own"


def test_where_no_storage_is_shared_no_place_is_named():
    assert checkpoint_dir("") is None


def test_ranks_of_a_node_see_the_devices_of_all_of_them_in_the_order_of_their_places():
    slots = [Slot(index=index, device=f"GPU-{index}") for index in range(4)]
    order = StartWorker(node="n1", slot=2, worker="w", task="t", spec=TaskSpec(name="t", command=["x"]))
    assert of_torchrun(order, slots) == {}, "its memberships tell it"
    local = replace(order, local_slots=[3, 0, 2], group=1, groups=2)
    assert of_torchrun(local, slots) == {
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "CUDA_VISIBLE_DEVICES": "GPU-3,GPU-0,GPU-2",
        "HIP_VISIBLE_DEVICES": "GPU-3,GPU-0,GPU-2",
    }


def test_a_script_that_begins_anew_is_told_since_when_by_this_machines_clock():
    order = StartWorker(node="n1", slot=0, worker="w", task="t", spec=TaskSpec(name="t", command=["x"]))
    assert of_worker(order, [Slot(index=0)], 1000.0)["UNICRON_ANEW_SINCE"] == ""
    again = replace(order, anew_s=60.0, trained_s=40.0, wait_s=5.0)
    assert of_worker(again, [Slot(index=0)], 1000.0)["UNICRON_ANEW_SINCE"] == "935.0 955.0"
    always = replace(again, anew=True)
    assert of_worker(always, [Slot(index=0)], 1000.0)["UNICRON_ANEW_SINCE"] == "935.0 955.0 always"
