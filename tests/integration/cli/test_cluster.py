"""The command line, as a user types it, with a cluster that runs."""

import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import termios
import textwrap
import urllib.parse
import urllib.request

import pytest
from helpers import ROOT
from helpers.cli import CLEAN, KEYS, UNICRON, call, data, reaching, unicron
from helpers.ports import free_port
from helpers.training import SMALL
from helpers.waiting import block_until
from unicron_deploy.embedded import Cluster

from unicron.service.bootstrap import own_name
from unicron.services import NAMED, SERVICES

pytestmark = pytest.mark.slow

PROMETHEUS = shutil.which("prometheus")

ODD = {"LC_ALL": "POSIX", "LANG": "C", "TZ": "Pacific/Kiritimati"}
"""Beside it: a proxy that is gone, 256 files, nothing for others to read, and no home."""

WORDS = 'sys.stdout.buffer.write(b"it begins\\n\\x1b]0;pwned\\x07\\xff\\n"); sys.stdout.flush()'
TRAIN = textwrap.dedent(SMALL).replace("model =", f"{WORDS}\nmodel =")

TASK = """
name: tiny
command: [python, train.py]
max_workers: 2
microbatches: 4
iterations: 100000
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that has to be quoted, in each grammar in another way."""
    odd = tmp_path_factory.mktemp("cli") / "b'ü $x # \\u00fc {}"
    odd.mkdir()
    return odd


@pytest.fixture(scope="module")
def url(folder):
    """A running cluster of two nodes with one slot each, in an environment that no developer has."""
    port = free_port()
    words = ["--nodes", "2", "--slots", "1", "--port", str(port), "--dir", str(folder / "c"), "--metrics"]
    try:
        limited = ["sh", "-c", 'ulimit -n 256; umask 077; exec "$@"', "sh", *UNICRON]
        odd = {name: value for name, value in CLEAN.items() if name not in {"HOME", "no_proxy"}} | ODD
        started = call([*limited, "up", *words, "--json"], odd)
        assert started.returncode == 0, started.stderr
        up = json.loads(started.stdout)
        assert set(up["processes"]) == {"nats", *SERVICES, "console", "node-1", "node-2"}
        assert up["metrics"] == str(folder / "c" / "prometheus.json")
        KEYS[up["url"]] = up["key"]
        yield up["url"]
    finally:
        with contextlib.suppress(Exception):
            Cluster.load(folder / "c").stop()


@pytest.fixture(scope="module")
def task(url, folder):
    """A task that trains on both nodes."""
    (folder / "train.py").write_text(TRAIN)
    (folder / "task.yaml").write_text(TASK + "weight: 2.5\n")
    done = call([*UNICRON, "submit", str(folder / "task.yaml")], reaching(url))
    assert (done.returncode, done.stdout) == (0, "task tiny submitted\n")
    assert "task.yaml:7: weight 2.5: 0.5 to 2.0 is recommended" in done.stderr
    await_task(url, workers=2, beyond=0)
    return "tiny"


def await_task(url, workers, beyond):
    """Wait until the task runs on so many workers and has got beyond an iteration; return it."""

    def found():
        [view] = data("tasks", url=url)
        members = {member["node"] for member in view["members"]}
        return view["state"] == "running" and len(members) == workers and view["iteration"] > beyond and view

    return block_until(found)


@pytest.mark.exhaustive("the refusals are shown where nothing has to start")
def test_a_second_cluster_in_the_folder_is_refused(url, folder):
    assert "runs in" in unicron("up", "--dir", str(folder / "c"), code=1)


def test_it_runs_with_keys_and_nobody_gets_in_without_one(url, folder):
    stranger = call([*UNICRON, "status"], CLEAN | {"UNICRON_NATS_URL": url})
    assert stranger.returncode == 1
    assert "lets in nobody without a key; set UNICRON_NATS_NKEY" in stranger.stderr
    user = reaching(url) | {"UNICRON_NATS_NKEY": str(folder / "c" / "keys" / "user" / "user.nk")}
    assert call([*UNICRON, "status"], user).returncode == 0
    order = call([*UNICRON, "drain", "node-2"], user)
    assert (order.returncode, order.stdout) == (1, "")
    assert "gives no right to publish on unicron.v1.ord.registry" in order.stderr
    assert "UNICRON_NATS_NKEY" not in CLEAN


