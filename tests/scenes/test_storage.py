"""States are written to storage by schedule and by order, and restored from there; and orders by files."""

from helpers.scenes import scene, task
from unicron_registry.switches import Switches
from unicron_transition.main import TransitionSettings
from unicron_transition.main import wiring as transition

from unicron.contracts.commands import StoreState
from unicron.contracts.events import (
    Alert,
    CheckpointFailed,
    CheckpointFound,
    CheckpointStored,
    FailureDetected,
    NodeGone,
    OrderTaken,
    Regrouped,
    StateDiverged,
    StateKept,
    TaskPaused,
    TaskRemoved,
)
from unicron.contracts.tasks import TaskState


def stored(name="t", **fields):
    """Return a task that has a storage, to which by itself it writes never."""
    return task(name, **{"checkpoints": "/storage", "checkpoint_s": 1e6, **fields})


def in_memory(stage):
    return [name for each in stage.world.machines.values() for name in (*each.saved, *each.kept)]


@scene()
async def test_where_every_memory_is_lost_it_goes_on_from_storage(stage):
    members = await stage.running(stored(checkpoint_s=1.0))
    told = await stage.until(lambda: stage.of(CheckpointStored)[1:])
    nodes = [each.node for each in members]
    await stage.lose_power(*nodes)
    stage.boot(*nodes)
    [found] = await stage.until(lambda: stage.of(CheckpointFound))
    assert found.stored.iteration >= told[-1].iteration > 0
    begun = await stage.regrouped(above=0)
    assert (begun.iteration, begun.state_from) == (found.stored.iteration, found.stored.folder)


@scene(nodes=3)
async def test_where_the_memories_of_a_task_are_lost_others_look_for_it_on_storage(stage):
    members = await stage.running(stored(checkpoint_s=1.0, max_workers=2))
    [told, *_] = await stage.until(lambda: stage.of(CheckpointStored))
    nodes = [each.node for each in members]
    await stage.lose_power(*nodes)
    begun = await stage.regrouped(above=0)
    assert begun.node not in nodes
    assert begun.iteration >= told.iteration > 0
    stage.boot(*nodes)


@scene()
async def test_a_task_is_saved_rewound_stopped_and_taken_up_by_order(stage):
    await stage.running(stored())
    assert not stage.of(CheckpointStored)
    await stage.client.save("t")
    [first] = await stage.until(lambda: stage.of(CheckpointStored))
    await stage.reached("t", first.iteration + 2)
    await stage.client.pause("t")
    await stage.until_state("t", TaskState.WAITING)
    await stage.client.rewind("t", first.iteration + 1)
    [alert] = await stage.until(lambda: stage.of(Alert))
    assert f"not from iteration {first.iteration + 1}" in alert.text
    await stage.client.rewind("t", first.iteration)
    await stage.until(lambda: [each for each in stage.of(CheckpointFound) if each.stored])
    await stage.client.pause("t", pause=False)
    taken = await stage.regrouped(state_from=first.folder)
    assert taken.iteration == first.iteration
    await stage.until_state("t", TaskState.RUNNING)
    await stage.client.save("t", stop=True)
    await stage.until(lambda: stage.of(TaskRemoved))
    last = stage.of(CheckpointStored)[-1]
    assert last.iteration > first.iteration
    since = len(stage.of(Regrouped))
    await stage.until(lambda: gone(stage))
    await stage.submit(stored(resume=True))
    begun = await stage.until(lambda: stage.of(Regrouped)[since:])
    assert begun[0].iteration == last.iteration


async def gone(stage):
    return await stage.view("t") is None


@scene(nodes=4)
async def test_what_goes_to_storage_is_what_most_replicas_have(stage):
    [first, *_] = await stage.running(stored(max_workers=4))
    stage.worker(first.worker).flip(b"flipped")
    await stage.until(lambda: stage.worker(first.worker).flaw)
    await stage.client.save("t")
    [told] = await stage.until(lambda: stage.of(StateDiverged))
    assert (told.worker, told.undecided) == (first.worker, False)
    await stage.until(lambda: stage.of(CheckpointStored))
    assert set(stage.world.storage.flaws.values()) == {b""}


