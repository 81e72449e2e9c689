"""Invariants of plans where nodes are in NVLink domains: no tensor-parallel group is in two without need."""

from collections import Counter
from collections.abc import Collection, Mapping
from random import Random

from msgspec.structs import replace

from unicron.contracts.plans import Plan, TaskShare
from unicron.contracts.tasks import SlotRef, TaskSpec

SEEDS = (4, 7)
"""Last digits of the seeds whose nodes are in domains."""


def locate(seed: int, nodes: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return rack and domain of the nodes of a storm, as far as they are known; empty where none is."""
    if seed % 10 not in SEEDS:
        return {}
    random = Random(f"domains:{seed}")
    return {node: (random.choice(["r1", "r2", ""]), random.choice(["d1", "d2", "d2", ""])) for node in nodes}


def confine(seed: int, tasks: list[TaskSpec]) -> list[TaskSpec]:
    """Return the tasks of a storm, some of which have each tensor-parallel group in one domain or not at all."""
    random = Random(f"confined:{seed}")
    return [replace(task, within_domain=random.random() < 0.5) if seed % 10 in SEEDS else task for task in tasks]


def problem(
    plan: Plan,
    before: Plan | None,
    specs: Mapping[str, TaskSpec],
    domains: Mapping[str, str],
    usable: Collection[SlotRef],
) -> str:
    """Return what is wrong with the groups of a plan, in words; empty where nothing is.

    Args:
        plan: the newest.
        before: the one that it was made after; None: what was there before is not known.
        specs: of the tasks.
        domains: by node, where it is known.
        usable: slots that it may use.
    """
    if not domains:
        return ""
    old = {share.task: share.slots for share in before.shares} if before else {}
    free = Counter(domains.get(slot.node) for slot in set(usable).difference(*(share.slots for share in plan.shares)))
    for share in plan.shares:
        crossing = [group for group in _groups(share) if len({domains.get(slot.node) for slot in group}) > 1]
        if crossing and share.task in specs and specs[share.task].within_domain:
            return f"plan {plan.number} has a group of {share.task} in two domains, which is confined to one"
        there = free + Counter(domains.get(slot.node) for group in crossing for slot in group)
        room = [domain for domain, count in there.items() if domain and count >= share.layout.tensor]
        if crossing and room and before is not None and share.slots != old.get(share.task):
            return f"plan {plan.number} has a group of {share.task} in two domains, and {room[0]} has room for it"
    return ""


def _groups(share: TaskShare) -> list[list[SlotRef]]:
    tensor = share.layout.tensor
    return [share.slots[first : first + tensor] for first in range(0, len(share.slots), tensor)] if tensor > 1 else []
