"""The console in a real browser, with a cluster that trains, fails and heals behind it."""

import os
import signal
import time
from functools import partial

import pytest
import pytest_asyncio
from helpers.browser import CHROMIUM, Window, chromium
from helpers.ports import free_port
from helpers.training import SMALL, running_cluster, task, write_script
from unicron_deploy.embedded import Cluster

from unicron.contracts.events import FailureDetected, OrderTaken, WorkerReady
from unicron.contracts.tasks import TaskState

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome in PATH"),
]

MARKUP = "<img src=x onerror=window.__pwned=1>"
HOSTILE = f"{MARKUP}\x1b[31mred\x1b]0;title\x07"
"""What a program may write: markup, and what steers a terminal."""

TRAIN = SMALL.replace("    for iteration", "    print(os.environ['HOSTILE'], flush=True)\n    for iteration").replace(
    "        session.step()",
    "        if 'RAISES' in os.environ:\n            raise ValueError(os.environ['HOSTILE'])\n        session.step()",
)

FACTS = {"iterations": 10**6, "microbatches": 4}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory):
    """Three nodes of one slot: `gpt` trains on two, and `bad` has failed by its own error."""
    folder = tmp_path_factory.mktemp("console")
    script = write_script(folder, TRAIN)
    async with running_cluster(folder, 3, 1, partial(Cluster, console=free_port())) as scene:
        told = {"HOSTILE": HOSTILE}
        await scene.client.submit(task(script, "gpt", max_workers=2, env=told, **FACTS))
        await scene.reached("gpt", 3)
        await scene.client.submit(task(script, "bad", max_workers=1, env={**told, "RAISES": "1"}, **FACTS))
        await scene.until_state("bad", TaskState.FAILED)
        yield scene


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser():
    async with chromium() as browser:
        yield browser


@pytest_asyncio.fixture(loop_scope="module")
async def window(browser, scene):
    window = await Window.open(browser, scene.cluster.console_url)
    yield window
    await window.close()


async def sign_in(page, token):
    await page.click("#sign")
    await page.fill("dialog input[name=token]", token)
    await page.click("dialog [data-sure]")


async def test_a_killed_worker_is_seen_by_whoever_looks_and_its_page_says_where_the_time_went(scene, window):
    page = window.page
    await window.go("/")
    await page.evaluate("window.untouched = true")
    began, ready = time.time(), scene.of(WorkerReady, task="gpt")[-1]
    os.kill(ready.pid, signal.SIGKILL)
    [failure] = await scene.until(lambda: [each for each in scene.of(FailureDetected) if each.at > began])
    chain = failure.correlation
    await page.click(f"tr[data-failure='{chain}'] th a:visible")
    await page.locator("#main h1", has_text="back at").wait_for()
    assert await page.evaluate("window.untouched"), "it was loaded anew"

    phases = await page.locator("[data-wall=gpt] .stack [data-phase]").evaluate_all(
        "all => Object.fromEntries(all.map(one => [one.dataset.phase, parseFloat(one.style.width)]))"
    )
    assert {"detection", "decision", "transition"} <= set(phases)
    assert sum(phases.values()) == pytest.approx(100, abs=1)
    await page.get_by_text("ranks 0-1 regrouped, iteration").wait_for()


async def test_what_a_program_writes_is_text_on_every_page_that_shows_it(scene, window):
    page = window.page
    await window.go("/tasks/bad")
    await page.get_by_label("traceback").get_by_text(MARKUP).wait_for()
    await page.locator("tr[data-failure] th a:visible").first.click()
    await page.get_by_text(MARKUP).first.wait_for()
    assert "\x1b" not in await page.content()
    assert "\x07" not in await page.content()
    ready = scene.of(WorkerReady, task="gpt")[-1]
    await window.go(f"/nodes/{ready.node}")
    await page.click(f"button[data-worker='{ready.worker}']")
    await page.get_by_label("last lines").get_by_text(MARKUP).wait_for()
    assert "\x1b" not in await page.content()
    assert await page.locator("img").count() == 0
    assert await page.evaluate("window.__pwned") is None


async def test_every_page_is_reached_by_its_link_and_can_be_loaded_and_is_for_everybody(scene, window):
    page, barriers = window.page, []
    await window.go("/")
    chain = await page.locator("tr[data-failure]:visible").first.get_attribute("data-failure")
    ways = {
        "/": None,
        "/tasks/gpt": "tbody a[data-task=gpt]",
        "/stragglers/gpt": "a[href='/stragglers/gpt']",
        "/tasks": "nav a[href='/tasks']",
        "/nodes": "nav a[href='/nodes']",
        "/events": "nav a[href='/events']",
        "/stragglers": "nav a[href='/stragglers']",
        "/failures": "nav a[href='/failures']",
        f"/failures/{chain}": f"tr[data-failure='{chain}'] th a",
        "/nodes/node-1": "a[data-node=node-1]",
        "/plan": "nav a[href='/plan']",
        "/goodput": "nav a[href='/goodput']",
    }
    for path, link in ways.items():
        if path == "/nodes/node-1":
            await page.click("nav a[href='/']")
        if link:
            await page.locator(f"{link}:visible").first.click()
        await page.wait_for_url(window.url + path)
        await window.live()
        await page.reload()
        await window.live()
        assert (await page.title()).endswith("Unicron")
        barriers += await window.barriers()
        await page.emulate_media(color_scheme="dark")
        barriers += await window.barriers("color-contrast")
        await page.emulate_media(color_scheme="light")
        await page.set_viewport_size({"width": 390, "height": 800})
        assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (
            f"{path} is wider than a phone"
        )
        await page.set_viewport_size({"width": 1280, "height": 720})
    assert not barriers, barriers


