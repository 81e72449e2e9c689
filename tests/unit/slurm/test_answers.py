"""However many jobs look, Slurm is asked as by one, and nobody goes on with what is old."""

import fcntl

import pytest
from unicron_deploy.slurm import answers
from unicron_deploy.slurm.answers import LOOK_S, Answers

from unicron.slurm import tools


class Controller:
    """A Slurm with a clock, and how often each command was called."""

    def __init__(self, monkeypatch):
        self.now, self.calls, self.away = 1000.0, [], False
        monkeypatch.setattr(answers.time, "time", lambda: self.now)
        monkeypatch.setattr(tools, "ask", self._ask)

    def _ask(self, tool, *_):
        self.calls.append(tool)
        if self.away:
            raise tools.UnreachableError("squeue: no")
        return {"squeue": f"7|RUNNING|{int(self.now) + 60}|n1|t|", "sinfo": "n1|idle|none"}[tool]


@pytest.fixture
def controller(monkeypatch):
    return Controller(monkeypatch)


def test_many_jobs_ask_as_one(controller, tmp_path):
    jobs = [Answers(tmp_path, "c") for _ in range(50)]
    for _ in range(10):
        for each in jobs:
            assert each.look().nodes["n1"].state == "idle"
            controller.now += LOOK_S / len(jobs)
    assert 10 <= controller.calls.count("squeue") == controller.calls.count("sinfo") <= 15
    assert [path.suffix for path in sorted(tmp_path.iterdir())] == [".answer", ".lock"]


def test_a_job_alone_asks_each_time_and_another_cluster_for_itself(controller, tmp_path):
    one, other = Answers(tmp_path, "c"), Answers(tmp_path, "d")
    for _ in range(3):
        for each in (one, other):
            assert each.look().jobs["7"].end == int(controller.now) + 60
        controller.now += LOOK_S
    assert controller.calls.count("squeue") == 6


@pytest.mark.parametrize("text", ["", "{", '{"at": "x"}'])
def test_an_answer_that_can_not_be_read_is_asked_for(controller, tmp_path, text):
    (tmp_path / "queue-c.answer").write_text(text)
    assert Answers(tmp_path, "c").look().nodes
    assert len(controller.calls) == 2


def test_who_waits_for_anothers_question_goes_on_with_the_last_answer_but_not_for_ever(controller, tmp_path):
    Answers(tmp_path, "c").look()
    with (tmp_path / "queue-c.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        controller.now += LOOK_S
        Answers(tmp_path, "c").look()
        assert len(controller.calls) == 2
        controller.now += answers.ASKED_S
        Answers(tmp_path, "c").look()
        assert len(controller.calls) == 4


def test_a_controller_that_is_away_is_asked_less_often(controller, tmp_path):
    controller.away = True
    one = Answers(tmp_path, "c")
    for expected in (20.0, 40.0):
        with pytest.raises(tools.UnreachableError):
            one.look()
        assert one.pause_s == expected
    controller.away = False
    one.look()
    assert one.pause_s == LOOK_S
