"""Orders by files, to a registry that is there."""

from helpers.scenes import scene, task
from unicron_registry.switches import Switches

from unicron.contracts.events import OrderTaken, TaskPaused, TaskRemoved


@scene(nodes=1)
async def test_files_are_orders_and_are_removed_when_obeyed(stage, tmp_path):
    switches = Switches(tmp_path, stage.client)
    await stage.running(task())
    for order, kind in (("pause", TaskPaused), ("resume", TaskPaused), ("stop", TaskRemoved)):
        before = len(stage.of(kind))
        (tmp_path / f"t.{order}").touch()
        await switches.look()
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
    await switches.look()
    await switches.look()
    assert "no task 'zz'; the known ones are t" in (folder / "zz.stop.refused").read_text()
    assert "no storage" in (folder / "t.rewind-3.refused").read_text()
    assert outside.read_text() == "mine"
    left = {each.name for each in folder.iterdir()}
    assert left == {"README", "t.pause", "t.resume", "zz.stop.refused", "t.rewind-3.refused"}
    assert not stage.of(TaskPaused) + stage.of(TaskRemoved)
