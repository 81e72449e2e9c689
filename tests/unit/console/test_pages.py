"""The picture of a cluster: what the journal says, and what it no longer says; and the pages that are open of it."""

import asyncio
import re
import time

import msgspec
import pytest
from helpers.accounts import FOUR, SPEC, admitted, began, exited, failure, finished, journal, plan, regroup, regrouped
from helpers.waiting import elapse, in_virtual_time, until
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from replay import replayer
from unicron_cli import watch
from unicron_console.live import CLUSTER, GROWS_S, WAITING, Hub
from unicron_console.main import ConsoleSettings, export_recoveries
from unicron_console.main import read as read_journal
from unicron_console.pages import Pages
from unicron_simulator.storms.bus import MemoryWorld

from unicron import codec, subjects
from unicron.client import Client
from unicron.contracts import events, hardware, slowdowns
from unicron.contracts.answers import NodeView, Reply, Status, TaskView
from unicron.contracts.plans import Plan
from unicron.contracts.tasks import Member, NodeState, Slot, TaskState
from unicron.observe.accounts import otel
from unicron.observe.cluster import ClusterPicture
from unicron.observe.incidents import FAILURES
from unicron.observe.state import EARLIER, POINTS, STORIES, STORY, ThinnedSeries
from unicron.observe.stories import SEEN

NOW = 2e9


def read(messages, picture=None):
    picture = picture or ClusterPicture()
    for position, message in enumerate(messages, 1):
        picture.handle(position, message)
    return picture


def everything(picture, now=NOW):
    """Return all pages, as bytes."""
    pages = Pages(picture)
    pages.account(now)
    found = [pages.cluster(now), pages.failures(), pages.report]
    found += [pages.task(name, now) for name in picture.tasks]
    found += [pages.node(name, now) for name in picture.nodes]
    found += [pages.failure(chain, now) for chain in picture.failures]
    return msgspec.json.encode(found)


def by_hand(*parts):
    return journal([*began(), *parts])


def square(picture, name, now=0.0):
    return Pages(picture).square(picture.nodes[name], now)


@pytest.mark.parametrize("name", replayer.NAMES)
def test_recorded_clusters_look_in_the_end_as_their_journals_say(name):
    messages = replayer.read(name)
    picture = read(messages)
    ends = {each.task: each.state for each in messages if isinstance(each, events.TaskStateChanged)}
    assert {name: task.state for name, task in picture.tasks.items()} == {
        task: state for task, state in ends.items() if state is not TaskState.REMOVED
    }
    chains = {each.correlation or each.id for each in messages if isinstance(each, events.FailureDetected)}
    assert set(picture.failures) == chains
    page = Pages(picture).cluster(NOW)
    assert all(line.over for line in page.failures)
    assert {told.kind for told in page.events} >= {"FailureDetected", "PlanDecided"}
    assert page.spares == page.slots, "all tasks have ended"


async def test_the_head_of_a_chain_is_one_on_the_page_and_in_a_terminal(capsys):
    class Journal:
        """A client of a cluster that has written it."""

        messages = list(enumerate(replayer.read("demo"), 1))

        async def tail(self):
            return len(self.messages)

        async def follow(self, after=0, until=None):
            for place, message in self.messages[after:until]:
                yield place, message

    picture = read(message for _, message in Journal.messages)
    pages = Pages(picture)
    assert picture.failures
    for chain in picture.failures:
        await watch._story(Journal(), chain, as_json=False)
        head = capsys.readouterr().out.partition("\n")[0]
        assert head.endswith(f" s: {pages.failure(chain, NOW).headline}")