def test_a_command_finds_the_operators_key_in_the_clusters_folder(url, folder):
    (folder / "home").mkdir()
    (folder / "home" / ".unicron").symlink_to(folder / "c")
    found = call([*UNICRON, "--nats", url, "status"], CLEAN, folder / "home")
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.exhaustive("what each key may do is shown on a server alone")
def test_credentials_are_listed_given_replaced_and_taken(url, folder):
    def credentials(*words, **options):
        return data("credentials", *words, "--dir", str(folder / "c"), **options)

    def node(name):
        return next(view["state"] for view in data("nodes", url=url) if view["node"] == name)

    def await_node(name, state):
        block_until(lambda: node(name) == state)

    def users():
        return {user["name"]: user["key"] for user in credentials("list")["users"]}

    before = users()
    assert set(before) == {*NAMED, "operator", "user", "subscriber", "console", "node-1", "node-2"}
    processes = Cluster.load(folder / "c").processes
    path = credentials("subscriber")["file"]
    reading = call([*UNICRON, "status"], reaching(url) | {"UNICRON_NATS_NKEY": path})
    assert "the key of unicron-cli gives no right to publish on unicron.v1.rpc.registry" in reading.stderr
    fabric = [str(folder / "c" / "keys" / name / "fabric.key") for name in ("node-1", "node-2")]
    assert credentials("rotate", "fabric")["files"] == fabric
    credentials("shut-out", "node-2")
    await_node("node-2", "lost")
    assert credentials("list")["shut_out"] == ["node-2"]
    assert credentials("node", "node-2")["fabric"] == fabric[1]
    await_node("node-2", "up")
    credentials("rotate", "transition")
    assert {name for name, key in users().items() if key != before[name]} == {"node-2", "transition"}
    await_node("node-2", "up")
    assert data("doctor", url=url)["ok"]
    assert Cluster.load(folder / "c").processes == processes
    text = unicron("credentials", "list", "--dir", str(folder / "c"))
    assert "unicron.v1.cmd.>" in text
    assert "has no key" in unicron("credentials", "rotate", "node-9", "--dir", str(folder / "c"), code=1)
    assert "rights of its own" in unicron("credentials", "node", "planner", "--dir", str(folder / "c"), code=1)


def test_the_open_way_is_said_loudly(url, folder):
    taken = url.rpartition(":")[2]
    done = call([*UNICRON, "up", "--insecure", "--port", taken, "--dir", str(folder / "open")])
    assert done.returncode == 1
    assert "warning: INSECURE: there are no keys and no rights" in done.stderr


def test_doctor_finds_a_running_cluster_well(url):
    found = data("doctor", url=url)
    assert found["ok"]
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert {states[name] for name in (*SERVICES, "NATS", "JetStream", "nodes")} == {"ok"}
    silent = [check["name"] for check in found["checks"] if "nobody is notified: it has no file" in check["found"]]
    assert silent == ["notifier"]
    assert "node-1, node-2 up" in unicron("doctor", url=url)


def test_doctor_holds_a_running_cluster_against_one_in_production(url, folder):
    found = data("doctor", "--cluster", "--dir", str(folder / "c"), url=url)
    states = {check["name"]: check["state"] for check in found["checks"]}
    warned = {name for name, state in states.items() if state == "warning"}
    assert (found["ok"], set(states.values())) == (True, {"ok", "warning"})
    assert warned == {"NATS servers", *SERVICES, "people", "racks"}
    assert {check["found"] for check in found["checks"] if check["name"] == "planner"} == {"active, none standing by"}


