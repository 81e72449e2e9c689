"""One delivery, by each kind of channel, to real servers and programs, some bad; and the notifier as a process."""

import asyncio
import email
import json
import ssl
import sys
import time
from datetime import UTC, datetime, timedelta
from email import policy
from email.utils import format_datetime
from pathlib import Path

import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult
from helpers.buses import say
from helpers.cli import unicron
from helpers.notifier import NOTICE, changed, lost, running
from helpers.ports import free_port
from helpers.receiver import Receiver
from helpers.registry import connected, eventually, process_of
from helpers.waiting import PATIENT_S, until
from msgspec.structs import replace
from typer.testing import CliRunner
from unicron_cli.main import app
from unicron_deploy.certificates import Authority
from unicron_notifier.channels import Command, Heartbeat, Json, Mail, Secrets
from unicron_notifier.senders import DeliveryError, _judged, beat, deliver

from unicron.processes import Started

# --- HTTP ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def receiver():
    with Receiver() as receiver:
        yield receiver


async def test_a_notice_is_posted_with_an_id_that_stays(receiver):
    secrets = Secrets(f"{receiver.url}/s3cret", token="t0ken")
    assert await deliver(NOTICE, Json(), secrets) == "HTTP 200: thanks"
    [request] = receiver.got
    assert request.headers["Idempotency-Key"] == "c1.1.ops"
    assert request.headers["Authorization"] == "Bearer t0ken"
    assert request.headers["Content-Type"] == "application/json"
    assert request.body["title"] == "n2 is lost"


@pytest.mark.parametrize(
    ("manner", "says", "final", "after_s"),
    [
        (404, "HTTP 404: no, and the secret is /…", True, 0.0),
        (500, "HTTP 500", False, 0.0),
        (408, "HTTP 408", False, 0.0),
        (429, "HTTP 429", False, 1.0),
        ("garbage", "the answer is no HTTP", False, 0.0),
        ("hang", "no answer within 0.4 s", False, 0.0),
        ("drip", "no answer within 0.4 s", False, 0.0),
    ],
)
async def test_what_is_not_taken_says_why_and_shows_no_secret(receiver, manner, says, final, after_s):
    receiver.manners["/s3cret"] = manner
    timeout_s = 0.4 if manner in {"hang", "drip"} else 60.0  # the others answer, on a busy machine late
    with pytest.raises(DeliveryError) as refused:
        await deliver(NOTICE, Json(timeout_s=timeout_s), Secrets(f"{receiver.url}/s3cret"))
    assert says in str(refused.value)
    assert "s3cret" not in str(refused.value)
    assert (refused.value.final, refused.value.after_s) == (final, after_s)


def test_an_answer_counts_for_what_it_says_and_a_pause_may_be_a_date():
    said = "Webhook message delivery failed with error: Microsoft Teams endpoint returned HTTP error 429"
    with pytest.raises(DeliveryError, match="endpoint returned HTTP error 429"):
        _judged(200, "", said)
    with pytest.raises(DeliveryError) as caught:
        _judged(503, format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True), "")
    assert 0 < caught.value.after_s <= 90


async def test_a_heartbeat_is_a_call_without_words(receiver):
    await beat(Heartbeat(url=receiver.url), Secrets(f"{receiver.url}/alive"))
    [request] = receiver.got
    assert (request.method, request.path, request.body) == ("GET", "/alive", None)
    receiver.manners["/alive"] = 503
    with pytest.raises(DeliveryError, match="503"):
        await beat(Heartbeat(url=receiver.url), Secrets(f"{receiver.url}/alive"))


async def test_a_redirect_is_not_followed(receiver):
    with Receiver() as inside:
        receiver.manners["/hook"] = f"{inside.url}/private"
        with pytest.raises(DeliveryError, match="a redirect, which is not followed") as refused:
            await deliver(NOTICE, Json(), Secrets(f"{receiver.url}/hook"))
        assert refused.value.final
        assert inside.got == []


async def test_an_answer_without_end_is_read_to_a_limit(receiver):
    receiver.manners["/hook"] = "endless"
    # who reads without a limit is still at it when the channel's time is over, and that is an error
    assert (await deliver(NOTICE, Json(timeout_s=60.0), Secrets(f"{receiver.url}/hook"))).startswith("HTTP 200: xxx")


async def test_nobody_there_and_not_trusted(receiver, tmp_path):
    port = free_port()
    with pytest.raises(DeliveryError, match=f"127.0.0.1:{port} can't be reached"):
        await deliver(NOTICE, Json(), Secrets(f"http://127.0.0.1:{port}/s3cret"))
    with pytest.raises(DeliveryError):
        await deliver(NOTICE, Json(), Secrets(receiver.url.replace("http:", "https:")))


