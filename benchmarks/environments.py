"""One small test in environments that no developer has: three nodes train, a worker and a node are killed, it heals.

The cluster, its commands and its programs run in each environment by the command line alone. For each it is said what
became of that:

- `healed`: the task came further on all slots that were left, after each of the two.
- `iterations`: how far it came.
- `says`: what `status` said of the task at the end, where it did not heal.
- `blamed`: whether the program was ever held to be at fault.
- `heal_s`: for how long the task was not whole, each time.
- `failures`: all that were found, of which a worker and a node are meant; `dead_letters`: messages nobody could use.
- `notices`: how often it was told that a clock is wrong; `cleared`: that it is right again, as it is at the end.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from unicron_deploy.nats_server import free_port

from benchmarks.harness.command import Options, Result, main, names, option, say
from unicron.services import SERVICES

PATIENCE_S = 90.0
GONE = "http://127.0.0.1:9"
PROXIES = {f"{name}_proxy": GONE for name in ("http", "https", "grpc", "all")}
SMALL = {"min_workers": 1, "max_workers": 4, "microbatches": 8, "iterations": 100000, "weight": 1.0}

PROGRAM = """
import time, torch
from unicron.train import Session
torch.manual_seed(1)
model = torch.nn.Linear(WIDTH, WIDTH)
optimizer = torch.optim.AdamW(model.parameters())
session = Session(seed=1, iterations=100000, microbatches=8)
session.protect(model=model, optimizer=optimizer)
for iteration in session.iterations():
    for _ in session.microbatches():
        time.sleep(0.02)
        session.backward(model(torch.randn(4, WIDTH)).square().mean())
    session.step()
