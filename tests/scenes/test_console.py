"""The console's picture of a cluster in which much happens is what the registry knows, and its failures add up."""

import pytest
from helpers.scenes import scene, task
from unicron_console.pages import Pages
from unicron_console.projection import Projection

from unicron.contracts.events import FailureDetected, TaskRecovered


@scene(nodes=3, slots=2)
async def test_the_picture_is_what_the_registry_knows_whatever_happens(stage):
    picture, now = Projection(), stage.world.clock.now

    async def agrees():
        for position in range(picture.position, len(stage.journal)):
            picture.handle(position + 1, stage.journal[position])
        page, status = Pages(picture).cluster(now()), await stage.status()
        nodes = {node.node: str(node.state) for node in status.nodes}
        tasks = {view.spec.name: (str(view.state), len(view.members), view.paused) for view in status.tasks}
        shown = {line.name: (line.state, line.workers, line.paused) for line in page.tasks}
        return {name: square.state for name, square in page.nodes.items()} == nodes and shown == tasks

    await stage.running(task("one", max_workers=4))
    await stage.running(task("two", max_workers=2))
    await stage.until(agrees)
    stage.kill("one-1", "two-1")
    await stage.until(lambda: {each.task for each in stage.of(TaskRecovered) if each.epoch} == {"one", "two"})
    await stage.until(agrees)
    await stage.client.drain("node-2")
    await stage.client.pause("two")
    await stage.until(agrees)
    await stage.lose_power("node-1")
    await stage.until(lambda: stage.of(FailureDetected, node="node-1", severity=1))
    await stage.until(agrees)
    stage.boot("node-1")
    await stage.client.drain("node-2", drain=False)
    await stage.client.pause("two", pause=False)
    await stage.rest()
    await stage.until(agrees)
    assert set(picture.failures) == {each.correlation for each in stage.of(FailureDetected)}

    async def over():
        return await agrees() and all(Pages(picture).failure(each, now()).line.over for each in picture.failures)

    await stage.until(over)
    for page in (Pages(picture).failure(chain, now()) for chain in picture.failures):
        assert sum(page.seconds.values()) == pytest.approx(page.line.cost_s)
        assert page.line.cost_s > 0
