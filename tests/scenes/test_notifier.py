"""Notices of a cluster's incidents, by a notifier that is killed and channels that fail."""

import asyncio
import json

import pytest
from helpers.scenes import scene, task
from unicron_notifier import couriers
from unicron_notifier.config import load
from unicron_notifier.main import NotifierSettings, wiring
from unicron_notifier.senders import DeliveryError
from unicron_simulator.storms.links import CrashedError
from unicron_simulator.storms.world import LEASE_TTL_S

from unicron.contracts.events import Alert, FailureDetected
from unicron.contracts.notices import IncidentKind, NotificationFailed, NotificationSent
from unicron.errors import BusUnavailableError
from unicron.service.service import Service

CHANNEL = '[channel.{name}]\nkind = "json"\nurl = "http://{name}"\ngive_up_s = 2.0\n'
RULE = "[rule.all]\nchannels = {channels}\nwait_s = 3.0\n"


@pytest.fixture
def desk(tmp_path, monkeypatch):
    return Desk(tmp_path / "notify.toml", monkeypatch)


class Desk:
    """The notifier in a scene, and whoever is told.

    Attributes:
        got: the notices that arrived, in order.
        manners: what a channel does instead of taking them: an error, or for None nothing for ever.
        beats: the moments at which the heartbeat came, in virtual seconds.
    """

    def __init__(self, file, monkeypatch):
        self.file, self.got, self.manners, self.beats = file, [], {}, []
        monkeypatch.setattr(couriers, "deliver", self._take)
        monkeypatch.setattr(couriers, "beat", self._beat)

    async def _take(self, notice, given, secrets):
        await asyncio.sleep(0.01)
        self.got.append(notice)
        if notice.channel in self.manners:
            if self.manners[notice.channel] is None:
                await asyncio.Event().wait()
            raise self.manners[notice.channel]

    async def _beat(self, given, secrets):
        self.beats.append(self.stage.now())

    def write(self, *channels, told=None, more=""):
        rule = RULE.format(channels=json.dumps(told or channels))
        self.file.write_text("".join(CHANNEL.format(name=name) for name in channels) + rule + more)

    async def open(self, stage):
        """Start a notifier, and wait until it answers."""
        self.stage = stage
        world, self.link = stage.world, stage.world.network.link("notifier")
        made, fresh_id = wiring(NotifierSettings(notify=str(self.file))), lambda: world.fresh_id("notifier")
        service = Service(made, self.link, world.clock, LEASE_TTL_S, fresh_id)
        couriers_ = couriers.Couriers(load(str(self.file)), self.link, world.clock, service)
        self.jobs = [asyncio.ensure_future(self._run(each)) for each in (service.run(), couriers_.run())]
        await stage.until(self.channels)

    async def _run(self, job):
        try:
            await job
        except CrashedError:
            self.close()

    def close(self):
        for job in self.jobs:
            job.cancel()

    async def kill(self):
        await self.link.crash()
        self.close()

    async def channels(self):
        try:
            return (await self.stage.client.notifications()).channels
        except BusUnavailableError:
            return []

    def at(self, channel, incident=None):
        return [each for each in self.got if each.channel == channel and incident in {None, each.incident}]


@scene(nodes=2)
async def test_bad_receivers_cost_no_other_one_its_deliveries_and_are_told_of_once(stage, desk):
    desk.manners = {
        "hanging": None,
        "full": DeliveryError("HTTP 503"),
        "away": DeliveryError("a redirect, which is not followed", final=True),
        "odd": ValueError("a defect"),
    }
    desk.write(*desk.manners, "ops")
    await desk.open(stage)
    await stage.running(task(min_workers=2, max_workers=2))
    await stage.lose_power("node-1")
    opened, *_ = await stage.until(lambda: desk.at("ops"))
    assert (opened.title, opened.phase) == ("node-1 is lost: 1 worker of 1 task (t)", "opened")
    assert opened.id.endswith(".ops")
    stage.boot("node-1")
    await stage.until(lambda: [each for each in desk.at("ops") if each.phase == "over"])
    await stage.until(lambda: {"full", "away", "odd"} == {each.text.split()[1] for each in stage.of(Alert)})
    await stage.wait(20)
    assert len(stage.of(Alert)) == 3, "once each"
    [away, *_] = stage.of(NotificationFailed, channel="away")
    assert away.reason == "a redirect, which is not followed"
    assert [each.phase for each in desk.at("ops", opened.incident)] == ["opened", "over"]
    assert {each.name for each in await desk.channels() if each.broken} == {"full", "away", "odd"}
    assert len(desk.at("hanging")) == 1


@pytest.mark.parametrize("writes", [each / 2 for each in range(1, 13)])
@scene(nodes=2)
async def test_wherever_it_is_killed_nothing_is_lost_and_what_is_doubled_has_the_same_id(stage, desk, writes):
    desk.write("ops")
    await desk.open(stage)
    killed = asyncio.Event()
    desk.link.crash_after(writes, killed.set)
    await stage.submit(task(max_workers=2))
    await stage.reached("t", 2)
    await stage.lose_power("node-1")
    await stage.wait(8)
    if not killed.is_set():
        await desk.kill()
    await desk.open(stage)
    stage.boot("node-1")
    await stage.lose_power("node-2")
    await stage.until(lambda: len(stage.of(NotificationSent)) >= 2)
    stage.boot("node-2")
    await stage.wait(15)
    lost = [each.correlation for each in stage.of(FailureDetected, severity=1)]
    assert len(lost) == 2
    sent = [each.delivery for each in stage.of(NotificationSent)]
    assert len(sent) == len(set(sent)), "each is told of once"
    failures = [each for each in desk.got if each.kind is not IncidentKind.ALERT]  # that it begins anew is told as well
    assert {each.chain for each in failures} == set(lost)
    assert {each.id for each in desk.got} == set(sent)
    assert len(desk.got) - len(sent) <= 1, "only what was under way is sent again"


@scene(nodes=1)
async def test_the_heartbeat_beats_as_long_as_the_journal_answers(stage, desk):
    desk.write("ops", more='[heartbeat]\nurl = "http://alive"\nevery_s = 1.0\n')
    await desk.open(stage)
    await stage.until(lambda: len(desk.beats) >= 3)
    desk.link.interrupt()
    cut = stage.now()
    await stage.wait(10)
    assert desk.beats[-1] <= cut
    desk.link.heal()
    await stage.until(lambda: desk.beats[-1] > cut)