"""


class Environment(NamedTuple):
    """What is unlike a developer's machine.

    Attributes:
        variables: set; None: removed.
        shell: run before each command, in its shell.
        outside: run before all of it, as root, in a name space of mounts and networks of its own.
        folder: name of the cluster's folder.
        host: address at which it listens.
        width: of the model, whose state is 12 bytes for each weight.
        clock_of: words in the command lines of processes whose clock is moved, with commas between.
        off_s: by which it is wrong from the start.
        jump_s: by which it is set once the task runs.
        joins: whether one more node joins: node-4.
        patience_s: how long the task may take to come further.
    """

    variables: Mapping[str, str | None] = {}
    shell: str = ""
    outside: str = ""
    folder: str = "c"
    host: str = ""
    width: int = 64
    clock_of: str = ""
    off_s: int = 0
    jump_s: int = 0
    joins: bool = False
    patience_s: float = PATIENCE_S


PARTIES = {
    "services": ",".join(f"unicron_{name}" for name in SERVICES),
    "node": "--node node-2,nodes/node-2",
    "joiner": "--node node-4,nodes/node-4",
}
OFF = {"-2 h": -7200, "-5 min": -300, "+5 min": 300, "+2 h": 7200}
CLOCKS = {
    f"{who} {name}": Environment(clock_of=words, off_s=off_s, joins=who == "joiner")
    for who, words in PARTIES.items()
    for name, off_s in OFF.items()
} | {
    f"{who} jumps {name}": Environment(clock_of=PARTIES[who], jump_s=OFF[name])
    for who in ("services", "node")
    for name in ("-2 h", "+2 h")
}
SLOW = "/sys/fs/cgroup/cpu/unicron-slow"
ENVIRONMENTS = {
    "usual": Environment(),
    "proxy": Environment(PROXIES),
    "letters": Environment(folder="b'ü $x # \\u00fc {}"),
    "long path": Environment(folder="d" * 120),
    "no home": Environment({"HOME": None}),
    "umask 077": Environment(shell="umask 077"),
    "256 files": Environment(shell="ulimit -n 256"),
    "python -OO": Environment({"PYTHONOPTIMIZE": "2"}),
    "POSIX locale": Environment({"LC_ALL": "POSIX", "LANG": "C"}),
    "time zone": Environment({"TZ": "Pacific/Kiritimati"}),
    "IPv6": Environment(host="::1"),
    "library that lacks": Environment({"LD_PRELOAD": "/nonexistent/libuser.so"}),
    "shm of 24 MB": Environment(outside="mount -t tmpfs -o size=24m tmpfs /dev/shm", width=1200),
    "read-only package": Environment(
        {"HOME": "/nonexistent"}, outside="mount --bind {package} {package} && mount -o remount,ro,bind {package}"
    ),
    "tenth of a core": Environment(
        outside=f"mkdir -p {SLOW} && echo 10000 > {SLOW}/cpu.cfs_quota_us && echo $$ > {SLOW}/cgroup.procs",
        patience_s=900.0,
    ),
    **CLOCKS,
}


def failure_of(fact: Mapping[str, Any]) -> str:
    """Return what a failure is, of whom, and why."""
    return f"{fact['status']} {fact.get('worker') or fact.get('node')}: {str(fact.get('reason'))[:100]}"


class Place:
    """A cluster in an environment, by its commands."""

    def __init__(self, environment: Environment, root: Path) -> None:
        self.environment, self.port = environment, free_port()
        self.folder = root / environment.folder
        self.folder.mkdir(parents=True)
        host = f"[{environment.host}]" if environment.host else "127.0.0.1"
        given = {"UNICRON_NATS_URL": f"nats://{host}:{self.port}", **environment.variables}
        if environment.clock_of:
            given |= self._movable_clock()
        base = {**os.environ, **given, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        self.env = {name: value for name, value in base.items() if value is not None}
        (self.folder / "small.py").write_text(PROGRAM.replace("WIDTH", str(environment.width)))
        spec = {"name": "s", "command": ["python", "small.py"], **SMALL}
        (self.folder / "task.yaml").write_text(json.dumps(spec))

    def _movable_clock(self) -> dict[str, str]:
        """Return the variables with which the clock is as far off as `self.set_clock` says."""
        library, source = self.folder / "clock.so", Path(__file__).parent / "harness" / "clock.c"
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
        self.set_clock(self.environment.off_s)
        file = str(self.folder / "clock")
        return {"LD_PRELOAD": str(library), "CLOCK_FILE": file, "CLOCK_OF": self.environment.clock_of}

    def set_clock(self, off_s: int) -> None:
        """Have the clock of those who are meant be off by so much."""
        (self.folder / "clock").write_text(str(off_s))

    def join(self) -> "subprocess.Popen[bytes]":
        """Start the agent of one more node."""
        self.call("credentials", "node", "node-4")
        keys = self.folder / ".unicron" / "keys" / "node-4"
        own = {"UNICRON_NATS_NKEY": str(keys / "node-4.nk"), "UNICRON_FABRIC_KEY": str(keys / "fabric.key")}
        command = [sys.executable, "-m", "unicron_agent", "--node", "node-4", "--slots", "2", "--run-dir"]
        with (self.folder / "node-4.log").open("wb") as log:
            return subprocess.Popen(
                [*command, str(self.folder / "nodes" / "node-4")],
                cwd=self.folder, env={**self.env, **own}, stdout=log, stderr=log,
            )  # fmt: skip

    def events(self) -> list[dict[str, Any]]:
        """Return the journal's messages."""
        return [json.loads(line) for line in self.call("events", "--json").stdout.splitlines()]

    def clock_notices(self, *, over: bool) -> int:
        """Return how often it was told that a clock is wrong, or is right again."""
        alerts = [each for each in self.events() if each["type"] == "Alert" and each.get("kind") == "clock"]
        return sum(each.get("over", False) == over for each in alerts)

    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the environment."""
        script = f'{self.environment.shell or ":"}; exec "$@"'
        command = ["sh", "-c", script, "sh", sys.executable, "-m", "unicron_cli", *words]
        return subprocess.run(command, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False)

    def task(self) -> dict[str, Any]:
        """Return the task as `status` shows it; what the command says instead, where it does not."""
        done = self.call("status", "--json")
        if done.returncode:
            return {"reason": done.stderr.strip()[-300:], "members": [], "iteration": -1}
        return next(iter(json.loads(done.stdout)["tasks"]), {"members": [], "iteration": -1, "reason": "none"})

    def comes_further(self, workers: int) -> bool:
        """Return whether the task comes further on so many workers, before our patience ends."""
        end, first = time.monotonic() + self.environment.patience_s, self.task()["iteration"]
        while time.monotonic() < end:
            found = self.task()
            if found["iteration"] > first + 3 and len(found["members"]) >= workers:
                return True
            time.sleep(0.5)
        return False

    def run(self) -> dict[str, Any]:
        """Play the test; return what became of it."""
        host = ["--host", self.environment.host] if self.environment.host else []
        ports = ["--port", str(self.port), "--console-port", str(free_port())]
        up = self.call("up", "--nodes", "3", "--slots", "2", *ports, *host)
        if up.returncode:
            return {"healed": False, "iterations": 0, "says": up.stderr.strip()[-300:], "blamed": False}
        joiner = self.join() if self.environment.joins else None
        try:
            self.call("submit", "task.yaml")
            healed = self.comes_further(4)
            if self.environment.jump_s:
                self.set_clock(self.environment.jump_s)
                healed = self.comes_further(4) and healed
            for order in (("kill-worker", "s:1"), ("kill-node", "node-1")):
                self.call("chaos", *order)
                time.sleep(2.0)
                healed = self.comes_further(4) and healed
            return self._outcome(healed)
        finally:
            if joiner:
                joiner.terminate()
                joiner.wait()
            self.call("down")

    def _outcome(self, healed: bool) -> dict[str, Any]:
        last, told = self.task(), self.events()
        says = "" if healed else last.get("reason", "")
        recovered = [round(each["seconds"], 2) for each in told if each["type"] == "TaskRecovered"]
        found = {
            "healed": healed,
            "iterations": last["iteration"],
            "says": says,
            "blamed": "at fault" in self.call("events").stdout,
            "heal_s": recovered,
            "failures": [failure_of(each) for each in told if each["type"] == "FailureDetected"],
            "dead_letters": sum(each["type"] == "DeadLetter" for each in told),
        }
        if self.environment.clock_of:
            self.set_clock(0)
            end = time.monotonic() + 15.0
            while not self.clock_notices(over=True) and time.monotonic() < end:
                time.sleep(1.0)
            found |= {"notices": self.clock_notices(over=False), "cleared": self.clock_notices(over=True)}
        return found


def measure(options: Options, root: Path) -> Result:
    """Play the test in each environment."""
    rows: dict[str, dict[str, Any]] = {}
    for name in options.only:
        rows[name] = _isolated(name, root / str(len(rows)))
        say(f"{name}: {rows[name]}")
    healed = sum(row["healed"] for row in rows.values())
    return Result({"healed": healed, "environments": len(rows)}, details={"environments": rows})


def _isolated(name: str, root: Path) -> dict[str, Any]:
    """Play the test in a process of its own, where the environment takes name spaces."""
    environment, outside = ENVIRONMENTS[name], ""
    if environment.outside:
        if os.getuid() or shutil.which("unshare") is None:
            return {"healed": False, "iterations": 0, "says": "left out: it takes root and unshare", "blamed": False}
        outside = environment.outside.format(package=Path(__file__).parents[1])
    play = "import sys; from benchmarks.environments import play; play(*sys.argv[1:])"
    command = [sys.executable, "-c", play, name, str(root)]
    if outside:
        command = ["unshare", "-m", "sh", "-c", f'{outside} && exec "$@"', "sh", *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            told, _ = child.communicate()
        except BaseException:
            child.terminate()  # it stops its cluster first
            child.wait()
            raise
    with contextlib.suppress(OSError):
        Path(SLOW).rmdir()
    found: dict[str, Any] = json.loads(told.splitlines()[-1])
    return found


def play(name: str, root: str) -> None:
    """Play the test in an environment, and print what became of it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(json.dumps(Place(ENVIRONMENTS[name], Path(root)).run()))


if __name__ == "__main__":
    every = list(ENVIRONMENTS)
    main(measure, option("--only", type=names(every), default=every, help="environments, with commas between"))
