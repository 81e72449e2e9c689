"""Several ranks fail by one: the others are told as its echoes, and are not held against their nodes."""

import pytest
from helpers.detector import brief, scene_of

CUDA = {"exception": "RuntimeError", "text": "CUDA error: unspecified launch failure"}
RESET = {"exception": "ConnectionResetError", "text": "[Errno 104] Connection reset by peer"}
TIMEOUT = ("[Rank 1] Watchdog caught collective operation timeout", "Fatal Python error: Aborted")


@pytest.fixture
def harness():
    return scene_of("n1", "n2", "n3", **{"gpt-1": "n1", "gpt-2": "n2", "gpt-3": "n3"})


def restarts(harness, node):
    return len(harness.detector.state.tasks["gpt"].ladder.restarts.get(node, []))


def test_what_follows_from_a_failure_names_it(harness):
    [first] = harness.throw("gpt-1", **CUDA)
    assert "echo" not in first.reason
    echo = "; echo of gpt-1 on n1: cuda_error: RuntimeError: CUDA error: unspecified launch failure"
    harness.restart()
    [second] = harness.throw("gpt-2", **RESET)
    assert brief([second]) == [(2, "connection_reset", "gpt-2")]
    assert second.reason == f"ConnectionResetError: {RESET['text']}{echo}"
    [third] = harness.exit("gpt-3", signal=6, stderr=TIMEOUT)
    assert third.reason.endswith(echo)
    assert brief([third]) == [(2, "exited_abnormally", "gpt-3")]
    assert [restarts(harness, node) for node in ("n1", "n2", "n3")] == [1, 0, 0]


def test_what_fails_by_itself_is_no_echo(harness):
    harness.throw("gpt-1", **CUDA)
    for [failure] in (harness.exit("gpt-2", signal=9), harness.exit("gpt-3", signal=11)):
        assert "echo" not in failure.reason
    assert [restarts(harness, node) for node in ("n1", "n2", "n3")] == [1, 1, 1]


def test_without_a_cause_it_counts_as_ever(harness):
    [first], [second] = harness.throw("gpt-2", **RESET), harness.throw("gpt-3", **RESET)
    assert "echo" not in first.reason + second.reason, "one echo is not the cause of another"
    assert restarts(harness, "n2") == restarts(harness, "n3") == 1


def test_a_cause_is_one_for_a_few_seconds(harness):
    harness.throw("gpt-1", **CUDA)
    harness.wait(7)
    [failure] = harness.throw("gpt-2", **RESET)
    assert "echo" not in failure.reason
    assert restarts(harness, "n2") == 1


def test_the_first_cause_counts(harness):
    harness.exit("gpt-1", signal=9)
    harness.exit("gpt-2", signal=9)
    [failure] = harness.throw("gpt-3", **RESET)
    assert failure.reason.endswith("echo of gpt-1 on n1: exited_abnormally: gpt-1 was ended by SIGKILL")


def test_a_lost_node_is_a_cause_for_the_tasks_that_it_breaks(harness):
    harness.run(task="other", **{"other-1": "n3"})
    harness.silence("n1")
    assert brief(harness.wait(4)) == [(1, "lost_connection", "n1")]
    [failure] = harness.throw("gpt-2", **RESET)
    assert "; echo of n1: lost_connection" in failure.reason
    [failure] = harness.throw("other-1", **RESET)
    assert "echo" not in failure.reason


def test_echoes_never_give_a_node_up(harness):
    for number in range(10, 20):
        culprit, victim = f"gpt-{number}", f"gpt-{number + 20}"
        harness.join(f"m{number}")
        harness.run(epoch=number, **{culprit: f"m{number}", victim: "n2"})
        harness.wait(6)
        harness.exit(culprit, signal=9)
        assert brief(harness.throw(victim, **RESET)) == [(2, "connection_reset", victim)]
    assert restarts(harness, "n2") == 0
