"""A real browser: what its pages do that none may do is kept, and fails the test."""

import contextlib
import shutil

from axe_playwright_python.async_playwright import Axe
from playwright.async_api import async_playwright

from helpers.waiting import PATIENT_S

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

SANDBOXED = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
"""Tests run as root in containers too, with little shared memory; the pages are our own."""

GRAVE = {"serious", "critical"}


@contextlib.asynccontextmanager
async def chromium():
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=SANDBOXED)
        yield browser
        await browser.close()


class Window:
    """A page of its own, as it is after a browser was started anew; `close` returns its errors.

    Attributes:
        expected: parts of what its console may say, since the test provokes it.
    """

    def __init__(self, context, page, url):
        self.context, self.page, self.url = context, page, url
        self.wrong, self.expected = [], ()
        context.on("console", lambda message: message.type in {"error", "warning"} and self._wrong(message.text))
        context.on("weberror", lambda error: self._wrong(str(error.error)))
        context.on("request", lambda request: self._asked(request.url))
        page.on("websocket", lambda socket: self._asked(socket.url.replace("ws://", "http://", 1)))
        page.on("dialog", self._dialog)

    @classmethod
    async def open(cls, browser, url, **options):
        context = await browser.new_context(**options)
        context.set_default_timeout(1000 * PATIENT_S)
        return cls(context, await context.new_page(), url)

    def _wrong(self, text):
        self.wrong.append(text)

    def _asked(self, url):
        if not url.startswith((f"{self.url}/", "data:")):
            self._wrong(f"asked for {url}")

    async def _dialog(self, dialog):
        self._wrong(f"a dialog: {dialog.message}")
        await dialog.dismiss()

    async def close(self):
        await self.context.close()
        found = [text for text in self.wrong if not any(part in text for part in self.expected)]
        assert not found, found

    async def go(self, path):
        await self.page.goto(self.url + path)
        await self.live()

    async def live(self):
        """Wait until the page is as the cluster is."""
        await self.page.locator("body[data-live=live]").wait_for()
        await self.page.locator("#main h1").wait_for()

    async def barriers(self, *rules):
        """Return what keeps people out who can't see or use a mouse, grave cases alone; by some rules, or all."""
        options = {"resultTypes": ["violations"], **({"runOnly": list(rules)} if rules else {})}
        found = (await Axe().run(self.page, options=options)).response["violations"]
        where = await self.page.evaluate("location.pathname + ' ' + matchMedia('(prefers-color-scheme: dark)').matches")
        return [
            (where, each["id"], each["nodes"][0]["html"][:200], each["nodes"][0]["failureSummary"])
            for each in found
            if each["impact"] in GRAVE
        ]
