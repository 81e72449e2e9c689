"""A program without a session: its environment and its messages, by its launcher and `unicron.train.watch`."""

import importlib.util
import math
import os
import socket

import pytest
import torch

import unicron.train
from unicron.contracts import worker as wire
from unicron.contracts.frames import LENGTH, frame, length_of
from unicron.contracts.tasks import WorkerPhase
from unicron.train import Session
from unicron.train.restart.launcher import Place, free_port, is_echo, variables_of
from unicron.train.worker import channel

PLACES = [
    *(Place("node-a", "0", 5, "10.0.0.1", 4711, 4712), Place("node-b", "1")),
    *(Place("node-a", "3"), Place("node-b", "0")),
]


def test_a_rank_is_told_what_torchrun_tells():
    told = variables_of(2, PLACES, "gpt")
    assert (told["RANK"], told["WORLD_SIZE"], told["ROLE_RANK"], told["ROLE_WORLD_SIZE"]) == ("2", "4", "2", "4")
    assert (told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("1", "2")
    assert (told["GROUP_RANK"], told["GROUP_WORLD_SIZE"]) == ("0", "2")
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("10.0.0.1", "4711")
    assert (told["TORCHELASTIC_RESTART_COUNT"], told["TORCHELASTIC_RUN_ID"]) == ("5", "gpt")


def test_ranks_of_a_node_see_its_devices_in_the_order_of_their_local_ranks():
    [first, second] = (variables_of(rank, PLACES, "gpt") for rank in (1, 3))
    assert first["CUDA_VISIBLE_DEVICES"] == second["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1")
    alone = variables_of(0, [Place("n", "", 0, "::1", 4, 5)], "t")
    assert alone["JAX_COORDINATOR_ADDRESS"] == "[::1]:5"


def test_a_port_is_free():
    with socket.socket() as found:
        found.bind(("127.0.0.1", free_port("127.0.0.1")))


@pytest.mark.parametrize(
    ("exception", "text", "echo"),
    [
        ("torch.distributed.DistBackendError", "whatever", True),
        ("RuntimeError", "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer", True),
        ("RuntimeError", "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Read error: Connection reset", True),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", False),
        ("ConnectionResetError", "a data loader's database went away", False),
        ("torch.distributed.DistNetworkError", "connection timed out", True),
        ("torch.distributed.DistBackendError", "Last error: Cuda failure 'uncorrectable ECC error'", False),
        ("torch.distributed.DistNetworkError", "failed to listen on any address. port: 1, name: EADDRINUSE", False),
    ],
)
def test_the_failure_of_another_rank_is_told_from_ones_own(exception, text, echo):
    assert is_echo(wire.Raised(iteration=3, exception=exception, text=text, traceback="")) is echo


@pytest.fixture
def heard(monkeypatch):
    """Have this process speak to a launcher; return what reads all that it has said."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr(channel, "_channel", None)
    monkeypatch.setattr(channel, "_launcher_channel", channel.LauncherChannel(theirs))

    def read():
        ours.setblocking(False)
        found = []
        while True:
            try:
                found.append(receive(ours))
            except BlockingIOError:
                return found

    yield read
    ours.close()
    theirs.close()


def receive(ours):
    return wire.to_agent(channel.receive(ours, length_of(channel.receive(ours, LENGTH.size))))


def trained(model, watching, passes=1):
    for _ in range(passes):
        model(torch.ones(2, 4)).sum().backward()
    watching.tick(torch.tensor(2.5, requires_grad=True))


def test_iterations_are_told_with_the_time_that_was_computed(heard, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    model = torch.nn.Linear(4, 1)
    with unicron.train.watch(model, iteration=7) as watching:
        trained(model, watching, passes=2)
        model.eval()(torch.ones(2, 4))  # an evaluation is no part of an iteration
        model.train()
        with torch.no_grad():
            model(torch.ones(2, 4))
        trained(model, watching)
    model(torch.ones(2, 4)).sum().backward()  # is not watched any more
    first, second, third, one, *rest = heard()
    assert [(each.iteration, each.done) for each in (first, second, third)] == [(7, 0), (7, 1), (7, 2)]
    assert {each.phase for each in (first, second, third)} == {WorkerPhase.REDUCE}
    assert (one.iteration, one.rank, one.world_size, one.loss) == (7, 1, 3, 2.5)
    assert 0 < one.computed_s < one.seconds
    assert [type(each) for each in rest] == [wire.Progress, wire.Progress, wire.Iterated]
    assert rest[-1].iteration == 8


def test_a_loop_without_a_model_ticks(heard):
    with unicron.train.watch() as watching:
        watching.tick()
        watching.tick(1.5, iteration=40)
    first, second = heard()
    assert (first.iteration, first.loss, first.computed_s) == (0, 0.0, 0.0)
    assert (second.iteration, second.loss) == (40, 1.5)
    assert watching.iteration == 41


def test_a_loss_that_is_none_any_more_is_told_as_it_is(heard):
    with unicron.train.watch() as watching:
        watching.tick(torch.tensor([math.nan]))
    [told] = heard()
    assert math.isnan(told.loss)


def test_by_hand_nothing_is_told_and_nothing_is_in_the_way():
    model = torch.nn.Linear(4, 1)
    with unicron.train.watch(model) as watching:
        trained(model, watching)
    assert watching.iteration == 1


def test_a_program_says_in_which_collectives_it_is_when_its_launcher_asks():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel.LauncherChannel(theirs)
        ours.sendall(frame(wire.Ping()) + frame(wire.Ping(collectives=True)))
        first, second = receive(ours), receive(ours)
    assert first == wire.Pong()
    assert isinstance(second.collectives, list)


def test_a_launcher_that_is_gone_harms_nobody():
    ours, theirs = socket.socketpair()
    ours.close()
    channel.LauncherChannel(theirs).send(wire.Progress(iteration=0, phase=WorkerPhase.REDUCE, done=0))
    theirs.close()


def test_a_session_says_which_way_of_healing_it_needs(monkeypatch):
    monkeypatch.setenv(channel.LAUNCHER_VARIABLE, str(os.dup(0)))
    with pytest.raises(RuntimeError, match="take `heal: restart` out of its task file"):
        Session(seed=1)


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        ("gpt-2 was ended by SIGKILL", "gpt-2 was ended by SIGKILL"),
        ("two\nlines and\0 more \ud800", "two\\nlines and\\u0000 more \\ud800"),
        ("é" * 9999, "é" * 499 + "…"),
    ],
    ids=["as it is", "escaped", "cut"],
)
def test_a_cause_is_safe_in_an_environment(monkeypatch, cause, told):
    assert wire.printable_cause(cause) == told
    monkeypatch.setenv("UNICRON_TEST_CAUSE", wire.printable_cause(cause))


RUNS = "import runpy\ndef run(path):\n    runpy.run_path(path, run_name='__main__')\n"


@pytest.mark.parametrize(
    ("script", "left"),
    [
        ("def f():\n    raise ValueError\nf()\n", ["<module>", "f"]),
        ("x = = 1\n", []),
        (None, ["run", "run_path", "get_code"]),  # it can't be read: who has tried is all that there is
    ],
)
def test_an_exception_is_printed_without_what_began_its_script(tmp_path, capfd, monkeypatch, script, left):
    path = tmp_path / "train.py"
    if script is not None:
        path.write_text(script)
    ours = {"__name__": "__main__", "__spec__": importlib.util.find_spec("unicron.train.worker.channel")}
    exec(RUNS, ours)
    monkeypatch.setattr(channel, "_channel", None)
    with pytest.raises((ValueError, SyntaxError, FileNotFoundError)) as raised:
        ours["run"](str(path))
    channel.report_exception(raised.type, raised.value, raised.tb.tb_next)  # without this function
    said = capfd.readouterr().err
    assert [word in said for word in ("runpy", "train.py")] == [script is None, True]
    names = [line.rpartition(" in ")[2] for line in said.splitlines() if line.startswith("  File ") and " in " in line]
    assert [any(each in name for name in names) for each in left] == [True] * len(left)
    assert bool(names) == bool(left)
