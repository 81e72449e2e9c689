"""A violation told: as few faults as lead to it, and what happened, line by line."""

from collections.abc import Callable

from msgspec.structs import asdict, replace

from unicron.contracts.base import Message
from unicron_simulator.faults import CALM, Scene
from unicron_simulator.world import START, World

LINES = 60
"""Of the story at most, the last ones."""

TELLING = (
    "severity",
    "status",
    "task",
    "worker",
    "node",
    "epoch",
    "iteration",
    "state",
    "incarnation",
    "token",
    "trigger",
    "drain",
    "reason",
)
"""Fields that a line names."""


def shrunk(scene: Scene, violation: Callable[[Scene], str]) -> Scene:
    """Leave out, one by one, what the violation does not need; it may become another violation on the way."""
    calm = replace(scene, weather=CALM)
    if violation(calm):
        scene = calm
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(scene):
            if violation(candidate):
                scene, smaller = candidate, True
                break
    return scene


def _smaller(scene: Scene) -> list[Scene]:
    without = [
        replace(scene, faults=[*scene.faults[:index], *scene.faults[index + 1 :]])
        for index in reversed(range(len(scene.faults)))
    ]
    alone = [replace(scene, standbys=[])] if scene.standbys else []
    fewer = [replace(scene, tasks=[each for each in scene.tasks if each is not task]) for task in scene.tasks[1:]]
    return without + alone + fewer


def told(scene: Scene, world: World) -> str:
    """Return the story of a storm, ending with its violation."""
    tasks = ", ".join(f"{task.name} on {task.min_workers} to {task.max_workers}" for task in scene.tasks)
    nodes = ", ".join(f"{name} with {slots}" for name, slots in scene.slots.items())
    head = [f"seed {scene.seed}: nodes {nodes}; tasks {tasks}; {scene.weather}"]
    lines = [(at, f"*** {what}") for at, what in world.told]
    lines += [(message.at - START, line(message)) for message in world.invariants.messages]
    lines.sort(key=lambda each: each[0])
    body = [f"{at:8.3f}  {text}" for at, text in lines[-LINES:]]
    return "\n".join([*head, *body, f"{world.clock.elapsed():8.3f}  VIOLATION: {world.invariants.violation}"])


def line(message: Message) -> str:
    """Return one line about a message."""
    fields = asdict(message)
    if plan := getattr(message, "plan", None):
        shares = "; ".join(f"{share.task}: {' '.join(map(str, share.slots)) or 'waits'}" for share in plan.shares)
        return f"{message.source}: plan {plan.number} ({plan.trigger}) {shares}"
    if members := fields.get("members"):
        fields["reason"] = "members " + " ".join(member.worker for member in members)
    said = ", ".join(f"{name} {fields[name]}" for name in TELLING if fields.get(name) not in {None, "", -1})
    return f"{message.source}: {type(message).__name__} {said}"
