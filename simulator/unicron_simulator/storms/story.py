"""The story of a violation: as few faults as lead to it, and what happened, line by line."""

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from unicron.contracts.base import Message
from unicron.contracts.events import TaskStateChanged
from unicron.observe.words.story import describe
from unicron_simulator.storms.scene import CALM, Scene
from unicron_simulator.storms.world import World

LINES = 60
"""Of the story at most, the last ones."""

IDS = ("epoch", "incarnation", "token")
"""Fields that a line names besides what it says in words: most violations turn on one of them."""


def shrunk(scene: Scene, violation: Callable[[Scene], str]) -> Scene:
    """Leave out what the violation does not need, half of it at first; it may become another violation on the way."""
    for calmer in (replace(scene, weather=CALM), replace(scene, weather=CALM, standbys=[])):
        if violation(calmer):
            scene = calmer
    size = max(1, len(scene.faults) // 2)
    while size:
        smaller = next((fewer for fewer in _smaller(scene, size) if violation(fewer)), None)
        scene, size = (smaller, size) if smaller else (scene, size // 2)
    return scene


def _smaller(scene: Scene, size: int) -> Iterator[Scene]:
    """Yield the scene without each `size` neighbouring faults, the last ones first; in the end without each task."""
    for start in reversed(range(0, len(scene.faults), size)):
        yield replace(scene, faults=[*scene.faults[:start], *scene.faults[start + size :]])
    if size == 1:
        for task in scene.tasks[1:]:
            yield replace(scene, tasks=[each for each in scene.tasks if each is not task])


def render_story(scene: Scene, world: World) -> str:
    """Return the story of a storm, ending with its violation."""
    tasks = ", ".join(f"{task.name} on {task.min_workers} to {task.max_workers}" for task in scene.tasks)
    nodes = ", ".join(f"{name} with {slots}" for name, slots in scene.slots.items())
    head = [f"seed {scene.seed}: nodes {nodes}; tasks {tasks}; {scene.weather}"]
    lines = [(at, f"*** {what}") for at, what in world.history]
    lines += [(at, line(message)) for at, message in zip(world.entered_at, world.invariants.messages, strict=False)]
    lines.sort(key=lambda each: each[0])
    body = [f"{at:8.3f}  {text}" for at, text in lines[-LINES:]]
    return "\n".join([*head, *body, f"{world.clock.elapsed():8.3f}  VIOLATION: {world.invariants.violation}"])


def line(message: Message) -> str:
    """Return one line about a message."""
    text = describe(message)
    if plan := getattr(message, "plan", None):
        shares = "; ".join(f"{share.task}: {' '.join(map(str, share.slots)) or 'waits'}" for share in plan.shares)
        text = f"plan {plan.number} after {plan.trigger}: {shares}"
    elif isinstance(message, TaskStateChanged):
        text += f"; members {' '.join(member.worker for member in message.members) or 'none'}"
    given = {name: getattr(message, name, "") for name in IDS}
    ids = ", ".join(f"{name} {value}" for name, value in given.items() if value not in {"", -1})
    return f"{message.source}: {type(message).__name__} {text}" + (f" ({ids})" if ids else "")