@pytest.mark.parametrize("name", replayer.NAMES)
def test_a_healed_failure_adds_up_and_shows_what_was_seen(name):
    picture = read(replayer.read(name))
    pages, healed = Pages(picture), 0
    for chain in picture.failures:
        page = pages.failure(chain, NOW)
        assert sum(page.seconds.values()) == pytest.approx(page.line.cost_s)
        if page.line.recovered_s is None:
            continue
        healed += 1
        told = re.findall(r"back at .*? after ([0-9.]+) s", page.headline)
        assert len(page.line.tasks) > 1 or told in ([], [f"{page.line.recovered_s:.2f}"]), "one figure for one thing"
        kinds = {told.kind for told in page.messages}
        assert "FailureDetected" in kinds
        assert [told.position for told in page.messages] == sorted(told.position for told in page.messages)
        assert {told.kind for told in page.evidence} <= {kind.__name__ for kind in SEEN}
        if page.line.worker and page.line.status == "exited_abnormally":
            assert "WorkerExited" in {told.kind for told in page.evidence}
            assert f"({page.line.worker}) on {page.line.node} was ended" in page.headline
            assert ": " in page.headline, "how it ended"
            assert {"detection", "decision", "transition"} <= page.seconds.keys()
    assert healed


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_read_again_from_anywhere_it_is_the_picture_made_afresh(data):
    messages = replayer.read("storm")
    picture = ClusterPicture()
    at = 0
    while at < len(messages):
        until = data.draw(st.integers(at, len(messages)), "until where it is read")
        again = data.draw(st.integers(0, at), "from where it begins")
        for position in range(again, max(until, again)):
            picture.handle(position + 1, messages[position])
        at = max(at + 1, until) if until > at else at + len(messages) // 3
        for position in range(picture.position, min(at, len(messages))):
            picture.handle(position + 1, messages[position])
    assert everything(picture) == everything(read(messages))


def test_a_node_is_up_suspected_lost_and_back():
    picture = read(by_hand())
    assert square(picture, "n2").slots == ["gpt", "gpt"]
    told = replace(events.NodeSuspected(node="n2", reason="closed", grace_s=5.0), id="s", at=200.0, source="detector")
    picture.handle(900, told)
    assert square(picture, "n2", 201.0).state == "suspected"
    assert square(picture, "n2", 206.0).state == "up", "it was heard of again, which nobody says"
    lost = replace(failure(worker="", node="n2", slot=-1, sev=1, task=""), id="f", at=207.0, source="detector")
    picture.handle(901, lost)
    assert square(picture, "n2", 207.0).state == "lost"
    assert picture.failures["f"].tasks.keys() == {"gpt"}
    picture.handle(902, replace(admitted("n2"), id="a", at=300.0, source="registry"))
    assert square(picture, "n2", 300.0).state == "up"


def test_a_drained_node_stays_so_when_it_comes_back():
    picture = read(by_hand())
    said = [events.NodeDrained(node="n1"), admitted("n1"), events.NodeDrained(node="n1", drain=False)]
    for position, message in enumerate(said, 900):
        picture.handle(position, replace(message, id=str(position), at=300.0, source="registry"))
        assert square(picture, "n1").state == ("up" if position == 902 else "draining")


def test_slots_go_with_the_plan_and_come_back_with_the_tasks_end():
    picture = read(by_hand())
    picture.handle(900, replace(plan("node_left:n2", "gpt", [("n1", 0)]), id="p", at=200.0, source="planner"))
    assert square(picture, "n1").slots == ["gpt", ""]
    assert Pages(picture).cluster(NOW).spares == 3
    done = events.TaskStateChanged(task="gpt", state=TaskState.FINISHED)
    picture.handle(901, replace(done, id="d", at=300.0, source="transition"))
    assert square(picture, "n1").slots == ["", ""]
    assert Pages(picture).cluster(NOW).spares == 4
    picture.handle(902, replace(events.TaskRemoved(task="gpt"), id="r", at=301.0, source="registry"))
    assert not picture.tasks


def test_attempts_say_what_they_began_with_and_what_ended_them():
    three = FOUR[:3]
    picture = read(
        by_hand(
            (121, "killed", exited("w4", "n2", 1, iteration=10, signal=9)),
            (122, "killed", failure()),
            (124, "killed", *regroup(1, three)),
            (130, "killed", *regrouped(1, three, iteration=10, kept=5, recomputed=2)),
        )
    )
    new, old = Pages(picture).task("gpt", NOW).attempts
    assert (new.epoch, new.workers, new.iteration, new.kept, new.recomputed, new.chain) == (1, 3, 10, 5, 2, "killed")
    assert (old.until, old.ended, old.why) == (122, "killed", picture.failures["killed"].first.reason)
    assert new.until is None