def test_nodes_tasks_and_status_show_what_runs_where(url, task):
    nodes = data("nodes", url=url)
    assert [(node["node"], node["state"]) for node in nodes] == [("node-1", "up"), ("node-2", "up")]
    status = data("status", url=url)
    assert [view["spec"]["name"] for view in status["tasks"]] == [task]
    assert status["plan"]["number"] >= 1
    assert [share["task"] for share in data("plan", "show", url=url)["plan"]["shares"]] == [task]
    for words in (["status"], ["nodes"]):
        text = unicron(*words, url=url)
        assert "tiny:0" in text
        assert "tiny:1" in text
    assert "/100000" in unicron("tasks", url=url)
    assert "worker_failed:tiny" in unicron("plan", "table", url=url)


class Terminal:
    """A terminal of 80 columns and 24 lines, with `unicron top` in it."""

    def __init__(self, url):
        self._master, self._slave = os.openpty()
        self.resize(80, 24)
        self.before = termios.tcgetattr(self._slave)
        environment = {name: text for name, text in reaching(url).items() if name not in {"COLUMNS", "LINES"}}
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), self._slave)
        self.process = subprocess.Popen([*UNICRON, "top"], env=environment | {"TERM": "xterm"}, **ends)
        self.out = ""

    def resize(self, columns, lines):
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys):
        os.write(self._master, keys)

    def until(self, *texts):
        """Read on until all of these stand in what came since the last look."""
        self.out = ""
        while not all(text in self.out for text in texts):
            self.out += os.read(self._master, 65536).decode(errors="replace")

    def ended(self):
        """Return how it ended, and whether the terminal is as it was."""
        self.until("\x1b[?1049l")
        return self.process.wait(), termios.tcgetattr(self._slave) == self.before

    def close(self):
        self.process.kill()
        self.process.wait()
        for end in (self._master, self._slave):
            os.close(end)


@pytest.fixture
def terminal(url, task):
    with contextlib.closing(Terminal(url)) as terminal:
        yield terminal


@pytest.mark.exhaustive("what is drawn is shown without a cluster")
def test_top_shows_the_cluster_live_in_a_terminal_of_any_size_until_q(terminal, folder):
    terminal.until("\x1b[?1049h", "1 task, 2 slots, 0 spare", "2 up", "tiny", "running", "%", "TIME")
    assert termios.tcgetattr(terminal._slave) != terminal.before
    registry = Cluster.load(folder / "c").processes["registry"]
    registry.signal(signal.SIGSTOP)
    try:
        terminal.until("is registry running?", "tiny")
    finally:
        registry.signal(signal.SIGCONT)
    terminal.until("unicron ", "2 up")
    terminal.resize(300, 30)
    terminal.process.send_signal(signal.SIGWINCH)
    terminal.until("ITERATION", "/100,000")
    terminal.press(b"xq")
    assert terminal.ended() == (0, True)


def test_top_leaves_the_terminal_as_it_was_at_ctrl_c(terminal):
    terminal.until("tiny")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.ended() == (0, True)


@pytest.mark.exhaustive("what is drawn is shown without a cluster")
def test_top_without_a_terminal_prints_once_and_as_json_every_second(url, task):
    text = unicron("top", url=url)
    assert "2 slots, 0 spare" in text
    assert "EVENT" in text
    found = data("top", "--once", url=url)
    assert (found["error"], found["nodes"], found["tasks"][0]["task"]) == ("", {"up": 2}, task)
    assert 0 < found["tasks"][0]["goodput"] <= 1
    assert any(event["text"].startswith(f"{own_name()} ordered SubmitTask: ") for event in found["events"])
    with subprocess.Popen([*UNICRON, "top", "--json"], stdout=subprocess.PIPE, text=True, env=reaching(url)) as process:
        seen = [json.loads(process.stdout.readline()) for _ in range(4)]
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    assert seen[-1]["tasks"][0]["iteration"] > found["tasks"][0]["iteration"]
    assert len({each["at"] for each in seen}) == len(seen)


