"""The console over HTTP, asked as browsers and programs do, on a bus in memory."""

import asyncio
import http.client
import json
import os
import socket
import threading
import time

import pytest
from helpers.accounts import began, exited, failure, journal
from helpers.ports import free_port
from unicron_console.live import CLUSTER, WAITING, Hub
from unicron_console.main import ConsoleSettings, listen
from unicron_console.orders import ORDERS
from unicron_console.tokens import Tokens
from unicron_console.web import MOST_BODY, Web
from unicron_deploy.nats_server import is_free
from unicron_simulator.storms.bus import MemoryWorld
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from unicron import codec, subjects
from unicron.client import Client
from unicron.contracts.answers import PlanView, Reply, TableRow
from unicron.contracts.plans import Plan
from unicron.contracts.queries import DrainNode, InjectFault, RewindTask
from unicron.errors import BusUnavailableError, InvalidInputError
from unicron.observe.cluster import ClusterPicture
from unicron.observe.state import NodePicture
from unicron.service import health

TOKEN = "ada-has-a-long-enough-token"
MINE = {"Authorization": f"Bearer {TOKEN}"}
NASTY = '<img src=x onerror="pwned()">\x1b[31m\u202e'


class Bus:
    """A bus on which some answer what they are told to, and note what they were asked."""

    def __init__(self, answers):
        self.answers, self.asked = answers, []
        self._bus = MemoryWorld(time.time).connect()

    def __getattr__(self, name):
        return getattr(self._bus, name)

    async def ask(self, subject, data, timeout_s):
        if subject not in self.answers:
            return await self._bus.ask(subject, data, timeout_s)
        self.asked.append(codec.decode_asked(data, orders=".ord." in subject))
        return codec.encode(self.answers[subject])


@pytest.fixture
def tokens(tmp_path):
    path = tmp_path / "tokens"
    path.write_text(f"# who\nada {TOKEN}\n\nbob {TOKEN[::-1]}\n")
    path.chmod(0o600)
    return Tokens(str(path))


class Answered:
    def __init__(self, response):
        self.status, self.headers, self.content = response.status, response.headers, response.read()

    def json(self):
        return json.loads(self.content)


class Site:
    """A console that answers on a port of its own, of a cluster in which a worker was killed."""

    def __init__(self, web):
        self.port, self._web, self.hub = free_port(), web, web._hub
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # which leaves no task behind
            runner.run(self._listen())

    async def _listen(self):
        self._job = asyncio.create_task(listen(ConsoleSettings(console_port=self.port), self._web))
        await asyncio.wait({self._job})

    def __enter__(self):
        self._thread.start()
        while is_free(self.port):
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self.soon(self._job.cancel)
        self._thread.join()

    def soon(self, job):
        self._loop.call_soon_threadsafe(job)

    def ask(self, method, path, content=None, headers=None):
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request(method, path, content, headers or {})
        return Answered(connection.getresponse())

    def get(self, path, headers=None):
        return self.ask("GET", path, headers=headers)

    def order(self, headers=None, **given):
        return self.ask("POST", "/api/orders", json.dumps(given), MINE if headers is None else headers)

    def live(self, path, **more):
        return connect(f"ws://127.0.0.1:{self.port}/api/live/{path}", **more)


@pytest.fixture
def site(tokens):
    """Return what makes a site, and its bus."""
    opened = []

    def make(answers=None, tokens=tokens, hosts=("*",), chaos=False):
        picture = ClusterPicture()
        killed = exited("w4", "n2", 1, iteration=10, signal=9)
        failed = [(121, "killed", killed), (122, "killed", failure(reason=NASTY))]
        for position, message in enumerate(journal([*began(), *failed]), 1):
            picture.handle(position, message)
        bus = Bus(answers or {})
        opened.append(Site(Web(Hub(picture, time.time), Client(bus), tokens, hosts, chaos=chaos)))
        return opened[-1].__enter__(), bus

    yield make
    for each in opened:
        each.__exit__()


