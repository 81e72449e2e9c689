"""The end of a run, not before the processes that are through their loops have ended or are lost; who was replaced."""

from types import SimpleNamespace

import pytest
from unicron_cli.meeting import Nodes
from unicron_cli.ranks import Ending, Ranks, Replacements
from unicron_cli.run import Program, Run

from unicron.contracts.events import (
    FailureDetected,
    ScriptDrilled,
    TaskRecovered,
    TaskStateChanged,
    WorkerExited,
    WorkerFinished,
)
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity
from unicron.contracts.tasks import Member, TaskSpec, TaskState

PLACE = {"task": "t", "slot": 0}
LOST = {
    "severity": Severity.SEV1,
    "method": DetectionMethod.NODE_HEALTH,
    "status": FailureStatus.LOST_CONNECTION,
    "reason": "no heartbeat",
}


def over_after(*messages):
    """Return whether a run is over after each message."""
    ending = Ending("t")
    return [(ending.observe(message), ending.over)[1] for message in messages]


def finished(worker, node):
    return WorkerFinished(node=node, worker=worker, iterations=3, **PLACE)


def exited(worker, node):
    return WorkerExited(node=node, worker=worker, exit_code=0, **PLACE)


ENDED = TaskStateChanged(task="t", state=TaskState.FINISHED)


def test_a_run_is_over_when_all_processes_behind_their_loops_have_ended():
    messages = [finished("t-1", "n1"), finished("t-2", "n2"), ENDED, exited("t-2", "n2"), exited("t-1", "n1")]
    assert over_after(*messages) == [False, False, False, False, True]


def test_a_process_behind_its_loop_is_not_waited_for_once_its_node_is_lost():
    assert over_after(finished("t-1", "n1"), ENDED, FailureDetected(node="n1", **LOST)) == [False, False, True]
    elsewhere = FailureDetected(node="n2", **LOST)
    assert over_after(finished("t-1", "n1"), ENDED, elsewhere) == [False, False, False]


def test_a_task_that_goes_on_is_not_over():
    again = TaskStateChanged(task="t", state=TaskState.RUNNING)
    assert over_after(ENDED, again, ENDED) == [True, False, True]
    assert over_after(TaskStateChanged(task="other", state=TaskState.FINISHED)) == [False]


def running(*workers):
    members = [Member(worker=each, node="n1", slot=0, state_server="") for each in workers]
    return TaskStateChanged(task="t", state=TaskState.RUNNING, members=members)


FAILED = FailureDetected(node="n1", **LOST)
RECOVERED = TaskRecovered(task="t", epoch=1, workers=2, seconds=0.2)
ANEW = TaskStateChanged(task="t", state=TaskState.RECOVERING)
SHRUNK = [running("t-1"), running("t-1", "t-3"), RECOVERED]
UNPROVEN = "unproven, the script ended before its drill"
AFTER = "0.20 s after the failure was detected: "


@pytest.mark.parametrize(
    ("messages", "told", "outcome"),
    [
        (
            [running("t-1", "t-2"), FAILED, *SHRUNK],
            f"{AFTER}1 new, 1 went on",
            "1 lost rank was replaced while others went on; no drill was made",
        ),
        (
            [running("t-1", "t-2"), FAILED, running("t-3", "t-4"), RECOVERED],
            f"{AFTER}all ranks began again",
            f"{UNPROVEN}; in this run all ranks began again",
        ),
        ([FAILED, *SHRUNK], f"{AFTER}all ranks began again", f"{UNPROVEN}; in this run all ranks began again"),
        (
            [running("t-1", "t-2"), FAILED, FAILED, *SHRUNK, RECOVERED],
            "",
            "1 lost rank was replaced while others went on; no drill was made",
        ),
        ([running("t-1", "t-2"), RECOVERED], "", UNPROVEN),
        (
            [running("t-1", "t-2"), ANEW, running("t-3", "t-4"), RECOVERED],
            "0.20 s after they stopped: all ranks began again",
            f"{UNPROVEN}; in this run all ranks began again",
        ),
    ],
)
def test_who_went_on_is_told_once_for_each_failure(messages, told, outcome):
    again = Replacements("t", runs_again=True)
    assert [again.observe(message) for message in messages][-1].endswith(("all ranks began again", "")[not told])
    healing = Replacements("t")
    assert [healing.observe(message) for message in messages][-1] == told
    assert healing.outcome("") == outcome
    came = outcome.removeprefix(UNPROVEN).removeprefix("; in this run ").removesuffix("; no drill was made")
    assert healing.outcome("proven") == "; in this run ".join(["proven", came] if came else ["proven"])