async def test_a_task_is_put_beside_another(scene, window):
    page = window.page
    await window.go("/tasks/gpt")
    await page.get_by_label("another task").select_option("bad")
    await page.wait_for_url(f"{window.url}/compare/gpt*bad")
    row = page.locator("tr.differs", has=page.get_by_role("rowheader", name="state", exact=True))
    await row.get_by_text("failed").wait_for()
    await page.locator("tr:not(.differs)", has=page.get_by_role("rowheader", name="folder")).wait_for()
    assert not await window.barriers()


async def test_axes_have_their_figures_where_they_are_and_labels_tell_tasks_apart(scene, window):
    await window.go("/tasks/gpt")
    at = "import('/static/chart.js').then(({ lineChart, ticks }) => [1, 2, 3, 7, 24, 1000].flatMap((last) => {"
    axis = (
        at
        + """
        const chart = lineChart({ label: "", show: String, across: String });
        document.querySelector("main").append(chart.box);
        chart.set([[1, 0], [last, 1]], [1, last].map((x) => ({ x, text: "" })));
        const x = (node, name) => Number(node.getAttribute(name));
        const [low, high] = [...chart.box.querySelectorAll(".mark line")].map((line) => x(line, "x1"));
        const below = [...chart.box.querySelectorAll("text.axis")].filter((text) => x(text, "y") > 170);
        const at = (text) => 1 + (x(text, "x") - low) / (high - low || 1) * (last - 1);
        return below.map((text) => [Number(text.textContent), at(text)]);
    }))"""
    )
    found = await window.page.evaluate(axis)
    assert len(found) > 8
    assert all(shown == pytest.approx(where) for shown, where in found), found

    async def labels(*names):
        told = "names => import('/static/paint.js').then(({ labels }) => [...labels(names).values()])"
        return await window.page.evaluate(told, [*names])

    assert await labels("gpt", "bert") == ["g", "b"]
    assert await labels("task-1", "task-12") == ["1", "12"]
    assert await labels("gpt-1", "gpt-2", "bert-1") == ["g1", "g2", "b1"]
    assert await labels("gpt") == await labels("gpt-a", "gpt-b") == [], "what tells nothing apart is left out"


async def test_a_node_is_drained_by_a_click_of_somebody_who_may(scene, window):
    page, token = window.page, scene.cluster.keys.tokens.read_text().split()[1]
    await window.go("/nodes/node-3")
    assert await page.locator("[data-order]").count() == 0
    await sign_in(page, token)
    await page.click("[data-order=drain]")
    said = page.locator("dialog .result")
    await said.get_by_text("node-3 is taken out of use").wait_for()
    assert not scene.of(OrderTaken, node="node-3"), "only asked so far"
    assert not await window.barriers()
    await page.click("dialog [data-sure]")
    [order] = await scene.until(lambda: scene.of(OrderTaken, node="node-3"))
    assert order.by == "operator"
    await page.click("dialog [data-close]")
    await page.click("nav a[href='/']")
    await page.locator(".squares a[data-node=node-3][data-state=draining]").wait_for()
    await page.locator("li[data-kind=OrderTaken]", has_text="operator").first.wait_for()


async def test_a_token_that_is_nobodys_is_refused_and_offers_no_order(scene, window):
    window.expected = ("401",)
    page = window.page
    await window.go("/nodes/node-1")
    await sign_in(page, "x" * 32)
    await page.locator("dialog .problem", has_text="nobody's").wait_for()
    await page.click("dialog [data-close]")
    assert await page.locator("[data-order]").count() == 0


async def test_a_console_that_was_killed_is_missed_and_the_page_is_right_again_by_itself(scene, window):
    window.expected = ("ERR_", "WebSocket connection")
    page = window.page
    await window.go("/")
    await page.evaluate("window.untouched = true")
    node = page.locator(".squares a[data-node=node-2]")
    assert await node.get_attribute("data-state") == "up"
    scene.cluster.kill("console")
    await page.locator("#lost", has_text="Connection lost").wait_for()
    await scene.client.drain("node-2")
    scene.cluster.start_process("console")
    await page.locator("#lost").wait_for(state="hidden")
    await page.locator(".squares a[data-node=node-2][data-state=draining]").wait_for()
    assert await page.evaluate("window.untouched"), "it was loaded anew"