def test_watching_goes_on_until_it_is_interrupted(url, task):
    command = [*UNICRON, "status", "--watch", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=reaching(url)) as process:
        first = json.loads(process.stdout.readline())["tasks"][0]["iteration"]
        while json.loads(process.stdout.readline())["tasks"][0]["iteration"] <= first:
            pass  # between two looks a worker may get no turn
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0


def test_events_follow_until_interrupted_one_json_object_a_line(url, task):
    command = [*UNICRON, "events", "--follow", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=reaching(url)) as process:
        found = []
        while not any(event["type"] == "NodeDrained" for event in found):
            if len(found) == 3:  # it listens
                assert "no more work" in unicron("drain", "node-2", url=url)
            found.append(json.loads(process.stdout.readline()))
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
    sequences = [event["sequence"] for event in found]
    assert sequences == sorted(set(sequences))
    drained = next(event for event in found if event["type"] == "NodeDrained")
    taken, *_ = journal(url, "--chain", drained["id"])
    assert [taken[each] for each in ("type", "order", "node", "by")] == [
        "OrderTaken",
        "DrainNode",
        "node-2",
        own_name(),
    ]
    await_task(url, workers=1, beyond=0)
    assert data("drain", "node-2", "--undo", url=url)["drained"] is False
    await_task(url, workers=2, beyond=0)


def journal(url, *words):
    return [json.loads(line) for line in unicron("events", "--json", *words, url=url).splitlines()]


def is_fact(fact, kind, **fields):
    return fact["type"] == kind and all(fact[name] == value for name, value in fields.items())


def test_a_killed_worker_makes_a_story(url, task):
    strike = data("chaos", "kill-worker", f"{task}:1", url=url)
    assert (strike["fault"], strike["target"]) == ("kill-worker", "tiny:1")

    def recovered():
        facts = journal(url)
        failures = [each for each in facts if is_fact(each, "FailureDetected", worker=strike["worker"])]
        chains = {each["correlation"] for each in facts if each["type"] == "TaskRecovered"}
        return failures and failures[0]["correlation"] in chains and failures

    [failure] = block_until(recovered)
    await_task(url, workers=2, beyond=await_task(url, workers=2, beyond=0)["iteration"] + 1)
    story = unicron("events", "--chain", failure["id"], url=url).splitlines()
    told = rf"tiny:1 \({strike['worker']}\) on {strike['node']} was ended by SIGKILL: back at 2 workers after [\d.]+ s"
    assert re.fullmatch(rf"chain {failure['correlation']}, {len(story) - 1} messages in [\d.]+ s: {told}", story[0]), (
        story[0]
    )
    kinds = [line.split()[3] for line in story[1:]]
    assert kinds[0] == "WorkerExited"
    assert {"FailureDetected", "StartWorker", "Regroup", "TaskRecovered"} <= set(kinds)
    assert [event["type"] for event in journal(url, "--chain", failure["id"])] == kinds
    assert len(of_node := journal(url, "--node", strike["node"], "-n", "3")) == 3
    assert {event["node"] for event in of_node} == {strike["node"]}
    assert "in no message" in unicron("events", "--chain", "nothing", url=url, code=1)
    assert_its_cost_is_told(url, task, failure)
    assert_their_logs_are_shown(url, strike)


def assert_their_logs_are_shown(url, strike):
    """Of a worker that was killed, and of one that replaced it."""
    living = [member["worker"] for member in await_task(url, workers=2, beyond=0)["members"]]
    assert strike["worker"] not in living
    for worker in (*living, strike["worker"]):
        assert unicron("logs", worker, url=url) == "it begins\n\\u001b]0;pwned\\u0007\ufffd\n"
    assert data("logs", "tiny:1", url=url)["worker"] == living[1]
    assert "tiny:9: tiny has ranks 0 to 1 now" in unicron("logs", "tiny:9", url=url, code=1)
    found = data("logs", strike["worker"], "-n", "1", url=url)
    assert found == {"worker": strike["worker"], "node": strike["node"], "lines": ["\x1b]0;pwned\x07\ufffd"]}
    assert "no worker 'tiny-99' in the journal" in unicron("logs", "tiny-99", url=url, code=1)
    assert "no log of worker 'tiny-99' here" in unicron("logs", "tiny-99", "--node", "node-1", url=url, code=1)
    assert "use 1 to 64 letters" in unicron("logs", "../../etc/passwd", "--node", "node-1", url=url, code=1)


