"""A cluster that only observes: users are obeyed, what it would do by itself is said, and nothing of that leaves."""

from functools import partial

from helpers.scenes import scene, task
from unicron_cli.views import OBSERVING, status_view
from unicron_transition.main import TransitionSettings
from unicron_transition.main import wiring as transition

from unicron.contracts.commands import Regroup, StartWorker, StopWorker
from unicron.contracts.events import NodeGone, ObserveOnlySwitched, OrdersWithheld, Regrouped, TaskRecovered
from unicron.contracts.tasks import NodeState, TaskState
from unicron.observe.cluster import ClusterPicture

observing = partial(scene, transition=transition(TransitionSettings(observe_only=True)))

LONG_S = 100.0
"""Virtual seconds after which whatever was to time out has."""


def given(stage):
    """Return all orders so far that change a process."""
    return [each for each in stage.journal if isinstance(each, StartWorker | StopWorker | Regroup)]


def pictured(stage):
    """Return the picture that whoever reads the journal has."""
    picture = ClusterPicture()
    for position, message in enumerate(stage.journal, 1):
        picture.handle(position, message)
    return picture


@observing()
async def test_a_lost_worker_is_left_lost_until_its_user_resumes_the_task(stage):
    [*_, victim] = await stage.running(task())
    assert stage.of(ObserveOnlySwitched, on=True)
    before = given(stage)
    stage.kill(victim.worker)
    await stage.until(lambda: stage.of(OrdersWithheld))
    await stage.wait(LONG_S)
    [said] = stage.of(OrdersWithheld)
    assert str(said).startswith(f"observe only: would have ordered: stop {victim.worker} on {victim.node}:0: ")
    assert "form membership 1 of t, 2 workers" in str(said)
    assert "start t-4" in str(said)
    assert given(stage) == before
    view, status = await stage.view("t"), await stage.status()
    assert (view.state, view.withheld) == (TaskState.RECOVERING, str(said))
    assert view.reason.startswith("observe only, until `unicron task resume t`: ")
    notes = [str(line) for line in status_view(status).renderables]
    assert OBSERVING in notes
    assert f"t: {said}" in notes
    picture = pictured(stage)
    assert (picture.observe_only, picture.tasks["t"].withheld) == (True, str(said))
    await stage.client.pause("t", pause=False)
    await stage.until(lambda: stage.of(TaskRecovered, workers=3))
    assert not (await stage.view("t")).withheld
    assert not pictured(stage).tasks["t"].withheld


@observing()
async def test_a_lost_node_is_left_lost_and_a_node_that_comes_changes_nothing_by_itself(stage):
    [first, *_] = await stage.running(task())
    before = given(stage)
    await stage.lose_power(first.node)
    await stage.until(lambda: stage.of(OrdersWithheld))
    await stage.wait(LONG_S)
    assert {each.state for each in (await stage.status()).nodes if each.node == first.node} == {NodeState.LOST}
    assert given(stage) == before
    await stage.client.pause("t", pause=False)
    smaller = await stage.regrouped(world_size=2)
    iteration, orders = stage.done("t")[-1], given(stage)
    stage.boot(first.node)
    await stage.until(lambda: "give t 3 slots instead of 2" in str(stage.of(OrdersWithheld)[-1]))
    await stage.reached("t", iteration + 20)
    assert given(stage) == orders, "it goes on as it is"
    await stage.client.pause("t", pause=False)
    await stage.regrouped(world_size=3, above=smaller.epoch)


@observing()
async def test_users_are_obeyed_though_their_task_is_held(stage):
    await stage.running(task(max_workers=2))
    stage.kill("t-1")
    await stage.until(lambda: stage.of(OrdersWithheld))
    await stage.client.remove("t")
    await stage.until(lambda: not list(stage.world.trainers()))
    await stage.running(task("u", max_workers=2))
    [node] = {member.node for member in (await stage.view("u")).members[:1]}
    await stage.client.drain(node)
    await stage.until(lambda: stage.of(Regrouped, task="u", epoch=1))
    assert node not in {member.node for member in (await stage.view("u")).members}
    await stage.client.pause("u")
    await stage.until_state("u", TaskState.WAITING)
    await stage.client.pause("u", pause=False)
    await stage.until_state("u", TaskState.RUNNING)
    assert {each.task for each in stage.of(OrdersWithheld)} == {"t"}
    await stage.client.drain(node, drain=False)


@observing()
async def test_a_node_that_is_to_go_goes_and_its_task_waits_for_its_user(stage):
    [first, *_] = await stage.running(task(max_workers=2))
    before = given(stage)
    await stage.leave(first.node)
    await stage.until(lambda: stage.of(NodeGone, node=first.node))
    assert given(stage) == before
    await stage.client.pause("t", pause=False)
    await stage.until(lambda: stage.of(TaskRecovered, workers=2))
    stage.boot(first.node)
