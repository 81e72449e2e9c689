"""A state that no worker has any more is had from the memories of nodes, and nothing is computed again."""

from collections import Counter

from helpers.scenes import scene, task
from unicron_simulator.storms.training import INFINITE

from unicron.contracts.events import (
    FailureDetected,
    NodeGone,
    Regrouped,
    StateCopied,
    StateKept,
    StateRejected,
    StatesFound,
    StateUnusable,
    WorkerExited,
    WorkerReady,
)
from unicron.contracts.tasks import TaskState


async def held(stage, nodes=2):
    """Wait until so many nodes have the state of the iteration that is computed; return that."""

    def here():
        newest = max(trainer.core.iteration for trainer in stage.world.trainers())
        saved = [each.saved.values() for each in stage.world.machines.values()]
        return newest if sum(any(ref.iteration == newest for ref in refs) for refs in saved) >= nodes else 0

    return await stage.until(here)


async def goes_on(stage, since=0, more=5):
    """Wait until it computes in a later epoch and comes further; return where it went on, and what was done again."""
    first = await stage.regrouped(above=since)
    await stage.reached("t", max(stage.done("t")) + more)
    return first.iteration, {iteration for iteration, count in Counter(stage.done("t")).items() if count > 1}


@scene()
async def test_all_workers_killed_at_once_go_on_where_they_were(stage):
    members = await stage.running(task())
    saved = await held(stage)
    stage.kill(*(each.worker for each in members))
    assert await goes_on(stage) == (saved, set())
    assert stage.of(StatesFound)


@scene()
async def test_the_only_worker_killed_goes_on_where_it_was(stage):
    [only] = await stage.running(task(max_workers=1))
    saved = await held(stage)
    stage.kill(only.worker)
    assert await goes_on(stage) == (saved, set())
    assert {each.node for each in stage.of(Regrouped)} == {only.node}


@scene()
async def test_the_only_worker_killed_while_it_saves_goes_on_from_the_state_before(stage):
    [only] = await stage.running(task(max_workers=1))
    machine, names = stage.machine(only.node), lambda: set(stage.machine(only.node).saved)
    both = await stage.until(lambda: len(names()) == 2 and names())
    await stage.until(lambda: names() < both)  # one of them is being written over
    [left] = machine.saved.values()
    stage.kill(only.worker)
    begun, again = await goes_on(stage)
    assert begun == left.iteration
    assert again <= set(range(begun, begun + 9))
    assert not stage.of(StateRejected), "what is not whole is offered to nobody"


@scene()
async def test_the_only_workers_node_lost_goes_on_from_another_nodes_memory(stage):
    [only] = await stage.running(task(max_workers=1))
    saved = await held(stage)
    await stage.lose_power(only.node)
    assert await goes_on(stage) == (saved, set())
    assert {each.node for each in stage.of(Regrouped, epoch=1)}.isdisjoint({only.node})
    stage.boot(only.node)


@scene()
async def test_what_lies_in_memory_is_found_by_agents_that_are_started_again(stage):
    members = await stage.running(task())
    saved = await held(stage)
    for each in members:
        await stage.kill_agent(each.node)
    stage.kill(*(each.worker for each in members))
    stage.boot(*(each.node for each in members))
    assert await goes_on(stage) == (saved, set())


@scene()
async def test_a_task_that_is_put_aside_for_a_heavier_one_goes_on_where_it_was(stage):
    await stage.running(task())
    await stage.submit(task("heavy", weight=2.0, min_workers=3, iterations=8))
    await stage.until_state("t", TaskState.WAITING)
    await stage.until_state("heavy", TaskState.FINISHED)
    reached = max(stage.done("t"))
    assert await goes_on(stage, stage.of(Regrouped, task="t")[-1].epoch) == (reached + 1, set())
    assert {each.state.iteration for each in stage.of(StateKept, task="t")} == {reached + 1}
    assert not stage.of(StatesFound), "nobody had to look for it"


@scene()
async def test_a_task_that_its_user_pauses_finishes_its_iteration_and_goes_on_behind_it(stage):
    await stage.running(task(microbatches=40), iteration=2)
    [at] = await stage.until(lambda: {each.core.iteration for each in stage.world.trainers() if each.core.done})
    await stage.client.pause("t")
    assert (await stage.until_state("t", TaskState.WAITING)).paused
    started = {each.worker for each in stage.of(WorkerReady)}
    await stage.until(lambda: {each.worker for each in stage.of(WorkerExited)} == started)
    assert stage.done("t") == list(range(at + 1))
    await stage.client.pause("t", pause=False)
    assert await goes_on(stage, stage.of(Regrouped)[-1].epoch) == (at + 1, set())


@scene()
async def test_a_paused_task_whose_node_is_drained_and_switched_off_goes_on_where_it_was(stage):
    [only] = await stage.running(task(max_workers=1))
    await stage.client.pause("t")
    [left] = await stage.until(lambda: stage.of(StateKept))
    await stage.until_state("t", TaskState.WAITING)
    await stage.client.drain(only.node)
    [copied] = await stage.until(lambda: stage.of(StateCopied))
    assert copied.state == left.state.at(copied.state.location.node, copied.state.location.address)
    await stage.lose_power(only.node)
    await stage.client.pause("t", pause=False)
    assert await goes_on(stage, stage.of(Regrouped)[-1].epoch) == (left.state.iteration, set())
    assert not stage.of(StatesFound), "nobody had to look for it"
    stage.boot(only.node)
    await stage.client.drain(only.node, drain=False)


@scene()
async def test_the_agent_of_the_only_workers_node_told_to_stop_hands_over_first(stage):
    [only] = await stage.running(task(max_workers=1))
    began = stage.now()
    await stage.leave(only.node, notice_s=60.0)
    assert stage.now() - began < 20, "it need not wait until it must go"
    kinds = [type(each) for each in stage.journal if isinstance(each, Regrouped | NodeGone)]
    assert kinds[-2:] == [Regrouped, NodeGone], "it moved before its node said goodbye"
    assert (await goes_on(stage))[1] == set()
    assert not stage.of(FailureDetected)
    assert not stage.of(StatesFound), "a living worker had it"
    stage.boot(only.node)


@scene()
async def test_a_copy_with_a_byte_flipped_is_used_by_nobody(stage):
    [only] = await stage.running(task(max_workers=1))
    saved = await held(stage)
    machine = stage.machine(only.node)
    machine.rotten += machine.saved.values()
    stage.kill(only.worker)
    assert await goes_on(stage) == (saved, set()), "from the other copy"
    assert {each.state.location.node for each in stage.of(StateRejected)} == {only.node}, "the node is named"


@scene()
async def test_a_saved_state_that_makes_the_loss_no_number_is_left_for_the_one_before(stage):
    [only] = await stage.running(task(max_workers=1))
    stage.worker(only.worker).flip(INFINITE)

    def flawed():
        saved = [ref for each in stage.world.machines.values() for ref in each.saved.values()]
        return [ref.iteration for ref in saved if ref.checksum == INFINITE][1:]

    [saved] = await stage.until(flawed)  # on two nodes; of the iteration before there are sound copies
    stage.kill(only.worker)
    await goes_on(stage, since=1)
    [told] = stage.of(StateUnusable)
    assert told.iteration == saved
    assert told.copies.startswith("the memory of node-")
    [first, unusable, before] = [each.iteration for each in stage.of(Regrouped)]
    assert (first, unusable) == (0, saved)
    assert 0 < before < saved