def assert_its_cost_is_told(url, task, failure):
    """`unicron goodput` tells what the failure cost, of its task, by cause, by node, and by itself."""
    report = data("goodput", task, "--since", "1h", url=url)
    [row] = report["tasks"]
    assert 0 < row["goodput"] < 1
    [cause] = [each for each in report["causes"] if each["name"] == "exited_abnormally"]
    assert cause["failures"] == 1
    assert failure["node"] in {each["name"] for each in report["nodes"]}
    costs = data("goodput", task, "--failures", url=url)
    [cost] = [each for each in costs if each["chain"] == failure["correlation"]]
    assert cost["seconds"] == pytest.approx(cause["seconds"])
    assert failure["worker"] in {each["worker"] for each in cost["spans"]}
    assert "all phases add up to" in unicron("goodput", url=url)
    assert failure["correlation"] in unicron("goodput", "--failures", url=url)
    assert unicron("goodput", "--csv", url=url).startswith("scope,name,failures,total_s,whole_s,goodput,")
    assert unicron("goodput", "--failures", "--csv", url=url).startswith("chain,what,node,tasks,begun,detected_at,")
    assert "nothing of a task 'bert'" in unicron("goodput", "bert", url=url, code=1)
    [shown] = data("task", "show", task, url=url)
    assert failure["correlation"] in {each["chain"] for each in shown["failures"]}
    assert shown["causes"]["exited_abnormally"] == pytest.approx(sum(cause["seconds"].values()))
    assert "those there are: tiny" in unicron("task", "show", "bert", url=url, code=1)


@pytest.mark.exhaustive("scripts of faults are shown on the real bus with a stand-in of an agent")
def test_a_script_takes_a_node_down_and_brings_it_back(url, task, folder):
    began = await_task(url, workers=2, beyond=0)
    now, node = began["iteration"], began["members"][1]["node"]
    (folder / "faults.yaml").write_text(f"""
- at: {{task: tiny, iteration: {now + 100}}}
  fault: kill-node
  target: {{node: {node}}}
- at: {{task: tiny, iteration: {now + 160}}}
  fault: restart-node
  target: {{node: {node}}}
""")
    where = ["--dir", str(folder / "c")]
    out = unicron("chaos", "run", str(folder / "faults.yaml"), "--json", *where, url=url)
    strikes = [json.loads(line) for line in out.splitlines()]
    assert [strike["fault"] for strike in strikes] == ["kill-node", "restart-node"]
    await_task(url, workers=2, beyond=now + 161)
    facts = journal(url)
    taken = [(fact["source"], fact["by"], fact["text"]) for fact in facts if fact["type"] == "OrderTaken"]
    assert (node, own_name(), f"{node} kills itself with all its workers") in taken
    assert any(is_fact(fact, "FailureDetected", node=node, severity=1) for fact in facts)


def test_up_starts_again_what_has_ended_of_a_cluster_that_runs(url, task, folder):
    cluster = Cluster.load(folder / "c")
    for name in ("nats", "planner"):
        cluster.kill(name)
    before = {name: cluster.processes[name].pid for name in cluster.alive()}
    assert data("up", "--dir", str(folder / "c"))["started"] == ["nats", "planner"]
    after = Cluster.load(folder / "c")
    assert {name: after.processes[name].pid for name in before} == before, "the others ran on"
    await_task(url, workers=2, beyond=await_task(url, workers=2, beyond=0)["iteration"])


