"""Open pages: who merges the changes has the whole, and who is slow harms nobody."""

import asyncio

import msgspec
from helpers.accounts import began, failure, finished, journal
from helpers.waiting import elapse, in_virtual_time
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from replay import replayer
from unicron_console.live import CLUSTER, GROWS_S, WAITING, Hub
from unicron_console.projection import Projection

from unicron.contracts import events

REPLACED = ("now", "position", "behind", "waf", "possible_waf", "goodput", "slots", "spares", "failures")


class Clock:
    now = 1e9

    def __call__(self):
        return self.now


def hub(messages=()):
    picture = Projection()
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
            reader = made.open(CLUSTER)
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
    gpt, node = made.open(("task", "gpt")), made.open(("node", "n1"))
    made._tick()
    frames(gpt), frames(node)
    made._clock.now += GROWS_S / 2
    made._tick()
    assert frames(gpt) == frames(node) == []
    made.picture.overhear(finished(7, seconds=2.0, at=500.0))
    made._tick()
    [frame] = frames(gpt)
    assert frame["whole"]["line"]["iteration"] == 7
    assert frames(node) == []


def test_of_what_there_is_none_no_page_opens_and_what_goes_is_told():
    made = hub(journal(began()))
    assert made.open(("task", "bert")) is None
    reader = made.open(("task", "gpt"))
    made.picture.handle(900, replace(events.TaskRemoved(task="gpt"), id="r", at=500.0, source="registry"))
    made._tick()
    assert "no such task" in frames(reader)[-1]["gone"]


def test_who_does_not_read_is_let_go_and_all_others_read_on():
    made = hub(journal(began()))
    slow, good = made.open(CLUSTER), made.open(CLUSTER)
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
    readers = [made.open(CLUSTER) for _ in range(5)]
    assert asked == [CLUSTER]
    made.picture.handle(900, replace(failure(), id="f", at=500.0, source="detector"))
    late = made.open(CLUSTER)
    assert len(asked) == 2
    assert frames(late)[0]["whole"]["failures"], "it is as new as what the others were sent"
    assert all(len(frames(reader)) == 2 for reader in readers)


@in_virtual_time
async def test_the_first_change_after_a_pause_is_told_at_once():
    made = hub(journal(began()))
    job = asyncio.create_task(made.run())
    try:
        reader = made.open(CLUSTER)
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
    reader = made.open(CLUSTER)
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
