"""An example of every message and record, for the documentation."""

import builtins
import enum
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec.structs import fields

from unicron.contracts.answers import SaverView
from unicron.contracts.base import AGENT, Message
from unicron.contracts.states import Keeper
from unicron.contracts.tasks import ParallelLayout

VALUES: dict[str, Any] = {
    "id": "9f2c1d5e8a7b4c60",
    "at": 1767225600.25,
    "correlation": "51d0a3be44f7c9e2",
    "since": 1767220000.5,
    "task": "gpt",
    "name": "gpt",
    "command": ["python", "train.py"],
    "workdir": "/jobs/gpt",
    "node": "node-1",
    "slot": 1,
    "index": 0,
    "kind": "cpu",
    "device": "",
    "env": {"OMP_NUM_THREADS": "1"},
    "throughput": {2: 1.9e12, 4: 3.6e12},
    "changes": {"gpt": 3},
    "transitions": {"failure": 2.5, "resize": 4.0, "relayout": 9.0},
    "lose": ["node-3"],
    "finish": ["bert"],
    "worker": "gpt-w3",
    "pid": 4711,
    "incarnation": "3f9a61c2",
    "host": "10.0.0.11",
    "rendezvous": "10.0.0.11:29400",
    "state_server": "10.0.0.11:29401",
    "exit_code": None,
    "signal": 9,
    "reason": "killed by signal 9",
    "exception": "builtins.ValueError",
    "traceback": "Traceback (most recent call last): ...",
    "status": "exited_abnormally",
    "method": "process_supervision",
    "severity": 2,
    "escalated": 3,
    "phase": "reduce",
    "action": "restart",
    "state": "running",
    "trigger": "node_lost:node-3",
    "event": "node_lost:node-3",
    "fault": "kill-worker",
    "subject": "unicron.v1.evt.node-1.WorkerExited.gpt",
    "payload": b"\xc1",
    "state_from": "gpt-w1",
    "keepers": [Keeper(node="node-2", address="10.0.0.12:29401")],
    "search": 1,
    "epoch": 4,
    "iteration": 17,
    "iterations": 50,
    "rank": 1,
    "token": 12,
    "world_size": 3,
    "workers": 4,
    "max_workers": 4,
    "microbatches": 8,
    "weight": 1.5,
    "loss": 2.71,
    "waf": 4.2e12,
    "reward": 8.4e13,
    "flops": 2.8e12,
    "running_s": 1.2e6,
    "transition_s": 4.0,
    "lookup_s": 4e-6,
    "refresh_s": 3e-4,
    "failure_rate": 1.4e-7,
    "spread": 0.02,
    "source": "measured",
    "waf_before": 5.1e12,
    "flops_per_iteration": 3.5e12,
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "sequence": 2048,
    "vocabulary": 51200,
    "batch": 1024,
    "accelerator": "A800",
    "gpus_per_node": 8,
    "anchor_workers": 64,
    "anchor_mfu": 0.45,
    "padded": False,
    "expected": False,
    "finished": False,
    "error": "",
    "began": 1767225599.5,
    "microbatch": 3,
    "start_us": 41_200,
    "duration_us": 18_350,
    "first": 100,
    "last": 290,
    "steps": 20,
    "slowdown": 1.42,
    "waste": 0.2958,
    "diagnosis": "slow-worker",
    "gain": 1.51,
    "layouts": {4: ParallelLayout(tensor=2)},
    "evidence": '{"m_w":0.98}',
    "cure": "Drain the node of rank 1.",
    "share": 0.1,
    "dropped": {"ranks missing": 1},
    "alert": "slow-worker",
    "problems": [],
    "problem": "",
    "savers": {"gpt-1": SaverView(nodes=["node-1", "node-2"])},
    "digests": ["41a7c0d25be9f316", "41a7c0d25be9f316", "9e0b16d8f7742ca5"],
    "undecided": False,
    "rule": "skip",
    "copies": "the memory of node-1",
    "by": "ada@laptop",
    "lines": 50,
    "log": ["iteration 17 loss 2.7100"],
    "order": "DrainNode",
    "incident": "51d0a3be44f7c9e2",
    "chain": "51d0a3be44f7c9e2",
    "channel": "oncall",
    "channels": ["oncall", "mail"],
    "delivery": "51d0a3be44f7c9e2.1.oncall",
    "attempts": 1,
    "title": "node-1 is lost: 2 workers of 1 task",
}
"""Values of fields that read better than the first value of their type."""

PLAIN = {str: "text", int: 2, float: 1.5, bool: True, bytes: b""}


def sample(kind: Any) -> Any:
    """Return a message or record as one might be."""
    found = example(kind, "", VALUES, lambda plain, _: PLAIN[plain])
    if isinstance(found, Message):
        return msgspec.structs.replace(found, source={AGENT: "node-1", "": "detector"}.get(kind.SENDER, kind.SENDER))
    return found


def example(kind: Any, field: str, known: Mapping[str, Any], plain: Callable[[type, str], Any]) -> Any:
    """Return a value of a type, with each field of each record in it filled in.

    Args:
        kind: the type.
        field: that holds the value.
        known: values by field, where their types fit; None leaves an optional field out.
        plain: makes the others: a text, a number, a truth or bytes, for a field.
    """
    inner = [each for each in typing.get_args(kind) if each is not types.NoneType]
    match typing.get_origin(kind):
        case types.UnionType | typing.Union:
            return None if known.get(field, ...) is None else example(inner[0], field, known, plain)
        case builtins.dict:
            return known.get(field) or {example(inner[0], field, known, plain): example(inner[1], field, known, plain)}
        case builtins.list:
            return known[field] if isinstance(known.get(field), list) else [example(inner[0], field, known, plain)]
    if issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        values = {each.name: example(hints[each.name], each.encode_name, known, plain) for each in fields(kind)}
        return kind(**values)
    value = known.get(field)
    if issubclass(kind, enum.Enum):
        return kind(value) if value in list(kind) else next(iter(kind))
    return value if isinstance(value, kind) else plain(kind, field)