def test_marks_say_who_did_what_once_for_all_who_did_the_same():
    picture = read(replayer.read("demo"))
    pages = Pages(picture)
    found = {line.status: [mark.text for mark in pages.failure(line.chain, NOW).marks] for line in pages.failures()}
    assert found["exited_abnormally"] == [
        "rank 1 lost",
        "detector: rank 1 failed",
        "rank 0 ordered to regroup",
        "gpt-a-5 to be started",
        "rank 0 regrouped, iteration 12 resumed",
        "gpt-a-5 ready",
        "ranks 0-1 ordered to regroup",
        "ranks 0-1 regrouped, iteration 12 resumed",
        "gpt-a back at 2 workers",
    ]
    assert found["task_hang"][:2] == ["rank 2 stalled", "detector: rank 2 failed"]
    of_node = found["lost_connection"]
    assert of_node[0] == "detector: node-3 failed"
    assert {"gpt-a rank 0 regrouped, iteration 21 resumed", "gpt-b ranks 0-2 regrouped, iteration 26 resumed"} <= set(
        of_node
    )


def test_telemetry_of_what_nobody_knows_changes_nothing():
    picture = ClusterPicture()
    for message in (
        finished(1, task="t"),
        hardware.GpusSampled(node="n", gpus=[]),
        slowdowns.ComputeTimed(node="n", task="t", epoch=0, iteration=1, workers=[]),
    ):
        picture.handle_telemetry(message)
    assert everything(picture) == everything(ClusterPicture())


def test_progress_gives_loss_and_waf_while_the_task_runs():
    picture = read(by_hand())
    members = [Member(worker="w1", node="n1", slot=0)]
    running = events.TaskStateChanged(task="gpt", state=TaskState.RUNNING, members=members)
    picture.handle(900, replace(running, id="r", at=200.0, source="transition"))
    spec = replace(SPEC, flops_per_iteration=1e12, weight=2.0)
    picture.tasks["gpt"].spec = spec
    picture.handle_telemetry(finished(7, seconds=2.0, at=201.0))
    page = Pages(picture).task("gpt", NOW)
    assert (page.line.iteration, page.line.loss, page.line.waf) == (7, 0.5, 1e12)
    assert page.progress == [(201.0, 7, 0.5, 2.0)]


def test_what_a_task_lost_is_told_by_cause_and_adds_up():
    picture = read(replayer.read("demo"))
    pages = Pages(picture)
    pages.account(NOW)
    found = [pages.task(name, NOW) for name in picture.tasks]
    for page in found:
        lost = sum(page.seconds.values()) - page.seconds.get("training", 0.0) - page.seconds.get("idle", 0.0)
        assert sum(page.causes.values()) == pytest.approx(lost)
        assert bool(page.struck) == bool({*page.causes} - {""})
    assert any(page.struck for page in found)


@given(st.lists(st.sampled_from([*TaskState]), max_size=12))
def test_losses_of_earlier_tasks_of_a_name_are_kept_as_long_as_the_next_ones_go_on(states):
    picture, at, expected, now = ClusterPicture(), 0, [], []
    for state in states:
        at += 1
        if "gpt" not in picture.tasks or picture.tasks["gpt"].state.ended:
            picture.handle(at, replace(events.TaskSubmitted(task="gpt", spec=SPEC), id=str(at), at=float(at)))
            at += 1
            now = []
        picture.handle_telemetry(finished(at, seconds=1.0, at=float(at)))
        now.append(at)
        moved = events.TaskStateChanged(task="gpt", state=state)
        picture.handle(at, replace(moved, id=str(at), at=float(at), source="transition"))
        expected += [now] if state.ended else []
    at += 1
    if states and states[-1].ended:
        picture.handle(at, replace(events.TaskSubmitted(task="gpt", spec=SPEC), id=str(at), at=float(at)))
    page = Pages(picture).task("gpt", NOW)
    told = [[iteration for _, iteration, _, _ in each] for each in page.earlier] if page else []
    assert told == expected[-EARLIER:]