# --- mail ------------------------------------------------------------------------------------------------------------


class Box:
    """Keeps letters; it refuses some, for now or for ever."""

    def __init__(self):
        self.letters = []

    async def handle_RCPT(self, server, session, envelope, address, options):  # noqa: N802 the name is aiosmtpd's
        if address.startswith("nobody"):
            return "550 no such user"
        if address.startswith("later"):
            return "451 greylisted"
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server, session, envelope):  # noqa: N802 likewise
        self.letters.append((session.authenticated, session.ssl is not None, envelope))
        return "250 OK"


@pytest.fixture(scope="module")
def mail_server(tmp_path_factory):
    """A server that wants STARTTLS and a password; yields its box, its port and who signs its certificate."""
    folder = tmp_path_factory.mktemp("mail")
    authority = Authority(folder / "ca")
    authority.ensure()
    (folder / "server").mkdir()
    authority.certify(folder / "server", ["localhost"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server" / "tls.pem", folder / "server" / "tls.key")
    box, port = Box(), free_port()
    asks = {"tls_context": context, "require_starttls": True, "auth_required": True, "authenticator": known}
    controller = Controller(box, hostname="localhost", port=port, ready_timeout=PATIENT_S, **asks)
    controller.start()
    yield box, port, str(folder / "ca" / "ca.pem")
    controller.stop()


def known(server, session, envelope, mechanism, given):
    return AuthResult(success=(given.login, given.password) == (b"unicron", b"hunter2"), handled=False)


def mail(server, **fields):
    _, port, ca = server
    given = {"host": "localhost", "port": port, "ca": ca, "user": "unicron", "sender": "u@example.org"}
    return Mail(**{**given, "to": ["ops@example.org"], **fields})


async def test_a_mail_is_encrypted_logged_in_for_and_whole(mail_server):
    box, _, _ = mail_server
    notice = replace(NOTICE, title="bad\r\nBcc: x@evil.org\r\n.\r\nQUIT é")
    assert await deliver(notice, mail(mail_server), Secrets(key="hunter2")) == "taken by localhost"
    authenticated, encrypted, envelope = box.letters[-1]
    assert (authenticated, encrypted) == (True, True)
    assert (envelope.mail_from, envelope.rcpt_tos) == ("u@example.org", ["ops@example.org"])
    read = email.message_from_bytes(envelope.content, policy=policy.default)
    assert read["Message-ID"] == "<c1.1.ops@example.org>"
    assert read["Bcc"] is None
    assert read["Subject"].endswith("QUIT é")
    assert "Why: its connection ended" in read.get_content()


@pytest.mark.parametrize(
    ("fields", "password", "says", "final"),
    [
        ({}, "wrong-hunter3", "SMTP 535", True),
        ({"to": ["nobody@example.org"]}, "hunter2", "all of nobody@example.org were refused", True),
        ({"to": ["later@example.org"]}, "hunter2", "all of later@example.org were refused", False),
        ({"ca": ""}, "hunter2", "CERTIFICATE_VERIFY_FAILED", False),
        ({"port": 1}, "hunter2", "ConnectionRefusedError", False),
    ],
)
async def test_a_mail_that_is_not_taken_says_why(mail_server, fields, password, says, final):
    with pytest.raises(DeliveryError) as refused:
        await deliver(NOTICE, mail(mail_server, **fields), Secrets(key=password))
    assert says in str(refused.value)
    assert password not in str(refused.value)
    assert refused.value.final == final


async def test_a_mail_server_that_says_nothing_is_not_waited_for(receiver):
    receiver.manners["/"] = "hang"
    port = int(receiver.url.rpartition(":")[2])
    with pytest.raises(DeliveryError, match=r"no answer within 0\.3 s"):
        await deliver(NOTICE, Mail(host="127.0.0.1", port=port, sender="a@b.c", to=["d@e.f"], timeout_s=0.3), Secrets())


# --- programs --------------------------------------------------------------------------------------------------------


def program(tmp_path, text):
    path = tmp_path / "program"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return str(path)


async def test_a_program_gets_a_notice_as_json(tmp_path):
    path = program(tmp_path, f"import sys; open({str(tmp_path / 'got')!r}, 'w').write(sys.stdin.read() + sys.argv[1])")
    assert (await deliver(NOTICE, Command(command=[path, "--page"]), Secrets())).endswith("ended with status 0")
    text = Path(tmp_path / "got").read_text()
    assert text.endswith("\n--page")
    assert json.loads(text.removesuffix("--page"))["incident"] == "c1"


async def test_a_program_that_fails_says_the_end_of_what_it_wrote(tmp_path):
    path = program(tmp_path, "import sys; sys.stderr.write('x' * 200_000 + 'no \\x1b[2J modem'); sys.exit(3)")
    with pytest.raises(DeliveryError, match="ended with status 3: xxx") as refused:
        await deliver(NOTICE, Command(command=[path]), Secrets())
    assert str(refused.value).isprintable()
    with pytest.raises(DeliveryError, match="can't be run"):
        await deliver(NOTICE, Command(command=["/bin/none"]), Secrets())


async def test_a_program_that_hangs_is_ended_with_all_that_it_started(tmp_path):
    path = program(
        tmp_path,
        "import os, signal, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        f"open({str(tmp_path / 'part')!r}, 'w').write(str(child.pid))\n"
        f"os.rename({str(tmp_path / 'part')!r}, {str(tmp_path / 'pid')!r})\n"
        "signal.pause()",
    )
    delivering = asyncio.create_task(deliver(NOTICE, Command(command=[path], timeout_s=60.0), Secrets()))
    await until((tmp_path / "pid").exists)
    child = Started.of(int((tmp_path / "pid").read_text()))
    assert child.alive()
    delivering.cancel()  # as when its time is over
    await asyncio.wait({delivering})
    await until(lambda: not child.alive())  # it was sent the signal, and acts on it at its next turn
    with pytest.raises(DeliveryError, match=r"no answer within 0\.1 s"):
        await deliver(NOTICE, Command(command=[path], timeout_s=0.1), Secrets())


# --- the commands ----------------------------------------------------------------------------------------------------


def test_each_channel_can_be_tried_and_a_file_be_checked(receiver, tmp_path):
    receiver.manners["/broken"] = 500
    secret = tmp_path / "hook"
    secret.write_text(f"{receiver.url}/s3cret")
    secret.chmod(0o600)
    file = tmp_path / "notify.toml"
    file.write_text(f"""
[channel.ops]
kind = "slack"
url_file = "hook"
[channel.broken]
kind = "json"
url = "{receiver.url}/broken"
[rule.all]
channels = ["ops"]
""")
    runner = CliRunner()

    def call(*words):
        done = runner.invoke(app, ["notify", *words])
        return done.exit_code, done.output or str(done.exception)

    code, shown = call("check", str(file))
    assert code == 0
    assert "is in order: rules all; channels ops, broken; no rule names broken" in shown
    assert call("test", "ops", "--file", str(file)) == (0, "ops: ok: HTTP 200: thanks\n")
    [request] = receiver.got
    assert request.body["text"] == "[TEST] a test of Unicron's notifications: nothing happened"
    code, told = call("test", "no", "--file", str(file))
    assert code == 1
    assert "there is no channel 'no'; there are ops, broken" in told
    code, told = call("test", "--file", str(file), "--json")
    assert code == 1
    assert [(each["channel"], each["ok"]) for each in json.loads(told)] == [("ops", True), ("broken", False)]
    assert {each.path for each in receiver.got[1:]} == {"/s3cret", "/broken"}
    secret.chmod(0o644)
    code, told = call("check", str(file))
    assert code == 1
    assert "[channel.ops] url_file: " in told


# --- the notifier as a process on a real bus, and the commands of who is told -----------------------------------------


RULES = """
[channel.ops]
kind = "json"
url = "{url}/ops"

[rule.all]
channels = ["ops"]
wait_s = 0.3
"""


@pytest.fixture
def listener(private_world, tmp_path):
    """Whom a notifier tells."""
    file = tmp_path / "notify.toml"
    with Receiver() as listener:
        file.write_text(RULES.format(url=listener.url))
        with process_of("notifier", private_world, "--notify", str(file)):
            yield listener


async def test_a_lost_node_is_told_and_whoever_says_so_sees_to_it(private_world, listener):
    url = private_world.settings.nats_url

    async def heard(count):
        async def got():
            return listener.at("/ops")

        return (await eventually(got, lambda requests: len(requests) >= count))[-1].body

    async with connected(private_world) as client:
        await eventually(client.notifications, lambda view: view.channels)
        for number, each in enumerate((running("gpt", "n1", "n1"), lost("n1"), changed("gpt", "recovering"))):
            named = {"id": f"n1.{number}", "source": each.source or "detector", "correlation": "n1"}
            await say(client.bus, replace(each, at=time.time(), **named))
        assert (await heard(1))["phase"] == "opened"
        text = await asyncio.to_thread(unicron, "notify", "ack", "n1", "--by", "ada", url=url)
        assert text.startswith("ada sees to n1: n1 is lost")
        assert (await heard(2))["by"] == "ada"
        shown = await asyncio.to_thread(unicron, "notify", "status", url=url)
        assert "seen to by ada" in shown
        assert "ops: nothing to deliver" in shown
