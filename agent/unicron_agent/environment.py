"""The environment variables of workers."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from unicron.contracts.commands import StartWorker
from unicron.contracts.tasks import Slot, TaskSpec
from unicron.contracts.worker import ANEW, CAUSE, DRILL, STOP_GRACE, UNCARRIED, printable_cause
from unicron.snapshots.memory import SnapshotMemory
from unicron_agent.hardware.network import interface_of
from unicron_agent.workers.warm import single_thread


def of_node(name: str, host: str, memory: SnapshotMemory) -> dict[str, str]:
    """Return the variables that are the same for all workers of a node."""
    found = {
        **single_thread(),
        "UNICRON_NODE": name,
        "UNICRON_HOST": host,
        "UNICRON_WORKER_SOCKET": str(memory.folder / "agent.sock"),
        **memory.variables,
    }
    if interface := interface_of(host):
        found |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    return found


def of_worker(command: StartWorker, slots: Sequence[Slot], now: float) -> dict[str, str]:
    """Return the variables of one worker, on a node with these slots, which starts now."""
    slot = next(slot for slot in slots if slot.index == command.slot)
    return {
        "UNICRON_WORKER": command.worker,
        "UNICRON_TASK": command.task,
        "UNICRON_SLOT": str(command.slot),
        "UNICRON_ITERATIONS": str(command.spec.iterations),
        "UNICRON_MICROBATCHES": str(command.spec.microbatches),
        "UNICRON_LAYOUT": msgspec.json.encode(command.layout).decode(),
        "UNICRON_LAYOUTS": str(len({each.degrees for each in command.spec.layouts.values()}) or 1),
        "UNICRON_PLACE": str(command.place),
        **_visible(slot.device),
        STOP_GRACE: str(command.spec.stop_grace_s),
        DRILL: "due" if command.spec.drill else "",
        UNCARRIED: printable_cause(command.uncarried),
        ANEW: _anew(command, now - command.wait_s) if command.anew_s else "",
        CAUSE: printable_cause(command.cause),
        **of_torchrun(command, slots),
    }


def _anew(command: StartWorker, now: float) -> str:
    return f"{now - command.anew_s} {now - command.trained_s}{' always' * command.anew}"


def of_torchrun(command: StartWorker, slots: Sequence[Slot]) -> dict[str, str]:
    """Return a rank's torchrun variables about its node, where the order has the ranks on it.

    All ranks of a node see the devices of all of them, and each takes the one that its local rank names.
    """
    if command.slot not in command.local_slots:
        return {}
    devices = {slot.index: slot.device for slot in slots}
    return {
        "LOCAL_RANK": str(command.local_slots.index(command.slot)),
        "LOCAL_WORLD_SIZE": str(len(command.local_slots)),
        "GROUP_RANK": str(command.group),
        "GROUP_WORLD_SIZE": str(command.groups),
        **_visible(",".join(filter(None, map(devices.get, command.local_slots)))),
    }


def _visible(devices: str) -> dict[str, str]:
    """Return the variables that name the GPUs of a worker; HIP goes by its own first, where the agent has it."""
    return {"CUDA_VISIBLE_DEVICES": devices, "HIP_VISIBLE_DEVICES": devices}


def of_checkpoints(spec: TaskSpec) -> dict[str, str]:
    """Return the variable with the folder for a script's own checkpoints, beside those of its task.

    It is the same for all workers of a task, and of a later task of that name; a task file's `env` goes over it.
    """
    root = spec.checkpoints.rstrip("/")
    place = root if "://" in root else Path(root).absolute()
    return {"UNICRON_CHECKPOINT_DIR": f"{place}/{spec.name}.own"} if root else {}