@pytest.mark.parametrize("state", TaskState)
def test_a_task_that_waits_or_has_ended_shows_no_workers_whatever_membership_was_its_last(state):
    members = [Member(worker="w1", node="n1", slot=0), Member(worker="w2", node="n1", slot=1)]
    told, asked = read(by_hand()), ClusterPicture()
    moved = events.TaskStateChanged(task="gpt", state=state, members=members)
    told.handle(900, replace(moved, id="r", at=200.0, source="transition"))
    asked.fill(Status(tasks=[TaskView(spec=SPEC, state=state, members=members)]))
    shown = {len(picture.tasks["gpt"].members) for picture in (told, asked) if "gpt" in picture.tasks}
    assert shown == ({0} if state is TaskState.WAITING or state.ended else {2})


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from([*TaskState]))))
def test_no_two_living_tasks_have_one_colour_and_no_more_colours_are_used_than_tasks_ever_lived_at_once(steps):
    picture, most = ClusterPicture(), 0
    for at, (name, state) in enumerate(steps, 1):
        known = name in picture.tasks and not picture.tasks[name].state.ended
        moved = events.TaskStateChanged(task=name, state=state)
        message = moved if known else events.TaskSubmitted(task=name, spec=replace(SPEC, name=name))
        picture.handle(at, replace(message, id=str(at), at=float(at), source="registry"))
        living = [each.colour for each in picture.tasks.values() if not each.state.ended]
        most = max(most, len(living))
        assert len({*living}) == len(living)
        assert all(0 <= colour < most for colour in living)


def test_what_the_journal_no_longer_tells_the_registry_does_and_no_more():
    old = TaskView(spec=replace(SPEC, name="old"), state=TaskState.RUNNING, iteration=9)
    status = Status(
        nodes=[
            NodeView(node="n1", state=NodeState.LOST),
            NodeView(node="old", state=NodeState.DRAINING, slots=[Slot(index=0, kind="gpu")], since=5.0),
        ],
        tasks=[TaskView(spec=SPEC, state=TaskState.FAILED, iteration=5), old],
    )
    picture = read(by_hand())
    before = picture.tasks["gpt"].state
    picture.fill(status)
    assert (square(picture, "n1").state, picture.tasks["gpt"].state) == ("up", before)
    assert picture.tasks["gpt"].iteration == 5, "progress is telemetry, which the journal does not tell"
    assert (square(picture, "old").state, picture.nodes["old"].kind) == ("draining", "gpu")
    assert (picture.tasks["old"].state, picture.tasks["old"].iteration) == (TaskState.RUNNING, 9)


def older_than_its_journal():
    """Return what the journal still has, and what the registry knows."""
    nothing_new = events.PlanDecided(plan=Plan(number=2, trigger="worker_failed:gpt", workers=4, tasks=["gpt"]))
    young = [
        (121, "killed", exited("w4", "n2", 1, iteration=10, signal=9)),
        (122, "killed", failure(), nothing_new),
        (130, "killed", *regrouped(1, FOUR[:3], iteration=10)),
    ]
    slots = [Slot(index=index) for index in range(2)]
    before = plan("node_joined:n2", "gpt", [(node, slot) for _, node, slot in FOUR]).plan
    return journal(young), Status(
        nodes=[NodeView(node=node, state=NodeState.UP, slots=slots) for node in ("n1", "n2")],
        tasks=[TaskView(spec=SPEC, state=TaskState.RUNNING)],
        plan=replace(nothing_new.plan, shares=before.shares),
    )


def test_what_the_registry_tells_late_is_put_where_it_belongs():
    young, status = older_than_its_journal()
    picture = read(young)
    picture.fill(status)
    assert [square(picture, node).slots for node in ("n1", "n2")] == [["gpt", "gpt"]] * 2
    assert Pages(picture).cluster(NOW).spares == 0


async def test_of_a_cluster_older_than_its_journal_failures_name_their_tasks():
    young, status = older_than_its_journal()
    world = MemoryWorld(time.time)
    bus, hub = world.connect(), Hub(ClusterPicture(), time.time)

    async def registry(_):
        return codec.encode(Reply(status=status))

    await bus.serve(subjects.rpc("registry"), "registry", registry)
    for number, message in enumerate(young):
        source = "detector" if isinstance(message, events.FailureDetected) else message.source
        made = replace(message, id=f"m{number}", source=source or getattr(message, "node", "") or "planner")
        await bus.append(subjects.for_message(made), codec.encode(made), made.id)
    hub.behind = 1
    job = asyncio.create_task(read_journal(Client(bus), hub))
    await until(lambda: not hub.behind)
    job.cancel()
    picture = hub.picture
    assert picture.failures["killed"].tasks.keys() == {"gpt"}
    assert [attempt.epoch for attempt in picture.tasks["gpt"].attempts] == [1]
    assert [square(picture, node).slots for node in ("n1", "n2")] == [["gpt", "gpt"]] * 2