def test_every_page_is_there_and_says_what_it_may_load(site):
    client, _ = site()
    for path in ("/", "/tasks/gpt", "/failures/killed", "/plan", "/goodput"):
        answer = client.get(path)
        assert (answer.status, answer.headers["content-type"][:9]) == (200, "text/html")
        assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
    assert client.get("/static/main.js").headers["content-type"].startswith("text/javascript")
    assert client.get("/static/../main.py").status == 404
    assert client.get("/static/%2e%2e/main.py").status == 404


def test_pages_as_json(site):
    client, _ = site()
    assert set(client.get("/api/cluster").json()["nodes"]) == {"n1", "n2"}
    assert client.get("/api/tasks/gpt").json()["line"]["name"] == "gpt"
    assert client.get("/api/nodes/n1").json()["square"]["slots"] == ["gpt", "gpt"]
    page = client.get("/api/failures/killed").json()
    assert page["line"]["text"] == NASTY, "whoever shows it makes it harmless; nothing is lost on the way"
    assert [line["chain"] for line in client.get("/api/failures").json()] == ["killed"]
    assert {row["name"] for row in client.get("/api/goodput").json()["tasks"]} >= {"gpt"}
    events = client.get("/api/events").json()
    assert client.get(f"/api/events?after={events[-2]['position']}").json() == events[-1:]
    assert client.get("/api/events?limit=1").json() == events[-1:]
    assert client.get("/healthz").json() == {"text": "", "error": ""}


def test_who_asks_whether_all_is_well_watches_as_one_who_looks_at_a_page(site):
    client, _ = site()
    hub = client._web._hub
    assert not hub.is_watched(1000.0)
    client.get("/healthz")
    assert hub.is_watched(1000.0)


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("/api/tasks/bert", 404, "no task 'bert'"),
        ("/api/tasks/%3Cb%3E", 404, "no task '<b>'"),
        ("/api/nodes/n9", 404, "no node"),
        ("/api/failures/f9", 404, "latest 1,000"),
        ("/api/elsewhere", 404, "openapi.json"),
        ("/api/events?after=x", 400, "whole number"),
        ("/api/events?limit=-1", 400, "whole number"),
        ("/api/plan", 503, "planner"),
        ("/api/tasks/gpt/curve", 503, "planner"),
    ],
)
def test_what_can_not_be_answered_says_why(site, path, status, says):
    answer = site()[0].get(path)
    assert (answer.status, says in answer.json()["error"]) == (status, True), answer.content


def test_what_the_straggler_service_does_not_say_leaves_the_rest(site):
    page = site()[0].get("/api/tasks/gpt/stragglers").json()
    assert (page["view"], page["heat"]) == (None, [])


def test_it_is_healthy_while_it_answers_here_and_has_read_the_journal_and_has_its_port_alone(site):
    def check(port):
        asyncio.run(health.check(health.HealthSettings(console_port=port), "console"))

    client, _ = site()
    check(client.port)
    with pytest.raises(InvalidInputError, match="UNICRON_CONSOLE_PORT"):
        asyncio.run(listen(ConsoleSettings(console_port=client.port), client._web))
    client.hub.behind = 5
    with pytest.raises(BusUnavailableError, match="the console is not ready"):
        check(client.port)
    with pytest.raises(BusUnavailableError, match=f"does not answer on port {(port := free_port())}"):
        check(port)


def test_another_host_name_is_another_site(site):
    client, _ = site(hosts=("console.test",))
    assert client.get("/api/cluster").status == 400
    assert client.get("/api/cluster", {"Host": "console.test:8080"}).status == 200


def test_a_script_of_another_site_gets_no_live_page(site):
    client, _ = site()
    with pytest.raises(InvalidStatus):
        client.live("cluster", origin="http://evil.test")
    with client.live("cluster", origin=f"http://127.0.0.1:{client.port}") as live:
        assert "nodes" in json.loads(live.recv())["whole"]


def test_live_pages_begin_with_the_whole_or_say_that_there_is_none(site):
    client, _ = site()
    for path, found in (("tasks/gpt", "line"), ("failures/killed", "bars"), ("nodes/n1", "square")):
        with client.live(path) as live:
            assert found in json.loads(live.recv())["whole"]
    with client.live("tasks/bert") as live:
        assert "no task 'bert'" in json.loads(live.recv())["gone"]


