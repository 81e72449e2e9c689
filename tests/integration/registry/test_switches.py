"""Orders by files in a watched folder: obeyed once, refused with a reason, and nothing else there is touched."""

import asyncio
import logging
import os

import pytest
from helpers.registry import SPEC, connected, eventually, facts, registry
from unicron_registry.switches import LEFT_S, MOST, Switches

from unicron.contracts.events import OrderTaken, TaskRemoved
from unicron.errors import BusUnavailableError
from unicron.service.bootstrap import own_name


async def test_the_registry_watches_a_folder_and_says_who_ordered(private_world, tmp_path, monkeypatch):
    monkeypatch.setenv("UNICRON_SWITCHES", str(tmp_path))
    async with connected(private_world) as client:
        with registry(private_world), registry(private_world):
            await eventually(client.status, lambda status: True)
            await client.submit(SPEC)
            (tmp_path / "gpt.stop").touch()
            await eventually(lambda: facts(client, TaskRemoved), len)
            mine, *by_files = [each.by for each in await facts(client, OrderTaken)]
            assert mine == own_name()
            assert by_files == [f"user {os.getuid()}, by the file gpt.stop"]


class Nobody:
    """A client of a cluster without a registry, or with one that counts what it is ordered."""

    def __init__(self, *, active=True):
        self.there, self.orders = active, []

    async def status(self):
        if not self.there:
            raise BusUnavailableError("nobody answers")

    async def save(self, task, *, stop=False):
        self.orders.append((task, stop))
        return "done"


async def test_orders_wait_for_a_registry_and_of_two_that_watch_one_obeys(tmp_path):
    client = Nobody(active=False)
    several = [Switches(tmp_path, client) for _ in range(4)]
    (tmp_path / "gpt.save").touch()
    (tmp_path / "gpt.stop-save").touch()
    await several[0].look()
    assert (client.orders, len(list(tmp_path.iterdir()))) == ([], 2)
    client.there = True
    await asyncio.gather(*(each.look() for each in several))
    assert sorted(client.orders) == [("gpt", False), ("gpt", True)]
    assert not any(tmp_path.iterdir())


async def test_what_a_process_took_that_ended_is_not_obeyed_again_but_told(tmp_path):
    client, now = Nobody(), 0.0
    switches = Switches(tmp_path, client, lambda: now)
    (tmp_path / "gpt.save.taken").touch()
    (tmp_path / "other.taken").touch()
    await switches.look()
    now = LEFT_S - 1
    await switches.look()
    assert (tmp_path / "gpt.save.taken").exists(), "another may be at it"
    now = LEFT_S + 1
    await switches.look()
    assert {each.name for each in tmp_path.iterdir()} == {"gpt.save.refused", "other.taken"}
    assert "whether it was obeyed is not known" in (tmp_path / "gpt.save.refused").read_text()
    assert client.orders == []


@pytest.mark.parametrize(
    "name", ["gpt.sav", "gpt.save.txt", "g pt.save", "save", "gpt.rewind-", "gpt.rewind--1", "ä.save"]
)
async def test_what_is_no_order_is_told_once(tmp_path, caplog, name):
    (tmp_path / name).touch()
    client = Nobody()
    switches = Switches(tmp_path, client)
    await switches.look()
    await switches.look()
    assert [each.levelno for each in caplog.records] == [logging.WARNING]
    assert "no order: it is TASK.ORDER with one of pause, resume, save, stop, stop-save, rewind-N" in caplog.text
    assert (client.orders, (tmp_path / name).exists()) == ([], True)


async def test_a_folder_that_is_not_there_is_told_once_and_watched_again_when_it_is(tmp_path, caplog):
    folder, client = tmp_path / "later", Nobody()
    switches = Switches(folder, client)
    await switches.look()
    await switches.look()
    assert len(caplog.records) == 1
    folder.mkdir()
    (folder / "gpt.save").touch()
    await switches.look()
    assert client.orders == [("gpt", False)]


async def test_what_can_t_be_taken_is_not_obeyed(tmp_path, caplog):
    (tmp_path / "gpt.save").touch()
    (tmp_path / "gpt.save.taken").mkdir()  # no file can be renamed to that, as in a folder where one may not
    client = Nobody()
    switches = Switches(tmp_path, client)
    await switches.look()
    await switches.look()
    assert (client.orders, len(caplog.records)) == ([], 1)


async def test_one_look_is_bounded(tmp_path, caplog):
    for number in range(MOST + 1):
        (tmp_path / f".{number}").touch()
    switches = Switches(tmp_path, Nobody())
    await switches.look()
    await switches.look()
    assert len(caplog.records) == 1
    assert f"{MOST} entries or more" in caplog.text