def test_memory_is_bounded_however_long_it_runs():
    picture = read(by_hand())
    position = 1000
    for number in range(FAILURES + 10):
        for message in (exited("w4", "n2", 1, iteration=10, signal=9), failure()):
            position += 1
            made = replace(message, id=f"f{position}", correlation=f"c{number}", at=200.0 + number, source="detector")
            picture.handle(position, made)
    for number in range(2 * STORY):
        alert = replace(events.Alert(text="more"), id=f"a{number}", correlation="c1000", at=2000.0, source="detector")
        picture.handle(position + 1 + number, alert)
    assert (len(picture.failures), len(picture.stories)) == (FAILURES, STORIES)
    page = Pages(picture).failure("c1000", NOW)
    assert (len(page.messages), page.unheard) == (STORY, STORY + 2)
    assert Pages(picture).failure("c0", NOW) is None


def test_a_recovery_is_told_to_a_collector_once_and_only_by_who_saw_it(monkeypatch):
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(otel, "_exporter", lambda _: exporter)
    messages = replayer.read("demo")
    settings = ConsoleSettings(traces="http://127.0.0.1:4318")
    traces = otel.Traces(settings)
    late, picture = read(messages), ClusterPicture()
    export_recoveries(late, None)
    for position, message in enumerate(messages, 1):
        picture.handle(position, message)
        for each in (picture, late):
            export_recoveries(each, traces)
    traces.close()
    roots = [span.attributes["unicron.chain"] for span in exporter.get_finished_spans() if span.parent is None]
    assert len(roots) > 1
    assert sorted(set(roots)) == sorted(roots)
    assert set(roots) <= set(picture.failures)
    assert not any(story.messages for story in picture.stories.values())


@given(st.integers(0, 3000))
def test_a_course_spans_all_of_its_time(points):
    course = ThinnedSeries(2)
    for number in range(points):
        course.add(number, 2 * number)
    found = list(course.points())
    assert len(found) < POINTS
    assert all(second == 2 * first for first, second in found)
    assert not points or found[-1][0] > points * 0.9 - 2
    assert not points or found[0][0] <= points * 0.1


# --- open pages -------------------------------------------------------------------------------------------------------


REPLACED = ("now", "position", "behind", "waf", "possible_waf", "goodput", "slots", "spares", "failures")


class Clock:
    now = 1e9

    def __call__(self):
        return self.now


def hub(messages=()):
    picture = ClusterPicture()
    for position, message in enumerate(messages, 1):
        picture.handle(position, message)
    return Hub(picture, Clock())


def frames(reader):
    found = []
    while not reader.frames.empty():
        frame = reader.frames.get_nowait()
        found.append(None if frame is None else msgspec.json.decode(frame))
    return found


class Browser:
    """Merges as the page does."""

    def take(self, frame):
        if "whole" in frame:
            self.page = frame["whole"]
            return
        news = frame["changes"]
        self.page |= {name: news[name] for name in REPLACED}
        self.page["nodes"] |= news["nodes"]
        tasks = {task["name"]: task for task in self.page["tasks"]} | {task["name"]: task for task in news["tasks"]}
        self.page["tasks"] = [task for task in tasks.values() if task["state"] != "removed"]
        self.page["events"] = [*self.page["events"], *news["events"]][-200:]
        self.page["course"] = news["course"] or self.page["course"]