def test_while_the_bus_does_not_answer_pages_say_since_when_and_time_stands_still():
    now = [100.0]
    hub = Hub(ClusterPicture(), lambda: now[0])
    hub.set_available(available=True)
    before = hub.subscribe(CLUSTER)
    now[0] = 110.0
    hub.set_available(available=False)
    later = hub.subscribe(CLUSTER)
    assert (hub.now(), hub.silent_s) == (100.0, 10.0)
    hub.set_available(available=True)
    assert (hub.now(), hub.silent_s) == (110.0, 0.0)
    for reader in (before, later):
        whole, *told = [json.loads(reader.frames.get_nowait()) for _ in range(3)]
        assert "whole" in whole
        assert told == [{"away": 100.0}, {"away": 0.0}]


def test_a_browser_that_never_reads_is_let_go_and_another_reads_on(site):
    client, _ = site()
    hub = client.hub
    names = [f"big-{number}" for number in range(3000)]
    for name in names:
        hub.picture.nodes[name] = NodePicture(slots=8, tasks=dict.fromkeys(range(8), "gpt"))

    def change():
        hub.picture.changed.update(("node", name) for name in names)
        hub._tick()

    with socket.socket() as deaf, client.live("cluster", max_size=None) as good:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", client.port))
        deaf.sendall(
            b"GET /api/live/cluster HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        )
        assert "whole" in json.loads(good.recv())
        while len(hub) < 2:
            time.sleep(0.01)
        sent = 0
        while len(hub) == 2:  # what the kernel takes for it comes on top
            client.soon(change)
            good.recv()
            sent += 1
            assert sent < 10 * WAITING
        client.soon(change)
        assert len(json.loads(good.recv())["changes"]["nodes"]) == len(names)


# --- orders ---------------------------------------------------------------------------------------------------------

REGISTRY, PLANNER = subjects.orders("registry"), subjects.rpc("planner")
PLAN = PlanView(
    plan=Plan(number=2, trigger="what_if", workers=2, shares=[]),
    table=[TableRow(event="node_lost:n1,n2", workers=2, changes={"gpt": 2}, reward=1.0)],
)


def test_an_order_needs_a_token_and_is_given_in_its_owners_name(site):
    client, bus = site({REGISTRY: Reply(text="n1 drains"), PLANNER: Reply(plan=PLAN)})
    assert client.order({}, order="drain", target="n1", sure=True).status == 401
    wrong = client.order({"Authorization": "Bearer no"}, order="drain", target="n1", sure=True)
    assert (wrong.status, "this token is nobody's" in wrong.json()["error"]) == (401, True)
    assert client.order({"Authorization": f"Basic {TOKEN}"}, order="drain", target="n1").status == 401
    assert not bus.asked
    told = client.order(order="drain", target="n1").json()["text"]
    assert "taken out of use" in told
    assert "Decision:" in told
    assert not [each for each in bus.asked if isinstance(each, DrainNode)], "it was only asked about"
    assert client.order(order="drain", target="n1", sure=True).json() == {"text": "n1 drains", "error": ""}
    assert bus.asked[-1] == DrainNode(node="n1", by="ada")


def test_all_orders_say_what_they_would_do_and_do_it(site):
    answers = {REGISTRY: Reply(text="done"), subjects.orders("n1"): Reply(text="done")}
    client, bus = site(answers, chaos=True)
    values = {"rewind": "5", "break": "raise=value-error"}
    for name, each in ORDERS.items():
        wanted = {"order": name, "target": "n1" if each.target_kind == "node" else "gpt", "value": values.get(name, "")}
        assert client.order(**wanted).json()["text"], name
        before = len(bus.asked)
        assert client.order(**wanted, sure=True).json()["text"] == "done", name
        assert [asked.by for asked in bus.asked[before:]] == ["ada"]
    assert RewindTask(task="gpt", iteration=5, by="ada") in bus.asked
    assert bus.asked[-1] == InjectFault(fault="raise", value="value-error", by="ada")


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"order": "explode", "target": "n1"}, "use one of drain"),
        ({"order": "break", "target": "n1", "value": "raise"}, "use one of drain"),
        ({"order": "drain", "target": "n9"}, "no node 'n9'"),
        ({"order": "stop", "target": "n1"}, "no task 'n1'"),
        ({"order": "rewind", "target": "gpt", "value": "-1"}, "number of a checkpoint"),
        ({"order": "rewind", "target": "gpt", "value": "9" * 5000}, "number of a checkpoint"),
        ({"order": "drain"}, "target"),
        ({"order": "drain", "target": "n1", "by": "root"}, "by"),
        ({"order": ["drain"], "target": "n1"}, "order"),
    ],
)
def test_what_can_not_be_ordered_says_why_and_nothing_is_asked(site, wanted, says):
    client, bus = site({REGISTRY: Reply(text="done")})
    answer = client.order(**wanted, sure=True)
    assert (answer.status, says in answer.json()["error"]) == (400, True), answer.content
    assert not bus.asked