@contextlib.contextmanager
def prometheus(folder, targets):
    """A real Prometheus that scrapes those targets every second, with our rules; yields what asks it."""
    rules = ROOT / "deploy" / "unicron_deploy" / "prometheus"
    config = (rules / "prometheus.yml").read_text().replace("15s", "1s").replace("rules.yml", str(rules / "rules.yml"))
    folder.mkdir()
    (folder / "prometheus.yml").write_text(config.replace("targets/*.json", str(targets)))
    port = free_port()
    flags = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [PROMETHEUS, *flags, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log
        )

    def ask(path):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}") as answer:
            return json.load(answer)["data"]

    def until(path, holds):
        def told():
            with contextlib.suppress(OSError):
                found = ask(path)
                return [found] if holds(found) else []

        [found] = block_until(told)
        return found

    try:
        yield until
    finally:
        process.terminate()
        process.wait()


@pytest.mark.skipif(PROMETHEUS is None, reason="no prometheus; Debian has a package of that name")
def test_prometheus_scrapes_every_process_and_tells_of_a_node_that_is_killed(url, task, folder):
    def value(query, holds):
        def holds_of(found):
            return found["result"] and holds(float(found["result"][0]["value"][1]))

        found = until(f"query?query={urllib.parse.quote(query)}", holds_of)
        return found["result"][0]

    def firing(found):
        return {alert["labels"]["alertname"] for alert in found["alerts"] if alert["state"] == "firing"}

    where = ["--dir", str(folder / "c")]
    await_task(url, workers=2, beyond=0)
    with prometheus(folder / "prometheus", folder / "c" / "prometheus.json") as until:
        value('sum(up{job="unicron"})', lambda up: up == len(SERVICES) + 3)
        assert value("sum(unicron_active)", lambda active: active == len(SERVICES))
        value('unicron_task_workers{task="tiny"}', lambda workers: workers == 2)
        value('rate(unicron_task_training_seconds_total{task="tiny"}[10s])', lambda goodput: 0 < goodput < 1.5)
        assert value("max(unicron_planned_waf)", lambda waf: waf > 0)
        value("sum(unicron_agent_workers)", lambda workers: workers == 2)
        assert "UnicronNodeLost" not in firing(until("alerts", lambda _: True))
        unicron("chaos", "kill-node", "node-2", url=url)
        until("alerts", lambda found: {"UnicronNodeLost", "UnicronSevereFailure"} <= firing(found))
        lost = value('unicron_failures_total{severity="1",node="node-2"}', lambda count: count >= 1)
        assert lost["metric"]["cause"] == "lost_connection"
        value('unicron_phase_seconds_count{phase="decide",task="tiny"}', lambda count: count >= 1)
        unicron("chaos", "restart-node", "node-2", *where, url=url)
        until("alerts", lambda found: "UnicronNodeLost" not in firing(found))
        for phase in ("detect", "plan", "regroup", "fetch", "resume"):
            value(f'sum(unicron_phase_seconds_count{{phase="{phase}"}})', lambda count: count >= 1)
        value('sum(up{job="unicron"})', lambda up: up == len(SERVICES) + 3)
    await_task(url, workers=2, beyond=0)


@pytest.mark.exhaustive("storms are shown on the real bus with a stand-in of an agent")
def test_a_storm_that_is_over_says_whether_the_cluster_is_whole(url, task, folder):
    found = data("chaos", "storm", "--minutes", "0", "--seed", "1", url=url)
    assert found == {"ok": True, "seed": 1, "strikes": [], "troubles": []}
    where = ["--dir", str(folder / "c")]
    assert "the cluster is whole" in unicron("chaos", "storm", "--minutes", "0", *where, url=url)
    assert "no cluster runs in" in unicron("chaos", "storm", "--minutes", "0", "--dir", str(folder), url=url, code=1)


def test_a_removed_task_is_gone_and_down_leaves_no_process(url, task, folder):
    assert unicron("remove", task, url=url) == "task tiny removed\n"
    block_until(lambda: data("tasks", url=url) == [])
    cluster = Cluster.load(folder / "c")
    started = cluster.processes
    assert set(data("down", "--dir", str(folder / "c"))["stopped"]) == set(started)
    assert [name for name, process in started.items() if process.session()] == []
    assert "NodeLeft" not in cluster.last_line("node-1")
    assert "nothing" in unicron("down", "--dir", str(folder / "c"))
