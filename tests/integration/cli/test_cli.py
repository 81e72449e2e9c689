"""The command line, as a user types it, where no cluster is needed."""

import json
import socket
import sys

import pytest
from helpers.cli import CLEAN, UNICRON, call, data, unicron


@pytest.mark.parametrize(("words", "more"), [([], ["nats"]), (["up"], [])])
def test_help_needs_neither_torch_nor_the_list_of_commands_a_bus(words, more):
    blocked = f"import sys; sys.modules.update(dict.fromkeys(['torch', 'numpy', 'faust', 'grpc', *{more!r}])); "
    run = f"sys.argv = ['unicron', *{words!r}, '--help']; from unicron_cli.main import main; main()"
    done = call([sys.executable, "-c", blocked + run])
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: unicron" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["sumbit", "task.yaml"], ["No such command 'sumbit'", "Did you mean 'submit'"]),
        (["chaos", "kill-wroker", "gpt:0"], ["No such command 'kill-wroker'", "'kill-worker'"]),
        (["status", "--jsn"], ["No such option", "--json"]),
        (["submit"], ["Missing argument", "FILE"]),
        (["up", "--nodes", "none"], ["--nodes", "not a valid int"]),
        (["up", "--port", "99999"], ["--port", "65535"]),
        (["events", "--follow", "--chain", "abc"], ["use one of them"]),
        (["goodput", "--since", "yesterday"], ["--since 'yesterday'", "36h or 7d"]),
        (["goodput", "--json", "--csv"], ["use one of them"]),
        (["plan", "what-if"], ["say what happens", "--lose NODE"]),
    ],
)
def test_a_wrong_call_says_what_is_right(words, says):
    message = " ".join(unicron(*words, code=2).replace("│", " ").split())
    for part in says:
        assert part in message


@pytest.mark.parametrize("command", ["status", "provision", "chaos kill-worker gpt:0"])
def test_without_a_bus_the_address_and_the_cure_are_named(command):
    line = unicron(*command.split(), "--nats", "nats://127.0.0.1:1", code=1)
    assert line.startswith("unicron: no NATS server answers at nats://127.0.0.1:1")
    assert "--nats" in line
    assert len(line.splitlines()) == 1


def test_the_address_may_stand_before_the_command_or_in_the_environment():
    assert "127.0.0.1:2" in unicron("--nats-url", "nats://127.0.0.1:2", "status", code=1)
    done = call([*UNICRON, "status"], CLEAN | {"UNICRON_NATS_URL": "nats://127.0.0.1:2"})
    assert "127.0.0.1:2" in done.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("command: x\nwieght: 2", "task.yaml:3: wieght 2: no such field; did you mean 'weight'?"),
        ("command: python trian.py", "no trian.py in {}; did you mean 'train.py'? Where only the nodes have it"),
        ("command: python trian.py\nworkdir: /on/nodes", "no NATS server answers"),
    ],
)
def test_a_broken_task_file_is_refused_before_anything_is_asked(text, told, tmp_path):
    (tmp_path / "task.yaml").write_text(f"name: gpt\n{text}\n")
    (tmp_path / "train.py").touch()
    line = unicron("submit", "task.yaml", "--nats", "nats://127.0.0.1:1", cwd=tmp_path, code=1)
    assert told.format(tmp_path) in line
    assert line.count("\n") == 1


def test_up_refuses_a_port_that_is_taken_and_leaves_nothing_behind(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        line = unicron("up", "--port", port, "--dir", str(tmp_path / "c"), code=1)
    assert f"port {port}" in line
    assert "choose another port" in line
    assert not (tmp_path / "c" / "cluster.json").exists(), "the next start does not begin with that port"


def test_doctor_says_what_is_missing_and_how_to_mend_it():
    done = call([*UNICRON, "doctor", "--json", "--nats", "nats://127.0.0.1:1"])
    found = json.loads(done.stdout)
    assert (done.returncode, found["ok"]) == (1, False)
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["Python"]["state"] == "ok"
    assert checks["nats-server"]["state"] == "ok"
    assert checks["NATS"]["state"] == "missing"
    assert "unicron up" in checks["NATS"]["cure"]
    assert all(check["cure"] for check in found["checks"] if check["state"] != "ok")


async def test_provision_makes_the_streams(private_server):
    assert data("provision", url=private_server.url)["streams"] == ["UNICRON", "KV_unicron_state", "KV_unicron_lease"]
    assert unicron("events", url=private_server.url) == ""
    assert "registry running" in unicron("status", url=private_server.url, code=1)
