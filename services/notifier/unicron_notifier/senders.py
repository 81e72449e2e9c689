"""Delivers one notice by one channel, once: by HTTP, by mail, or by a program.

A redirect is not followed, wherever it leads. Of an answer only the first bytes are read. No error shows a secret.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import smtplib
import ssl
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime, parsedate_to_datetime
from typing import Any

import unicron
from unicron.contracts.notices import Notice
from unicron.errors import UnicronError
from unicron_notifier.channels import Channel, Heartbeat, Mail, ProgramChannel, Secrets, Web
from unicron_notifier.page import cut
from unicron_notifier.shapes import SHAPES, generic, heading, text

MOST_READ = 1024
"""Bytes of an answer that are read."""

SHOWN = 120
"""Characters of it that an error shows."""

AGAIN = frozenset({408, 425, 429})
"""Statuses below 500 that may change."""

LONGEST_PAUSE_S = 300.0
"""Longest pause that a receiver can ask for."""

AGENT = f"unicron/{unicron.__version__}"


class DeliveryError(UnicronError):
    """A notice was not taken.

    Attributes:
        final: it never will be.
        after_s: seconds that the receiver wants to be left alone for.
    """

    def __init__(self, text: str, *, final: bool = False, after_s: float = 0.0) -> None:
        super().__init__(text)
        self.final, self.after_s = final, after_s


async def deliver(notice: Notice, given: Channel, secrets: Secrets) -> str:
    """Deliver a notice once; return what the receiver says, for a person.

    Raises:
        DeliveryError: it was not taken, within the channel's time.
    """
    try:
        async with asyncio.timeout(given.timeout_s):
            if isinstance(given, Mail):
                return await _mail(notice, given, secrets)
            if isinstance(given, ProgramChannel):
                return await _command(notice, given)
            body = json.dumps(SHAPES[kind_of(given)](notice, secrets.key)).encode()
            return await _http("POST", given, secrets, body, {"Idempotency-Key": notice.id})
    except TimeoutError as error:
        raise DeliveryError(f"no answer within {given.timeout_s:g} s") from error


async def beat(given: Heartbeat, secrets: Secrets) -> None:
    """Call the URL of the heartbeat.

    Raises:
        DeliveryError: nobody took the call.
    """
    try:
        async with asyncio.timeout(given.timeout_s):
            await _http("GET", given, secrets, None, {})
    except TimeoutError as error:
        raise DeliveryError(f"no answer within {given.timeout_s:g} s") from error


def kind_of(given: Channel) -> str:
    """Return what the file calls a kind of channel."""
    return str(given.__struct_config__.tag)


# --- HTTP ------------------------------------------------------------------------------------------------------------


async def _http(method: str, given: Web | Heartbeat, secrets: Secrets, body: bytes | None, more: dict[str, str]) -> str:
    import aiohttp  # noqa: PLC0415 only who has such a channel needs it

    headers = {"User-Agent": AGENT, **more}
    headers |= {"Content-Type": "application/json"} if body is not None else {}
    headers |= {"Authorization": f"Bearer {secrets.token}"} if secrets.token else {}
    try:
        encrypted = ssl.create_default_context(cafile=given.ca or None)
        jar = aiohttp.DummyCookieJar()
        async with (
            aiohttp.ClientSession(cookie_jar=jar, auto_decompress=False, trust_env=False) as session,
            session.request(
                method, secrets.url, data=body, headers=headers, allow_redirects=False, ssl=encrypted
            ) as answer,
        ):
            reply = (await answer.content.read(MOST_READ)).decode(errors="replace")
            return _check_response(answer.status, answer.headers.get("Retry-After", ""), _redact(reply, secrets))
    except aiohttp.ClientConnectorError as error:
        why = error.os_error.strerror or type(error).__name__
        raise DeliveryError(f"{error.host}:{error.port} can't be reached: {why}") from None
    except aiohttp.ClientResponseError as error:
        raise DeliveryError(_redact(f"the answer is no HTTP: {error.message}", secrets)) from None
    except (aiohttp.ClientError, OSError, ValueError) as error:  # what is no HTTP at all may be any of them
        raise DeliveryError(_redact(f"{type(error).__name__}: {error}", secrets)) from None


_REFUSED = re.compile(r"delivery failed with error|returned HTTP error|\"ok\": ?false", re.IGNORECASE)
"""In the answer of a service that says 200 though it has taken nothing, as Teams does."""


def _check_response(status: int, retry_after: str, reply: str) -> str:
    answer = f"HTTP {status}{f': {reply}' if reply else ''}"
    if 200 <= status < 300 and not _REFUSED.search(reply):
        return answer
    if 300 <= status < 400:
        raise DeliveryError(
            f"HTTP {status}: a redirect, which is not followed; give the address it leads to", final=True
        )
    final = 300 <= status < 500 and status not in AGAIN
    raise DeliveryError(answer, final=final, after_s=min(_seconds(retry_after), LONGEST_PAUSE_S))


def _seconds(retry_after: str) -> float:
    """Return how long to wait, given as seconds or as the date at which that is over (RFC 9110, 10.2.3)."""
    if retry_after.isascii() and retry_after.isdecimal() and len(retry_after) < 9:
        return float(retry_after)
    try:
        return max(0.0, parsedate_to_datetime(retry_after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def _redact(reply: str, secrets: Secrets) -> str:
    """Return a text for a person without any of the secrets in it."""
    parts = {each for each in (*secrets, secrets.url.partition("://")[2].partition("/")[2]) if len(each) > 3}
    for each in sorted(parts, key=len, reverse=True):
        reply = reply.replace(each, "…")
    return cut(reply, SHOWN)


# --- mail ------------------------------------------------------------------------------------------------------------


def build_mail(notice: Notice, given: Mail) -> EmailMessage:
    """Return the mail about a notice; one repeated has the same id, and all of one incident are one thread."""
    found = EmailMessage()
    host = given.sender.rpartition("@")[2]
    found["Subject"] = cut(f"{heading(notice)}", 200)
    found["From"], found["To"] = given.sender, ", ".join(given.to)
    found["Date"] = format_datetime(datetime.fromtimestamp(notice.decided, UTC))
    found["Message-ID"] = f"<{notice.id}@{host}>"
    found["In-Reply-To"] = found["References"] = f"<{notice.incident}@{host}>"
    found["Auto-Submitted"] = "auto-generated"
    found.set_content(f"{notice.title}\n\n{text(notice)}\n\nincident {notice.incident}\n")
    return found


async def _mail(notice: Notice, given: Mail, secrets: Secrets) -> str:
    message = build_mail(notice, given)

    def send() -> str:
        with smtplib.SMTP(given.host, given.port, timeout=given.timeout_s) as server:
            if given.starttls:
                server.starttls(context=ssl.create_default_context(cafile=given.ca or None))
            if given.user:
                server.login(given.user, secrets.key)
            refused = server.send_message(message)
        return f"taken by {given.host}" + (f", but not for {', '.join(refused)}" if refused else "")

    try:
        return await _in_thread(send)
    except smtplib.SMTPResponseException as error:
        reply = error.smtp_error.decode(errors="replace") if isinstance(error.smtp_error, bytes) else error.smtp_error
        final = error.smtp_code >= 500
        raise DeliveryError(_redact(f"SMTP {error.smtp_code}: {reply}", secrets), final=final) from None
    except smtplib.SMTPRecipientsRefused as error:
        final = all(code >= 500 for code, _ in error.recipients.values())
        raise DeliveryError(f"all of {', '.join(given.to)} were refused", final=final) from None
    except (smtplib.SMTPException, OSError, ValueError) as error:
        raise DeliveryError(_redact(f"{type(error).__name__}: {error}", secrets)) from None


async def _in_thread(job: Callable[[], str]) -> str:
    """Run what blocks in a thread of its own, which keeps nobody from ending."""
    loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def set_result(result: Any, error: Exception | None) -> None:
        if not future.done():
            future.set_exception(error) if error else future.set_result(result)

    def run() -> None:
        result, trouble = None, None
        try:
            result = job()
        except Exception as error:  # noqa: BLE001 it is raised where the job is awaited
            trouble = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(set_result, result, trouble)

    threading.Thread(target=run, name="mail", daemon=True).start()
    return str(await future)


# --- programs --------------------------------------------------------------------------------------------------------


async def _command(notice: Notice, given: ProgramChannel) -> str:
    pipe, none = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    try:
        process = await asyncio.create_subprocess_exec(
            *given.command, stdin=pipe, stdout=none, stderr=pipe, start_new_session=True
        )
    except OSError as error:
        raise DeliveryError(f"{given.command[0]} can't be run: {error.strerror}") from error
    try:
        _, reply, status = await asyncio.gather(_write_input(process, notice), _read_tail(process), process.wait())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started ends with it
        if process.returncode is None:
            await process.wait()
    if status:
        raise DeliveryError(f"{given.command[0]} ended with status {status}: {cut(reply, SHOWN)}")
    return f"{given.command[0]} ended with status 0"


async def _write_input(process: asyncio.subprocess.Process, notice: Notice) -> None:
    if process.stdin:
        with contextlib.suppress(OSError):  # it may not want to know
            process.stdin.write(json.dumps(generic(notice, "")).encode() + b"\n")
            await process.stdin.drain()
        process.stdin.close()


async def _read_tail(process: asyncio.subprocess.Process) -> str:
    """Return the end of what a process says, and keep it from filling its pipe."""
    reply = b""
    while process.stderr and (more := await process.stderr.read(MOST_READ)):
        reply = (reply + more)[-MOST_READ:]
    return reply.decode(errors="replace")