@scene(nodes=4)
async def test_a_worker_whose_parameters_changed_takes_those_of_the_others_when_one_of_them_is_replaced(stage):
    [_, victim, flipped, _] = await stage.running(task(max_workers=4, microbatches=40))  # one is there in good time
    stage.worker(flipped.worker).flip(b"flipped")
    await stage.until(lambda: stage.worker(flipped.worker).flaw)
    stage.kill(victim.worker)
    [told] = await stage.until(lambda: stage.of(StateDiverged))
    assert (told.worker, told.node, told.undecided) == (flipped.worker, flipped.node, False)
    assert told.digests.count(told.digests[told.replica]) == 1
    assert (await stage.regrouped(worker=flipped.worker, above=told.epoch)).state_from, "in place"
    await stage.until(lambda: not stage.worker(flipped.worker).flaw)


@scene(nodes=2, transition=transition(TransitionSettings(idle_s=1.0)))
async def test_of_a_task_that_waits_for_long_nothing_is_left_in_memory(stage):
    await stage.running(stored(max_workers=2))
    await stage.client.pause("t")
    await stage.until_state("t", TaskState.WAITING)
    since = stage.of(Regrouped)[-1].epoch
    [written] = await stage.until(lambda: stage.of(CheckpointStored))
    await stage.until(lambda: not in_memory(stage))
    await stage.client.pause("t", pause=False)
    begun = await stage.regrouped(above=since, state_from=written.folder)
    assert begun.iteration == stage.of(StateKept)[-1].state.iteration


@scene(nodes=2, transition=transition(TransitionSettings(idle_s=1e6)))
async def test_all_nodes_told_to_leave_hand_over_to_storage_first(stage):
    await stage.running(stored(max_workers=2))
    since = stage.of(Regrouped)[-1].epoch
    began = stage.now()
    await stage.leave("node-1", "node-2", notice_s=90.0)
    assert stage.now() - began < 30, "they need not wait until they must go"
    await stage.until(lambda: len(stage.of(NodeGone)) == 2)
    assert stage.of(StoreState)
    [written] = stage.of(CheckpointStored)
    *_, last = [each for each in stage.journal if isinstance(each, CheckpointStored | NodeGone)]
    assert isinstance(last, NodeGone), "who had the state has waited until it was stored"
    stage.boot("node-1", "node-2")
    begun = await stage.regrouped(above=since, state_from=written.folder)
    assert begun.iteration == stage.of(StateKept)[-1].state.iteration
    assert not stage.of(FailureDetected)


@scene()
async def test_a_storage_that_refuses_is_told_of_and_training_goes_on(stage):
    stage.world.storage.refuses = "/storage is no directory"
    await stage.running(stored(checkpoint_s=0.5))
    failed = await stage.until(lambda: stage.of(CheckpointFailed))
    assert failed[0].reason == "/storage is no directory"
    await stage.reached("t", max(stage.done("t")) + 5)
    assert not stage.of(FailureDetected)


# --- orders by files, to a registry that is there ---------------------------------------------------------------------


@scene(nodes=1)
async def test_files_are_orders_and_are_removed_when_obeyed(stage, tmp_path):
    switches = Switches(tmp_path, stage.client)
    await stage.running(task())
    for order, kind in (("pause", TaskPaused), ("resume", TaskPaused), ("stop", TaskRemoved)):
        before = len(stage.of(kind))
        (tmp_path / f"t.{order}").touch()
        await switches.obey_files()
        assert not any(tmp_path.iterdir())
        await stage.until(lambda kind=kind, before=before: len(stage.of(kind)) > before)
    assert [each.paused for each in stage.of(TaskPaused)] == [True, False], "once each"
    assert [each.order for each in stage.of(OrderTaken)] == ["SubmitTask", "PauseTask", "PauseTask", "RemoveTask"]


@scene(nodes=1)
async def test_what_can_t_be_obeyed_says_why_and_what_is_no_order_stays(stage, tmp_path):
    folder, outside = tmp_path / "switches", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("mine")
    await stage.running(task())
    (folder / "README").write_text("orders go here")
    (folder / "t.pause").mkdir()
    (folder / "t.resume").symlink_to(outside)
    (folder / "t.rewind-3.refused").symlink_to(outside)  # would be written through
    (folder / "t.rewind-3").touch()
    (folder / "zz.stop").touch()
    switches = Switches(folder, stage.client)
    await switches.obey_files()
    await switches.obey_files()
    assert "no task 'zz'; the known ones are t" in (folder / "zz.stop.refused").read_text()
    assert "no storage" in (folder / "t.rewind-3.refused").read_text()
    assert outside.read_text() == "mine"
    left = {each.name for each in folder.iterdir()}
    assert left == {"README", "t.pause", "t.resume", "zz.stop.refused", "t.rewind-3.refused"}
    assert not stage.of(TaskPaused) + stage.of(TaskRemoved)