def test_a_refusal_of_the_registry_comes_through(site):
    client, _ = site({REGISTRY: Reply(error="gpt has no storage; give it checkpoints")})
    answer = client.order(order="save", target="gpt", sure=True)
    assert (answer.status, answer.json()["error"]) == (400, "gpt has no storage; give it checkpoints")


def test_no_more_is_read_than_an_order_can_be(site):
    client, _ = site()
    answer = client.ask("POST", "/api/orders", b"x" * (MOST_BODY + 1), MINE)
    assert (answer.status, "bytes" in answer.json()["error"]) == (400, True)
    assert client.ask("POST", "/api/what-if", b"\xff\xfe").status == 400


def test_who_one_is_says_what_one_may(site):
    client, _ = site(chaos=True)
    assert client.get("/api/access").json() == {"name": "", "orders": [], "faults": []}
    mine = client.get("/api/access", MINE).json()
    assert (mine["name"], set(mine["orders"]), "kill-worker" in mine["faults"]) == ("ada", set(ORDERS), True)
    assert client.get("/api/access", {"Authorization": "Bearer no"}).status == 401
    quiet = site()[0].get("/api/access", MINE).json()
    assert ("break" in quiet["orders"], quiet["faults"]) == (False, [])


def test_without_a_file_of_tokens_the_cure_is_told(site):
    client, _ = site(tokens=Tokens())
    assert "UNICRON_CONSOLE_TOKENS" in client.order({}, order="drain", target="n1").json()["error"]


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("ada short\n", 0o600, r"tokens:1: the token of ada is shorter"),
        (f"# x\nada {TOKEN} more\n", 0o600, r"tokens:2: expected a name and a token"),
        (f"ada {TOKEN}\nada {TOKEN}x\n", 0o600, r"tokens:2: ada has a token already"),
        (f"ada {TOKEN}\n", 0o644, r"chmod 600"),
        ("\udcff", 0o600, r"can't be read"),
    ],
)
def test_a_file_of_tokens_that_can_not_be_used_is_refused_without_telling_one(tmp_path, text, mode, says):
    path = tmp_path / "tokens"
    path.write_bytes(os.fsencode(text))
    path.chmod(mode)
    with pytest.raises(InvalidInputError, match=says) as caught:
        Tokens(str(path))
    assert TOKEN not in str(caught.value)


def test_the_description_has_all_shapes_and_all_that_it_names_is_there(site):
    client, _ = site()
    described = client.get("/api/openapi.json").json()
    text = json.dumps(described)
    shapes = described["components"]["schemas"]
    for reference in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in shapes
    assert {"ClusterPage", "FailurePage", "Wanted", "Answer"} <= set(shapes)
    for path, operations in described["paths"].items():
        if "{" not in path and "get" in operations and path != "/api/plan":
            assert client.get(path).status == 200, path


def test_what_many_ask_at_once_a_service_is_asked_once(site):
    client, bus = site(answers={PLANNER: Reply(plan=PLAN)})
    for _ in range(5):
        page = client.get("/api/plan").json()
    assert page["table"][0]["event"] == "n1 or n2 is lost"
    assert len(bus.asked) == 1