def test_of_a_progress_bar_its_last_state_is_shown(tmp_path, capsys):
    ranks = Ranks(tmp_path, "t-*.log")
    bar = "\r  0%|   | 0/2\r 50%|#  | 1/2\r100%|###| 2/2"
    (tmp_path / "t-1.log").write_bytes(f"begin\r\n\n{bar}\nloss 1\n{bar}".encode())
    ranks.write()
    assert capsys.readouterr().out == "t-1: begin\nt-1: \nt-1: 100%|###| 2/2\nt-1: loss 1\n"
    ranks.write()
    assert capsys.readouterr().out == "", "it has no end yet"


@pytest.mark.parametrize(("since", "told"), [(-1, 2), (0, 2), (4, 1), (7, 0)])
async def test_what_an_earlier_job_has_told_is_not_told_again(tmp_path, since, told):
    first = [running("t-1", "t-2"), FAILED, running("t-1", "t-3"), RECOVERED]
    journal = [*first, FAILED, running("t-1", "t-4"), RECOVERED]

    class Journal:
        async def follow(self):
            for position, message in enumerate(journal, 1):
                yield position, message

    said = []
    run = Run(TaskSpec(name="t", command=["x"]), Nodes(1, 1), 2)
    program = Program(SimpleNamespace(root=tmp_path), run, said.append)
    await program._follow(Journal(), since)
    assert sum("1 new, 1 went on" in line for line in said) == told
    assert program.replacements.outcome("").startswith("2 lost ranks"), "all of it counts"


async def test_what_a_drill_has_shown_is_told_once_however_often_it_is_made(tmp_path):
    where = {"node": "node-1", "slot": 0, "task": "t", "worker": "t-2", "iteration": 2, "rank": 1}
    drills = [ScriptDrilled(**where, unproven=why) for why in ("no room", "no room", "", "no room", "too slow")]
    drills += [ScriptDrilled(**where, problem="a lock"), ScriptDrilled(**{**where, "rank": 0}, problem="a lock")]
    drills += [ScriptDrilled(**where)]  # from then on healing is off

    class Journal:
        async def follow(self):
            for position, message in enumerate(drills, 1):
                yield position, message

    said = []
    program = Program(
        SimpleNamespace(root=tmp_path), Run(TaskSpec(name="t", command=["x"]), Nodes(1, 1), 2), said.append
    )
    await program._follow(Journal(), 0)
    assert said == [f"unicron: in place: {drills[number].outcome}" for number in (0, 2, 4, 5)]
    assert program.drilled is drills[5], "as it was printed"


async def test_what_a_rank_wrote_before_a_failure_is_shown_before_it(tmp_path, capsys):
    (tmp_path / "nodes/node-1/logs").mkdir(parents=True)

    class Journal:
        async def follow(self):
            (tmp_path / "nodes/node-1/logs/t-1.log").write_text("its last words\n")
            yield 1, FAILED

    program = Program(SimpleNamespace(root=tmp_path), Run(TaskSpec(name="t", command=["x"]), Nodes(1, 1), 2), print)
    await program._follow(Journal(), 0)
    first, second = capsys.readouterr().out.splitlines()
    assert "its last words" in first
    assert second.startswith("unicron: sev1")
