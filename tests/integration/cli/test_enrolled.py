"""A machine that nobody has named joins a cluster of `unicron up` by the commands of docs/howto/join.md."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.cli import CLEAN, UNICRON, call
from helpers.ports import free_port
from helpers.waiting import block_until

pytestmark = [
    pytest.mark.real,
    pytest.mark.exhaustive("a cluster's worth of processes; tests/contract/test_enrolment.py has each of its steps"),
]

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "join.md"


def commands(port):
    """Return the page's commands as words, on this machine."""
    section = PAGE.read_text()
    lines = [line.partition("  #")[0].split() for line in re.findall(r"^    (.*)$", section, re.MULTILINE)]
    text = [[word.replace("10.0.0.5:4222", f"127.0.0.1:{port}") for word in words] for words in lines]
    return [[word.replace("10.0.0.5", "127.0.0.1") for word in words] for words in text]


def test_the_page_is_followed_word_for_word(tmp_path):
    port, environment = free_port(), dict(CLEAN)
    up, export, create, show, revoke, own, agent = commands(port)

    def unicron(*words):
        ended = call([*UNICRON, *words], environment, cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    try:
        unicron(*up[1:], "--nodes", "1", "--slots", "1", "--port", str(port), "--console-port", str(free_port()))
        environment |= dict([export[1].split("=")])
        made = unicron(*create[1:])
        assert made.startswith("gpu.token\n")
        assert (tmp_path / "gpu.token").stat().st_mode & 0o777 == 0o600
        line = (tmp_path / "gpu.token").read_text()
        assert line.split(".")[2] not in made
        with (tmp_path / "agent.log").open("wb") as log:
            there = environment | dict(word.split("=") for word in own[1:])
            started = [sys.executable, *agent[1:], "--node", "stranger"]
            process = subprocess.Popen(started, cwd=tmp_path, env=there, stdout=log, stderr=log)
        block_until(lambda: "stranger  up" in unicron("status"))
        assert "stranger" in unicron(*show[1:])
        token = line.split(".")[1]
        unicron(*(token if word == "ID" else word for word in revoke[1:]))
        assert "revoked" in unicron(*show[1:])
        told = unicron("events")
        assert "stranger was let into pool gpu" in told
        assert unicron("token", "create", "--pool", "gpu", "--out", "-").startswith("unicron.")
        process.terminate()
        assert process.wait() == 0
    finally:
        call([*UNICRON, "down"], cwd=tmp_path)
    logs = [path.read_text(errors="replace") for path in (*tmp_path.glob(".unicron/**/*.log"), tmp_path / "agent.log")]
    assert [log for log in logs if line.split(".")[2] in log] == []