@given(st.data())
@settings(max_examples=15, deadline=None)
def test_whoever_merges_all_changes_has_the_page_as_it_is(data):
    messages = replayer.read("storm")
    made, browser = hub(), Browser()
    at = data.draw(st.integers(0, len(messages) - 1), "when the page is opened")
    reader = None
    for position, message in enumerate(messages, 1):
        made.picture.handle(position, message)
        if position == at + 1:
            reader = made.subscribe(CLUSTER)
            browser.take(frames(reader)[0])
        elif reader and data.draw(st.integers(0, 40), "a look") == 0:
            made._tick()
            for frame in frames(reader):
                browser.take(frame)
    made._tick()
    for frame in frames(reader):
        browser.take(frame)
    whole = msgspec.json.decode(msgspec.json.encode(made.page(CLUSTER)))
    for page in (whole, browser.page):
        page.pop("now"), page.pop("position")
        for line in page["failures"]:
            line.pop("cost_s")  # grows with time
    assert browser.page == whole


def test_a_page_of_something_is_sent_when_that_changes_and_nothing_else():
    made = hub(journal(began()))
    gpt, node = made.subscribe(("task", "gpt")), made.subscribe(("node", "n1"))
    made._tick()
    frames(gpt), frames(node)
    made._clock.now += GROWS_S / 2
    made._tick()
    assert frames(gpt) == frames(node) == []
    made.picture.handle_telemetry(finished(7, seconds=2.0, at=500.0))
    made._tick()
    [frame] = frames(gpt)
    assert frame["whole"]["line"]["iteration"] == 7
    assert frames(node) == []


def test_of_what_there_is_none_no_page_opens_and_what_goes_is_told():
    made = hub(journal(began()))
    assert made.subscribe(("task", "bert")) is None
    reader = made.subscribe(("task", "gpt"))
    made.picture.handle(900, replace(events.TaskRemoved(task="gpt"), id="r", at=500.0, source="registry"))
    made._tick()
    assert "no such task" in frames(reader)[-1]["gone"]


def test_who_does_not_read_is_let_go_and_all_others_read_on():
    made = hub(journal(began()))
    slow, good = made.subscribe(CLUSTER), made.subscribe(CLUSTER)
    for number in range(2 * WAITING):
        made.picture.handle(900 + number, replace(failure(), id=f"f{number}", at=500.0 + number, source="detector"))
        made._tick()
        assert frames(good)
    assert frames(slow) == [None], "what waited for it takes no room"
    assert len(made) == 1


def test_the_whole_cluster_is_made_once_for_all_who_come_at_the_same_time(monkeypatch):
    made, asked = hub(journal(began())), []
    page = made.page
    monkeypatch.setattr(made, "page", lambda topic: asked.append(topic) or page(topic))
    readers = [made.subscribe(CLUSTER) for _ in range(5)]
    assert asked == [CLUSTER]
    made.picture.handle(900, replace(failure(), id="f", at=500.0, source="detector"))
    late = made.subscribe(CLUSTER)
    assert len(asked) == 2
    assert frames(late)[0]["whole"]["failures"], "it is as new as what the others were sent"
    assert all(len(frames(reader)) == 2 for reader in readers)


@in_virtual_time
async def test_the_first_change_after_a_pause_is_told_at_once():
    made = hub(journal(began()))
    job = asyncio.create_task(made.run())
    try:
        reader = made.subscribe(CLUSTER)
        await reader.frames.get()
        await elapse(60.0)
        made.picture.handle(900, replace(failure(), id="f", at=500.0, source="detector"))
        woken = asyncio.get_running_loop().time()
        made.wake()
        frame = msgspec.json.decode(await reader.frames.get())
        assert asyncio.get_running_loop().time() == woken
        assert [line["chain"] for line in frame["changes"]["failures"]] == ["f"]
        assert [told["kind"] for told in frame["changes"]["events"]] == ["FailureDetected"]
    finally:
        job.cancel()


def test_while_the_journal_is_read_pages_say_so_and_then_get_the_whole():
    made = hub()
    made.behind = 5
    reader = made.subscribe(CLUSTER)
    assert frames(reader)[0]["whole"]["behind"] == 5
    for position, message in enumerate(journal(began()), 1):
        made.picture.handle(position, message)
    made._tick()
    [frame] = frames(reader)
    assert (frame["changes"]["behind"], frame["changes"]["nodes"]) == (5, {})
    made.caught_up()
    [frame] = frames(reader)
    assert frame["whole"]["behind"] == 0
    assert set(frame["whole"]["nodes"]) == {"n1", "n2"}
