"""The straggler service's decisions: reports, recording, and alerts."""

import msgspec
import pytest
from helpers.straggler import FORWARD, REDUCE, records
from unicron_straggler.collect import MISSING, REGROUPED
from unicron_straggler.core import MISSED, StragglerCore
from unicron_straggler.main import StragglerSettings
from unicron_straggler.state import ENDED, HISTORY, StragglerLimits, StragglerState

from unicron.contracts.events import Alert, NodeAdmitted, TaskRemoved, TaskStateChanged, TaskSubmitted
from unicron.contracts.queries import GetStatus, GetStraggler, SwitchRecording
from unicron.contracts.slowdowns import SlowdownDetected, SlowdownEnded
from unicron.contracts.stragglers import RecordingSwitched, StragglerDetected
from unicron.contracts.tasks import Member, TaskSpec, TaskState
from unicron.contracts.timings import Op
from unicron.errors import InvalidInputError

SLOW = {"slow": 2, "factor": 1.5}
ADMITTED = NodeAdmitted(node="node-9", incarnation="a", host="h", slots=[])


def submitted(task="gpt", **fields):
    return TaskSubmitted(task=task, spec=TaskSpec(name=task, command=["x"], **fields))


def ended(task="gpt"):
    return TaskStateChanged(task=task, state=TaskState.FINISHED)


class Job:
    """A task whose iterations are fed to a core, one after the other."""

    def __init__(self, **limits):
        self.core = StragglerCore(limits=StragglerLimits(**{"window": 5, "windows": 2, **limits}))
        self.begin()
        self.iteration = 0

    def begin(self, **fields):
        self.core.handle(submitted(**fields))
        self.members = None
        self.tell()

    def tell(self, epoch=1, world_size=4, node="", **_):
        """Have the transition service tell of a membership, if it is another."""
        if self.members != (epoch, world_size, node):
            self.members = epoch, world_size, node
            there = [Member(worker=f"gpt-{rank}", node=node or f"node-{rank}", slot=0) for rank in range(world_size)]
            changed = TaskStateChanged(task="gpt", state=TaskState.RUNNING, epoch=epoch, members=there)
            assert self.core.handle(changed) == []

    def windows(self, count=1, **how):
        return self.steps(5 * count, **how)

    def steps(self, count, ranks=slice(None), **how):
        out = []
        self.tell(**how)
        for _ in range(count):
            for timed in records(self.iteration, **how)[ranks]:
                out += self.core.handle(timed)
            self.iteration += 10
        return out

    @property
    def view(self):
        return self.core.answer(GetStraggler(task="gpt"))[0].straggler


@pytest.fixture
def job():
    return Job()


def wait_for_data(ops, late_us):
    """Make each forward longer, and the reduce, in which the others wait, shorter."""
    late = 0
    for at, op in enumerate(ops):
        longer = late_us if op.kind == FORWARD else -2 * late_us if op.kind == REDUCE else 0
        took = max(op.duration_us + longer, 100)
        ops[at] = Op(kind=op.kind, microbatch=op.microbatch, start_us=op.start_us + late, duration_us=took)
        late += longer


# --- alerts ----------------------------------------------------------------------------------------------------------


def test_a_slow_worker_is_told_once_when_it_stays_slow(job):
    assert job.windows(1, **SLOW) == []
    [found] = job.windows(1, **SLOW)
    assert isinstance(found, StragglerDetected)
    assert (found.diagnosis, found.worker, found.node, found.slot) == ("slow-worker", "gpt-2", "node-2", 0)
    assert (found.first, found.last, found.steps) == (0, 90, 10)
    assert found.slowdown == pytest.approx(1.5 / 1.125, rel=0.03), "the study's ideal is the mean of all workers"
    assert found.gain == pytest.approx(1.5, rel=0.03)
    assert found.waste == pytest.approx(1 - 1 / found.slowdown)
    assert found.cure
    assert msgspec.json.decode(found.evidence)
    assert not found.drain
    assert job.windows(6, **SLOW) == []
    assert job.view.alert == "slow-worker"


def test_a_new_episode_is_told_again(job):
    assert len(job.windows(3, **SLOW)) == 1
    assert job.windows(1) == []
    assert job.view.alert == "slow-worker", "one good window is not the end of it"
    assert job.windows(1) == []
    assert job.view.alert == ""
    assert len(job.windows(2, **SLOW)) == 1


def test_another_culprit_is_told_too(job):
    first, second = [*job.windows(3, **SLOW), *job.windows(3, slow=0)]
    assert (first.worker, second.worker) == ("gpt-2", "gpt-0")


def test_who_comes_back_after_a_good_window_is_the_same_episode(job):
    assert len(job.windows(2, **SLOW)) == 1
    assert [*job.windows(1), *job.windows(4, **SLOW)] == []


def test_one_very_slow_iteration_makes_no_slow_window(job):
    for _ in range(4):
        out = [*job.steps(2), *job.steps(1, slow=1, factor=20.0), *job.steps(2)]
        assert out == []
    assert {window.slowdown > 1.1 for window in job.view.history} == {True}
    assert {window.slow for window in job.view.history} == {False}


@pytest.mark.parametrize("factor", [1.0, 1.08])
def test_what_is_hardly_slow_is_not_told(job, factor):
    assert job.windows(6, slow=1, factor=factor) == []
    assert job.view.alert == ""


def test_a_worker_that_waits_for_its_data_is_found_though_only_its_forwards_are_slow(job):
    out = []
    for iteration in range(0, 200, 10):
        for timed in records(iteration, microbatches=2):
            if timed.rank == 1:
                wait_for_data(timed.ops, 30_000)
            out += job.core.handle(timed)
    assert [(found.diagnosis, found.worker) for found in out] == [("slow-worker", "gpt-1")]


@pytest.mark.parametrize(
    ("fields", "least", "asked"),
    [
        pytest.param({}, 3, True, id="told to"),
        pytest.param({}, 4, False, id="the others are too few"),
        pytest.param({"node": "node-0"}, 1, False, id="there is no other node"),
    ],
)
def test_a_drain_is_asked_for_only_when_told_to_and_where_the_others_can_go_on(fields, least, asked):
    job = Job(drain=True)
    job.begin(min_workers=least)
    [found] = job.windows(2, **SLOW, **fields)
    assert found.drain == asked


def test_no_second_node_is_drained_before_the_task_got_well():
    job = Job(drain=True)
    first, second = [*job.windows(2, **SLOW), *job.windows(2, slow=1, epoch=2, world_size=3)]
    assert (first.drain, second.drain) == (True, False)
    job.windows(2, epoch=2, world_size=3)
    [third] = job.windows(2, slow=0, epoch=2, world_size=3)
    assert third.drain


# --- what can't be looked at -----------------------------------------------------------------------------------------


def test_iterations_with_missing_ranks_are_counted_and_a_person_is_told_once(job):
    job.steps(1, world_size=4)
    out = job.steps(MISSED * 3, ranks=slice(1, None))
    [alert] = out
    assert isinstance(alert, Alert)
    assert alert.task == "gpt"
    assert MISSING in alert.text
    assert job.view.dropped[MISSING] > MISSED
    assert job.view.history == []
    assert job.view.waiting == 1


def test_a_regroup_begins_a_new_window_and_a_new_streak(job):
    assert job.windows(1, **SLOW) == []
    job.steps(3, **SLOW)
    assert job.windows(1, **SLOW, epoch=2) == []
    assert job.view.dropped == {REGROUPED: 3}
    assert len(job.windows(1, **SLOW, epoch=2)) == 1


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"rank": 4}, "rank 4"),
        ({"world_size": 0}, "world_size 0"),
        ({"iteration": -1}, "iteration -1"),
        ({"ops": []}, "holds no operation"),
        ({"ops": [Op(kind=13, microbatch=0, start_us=0, duration_us=1)]}, "kind"),
        ({"ops": [Op(kind=0, microbatch=0, start_us=-1, duration_us=1)]}, "microseconds"),
        ({"ops": [Op(kind=0, microbatch=0, start_us=0, duration_us=10**15)]}, "microseconds"),
    ],
)
def test_records_that_make_no_sense_are_left_out_and_counted(job, fields, problem):
    bad = msgspec.structs.replace(records(0)[1], **fields)
    out = [message for _ in range(MISSED) for message in job.core.handle(bad)]
    [alert] = out
    assert problem in alert.text
    assert job.view.dropped == {"unusable record": MISSED}
    job.iteration = 10
    assert len(job.windows(2, **SLOW)) == 1


def test_records_without_any_time_are_told_as_a_problem_and_end_no_alert(job):
    assert len(job.windows(2, **SLOW)) == 1
    for iteration in range(job.iteration, job.iteration + 30):
        for timed in records(iteration):
            timed.ops[:] = [msgspec.structs.replace(op, start_us=0, duration_us=0) for op in timed.ops]
            assert job.core.handle(timed) == []
    assert job.view.history[-1].problems
    assert not job.view.history[-1].slow
    assert job.view.alert == "slow-worker"
    job.iteration += 30
    assert job.windows(2, **SLOW) == [], "the same episode"


def test_tasks_of_one_worker_and_unknown_ones_are_let_pass(job):
    assert job.steps(20, world_size=1) == []
    assert job.core.handle(records(0, task="other")[0]) == []
    assert job.view.history == []


# --- recording -------------------------------------------------------------------------------------------------------


def slowdown(kind=SlowdownDetected, world_size=4, **fields):
    told = {"epoch": 1, "iteration": 50, "usual_s": 1.0, "recent_s": 1.5, **fields}
    return kind(task="gpt", world_size=world_size, **told)


def test_a_task_that_gets_slow_is_recorded_closely_until_it_is_over(job):
    assert job.core.handle(slowdown(busy=["node-1"])) == []
    assert job.core.handle(slowdown()) == [RecordingSwitched(task="gpt", share=1.0)]
    assert job.view.share == 1.0
    assert job.core.handle(ADMITTED) == [RecordingSwitched(task="gpt", share=1.0)]
    over = slowdown(SlowdownEnded, reason="back in its band")
    assert job.core.handle(over) == [RecordingSwitched(task="gpt", share=0.1)]
    assert job.core.handle(over) == []
    assert job.core.handle(ADMITTED) == []


def test_of_many_ranks_fewer_iterations_are_recorded_and_never_fewer_than_before(job):
    assert job.core.handle(slowdown(world_size=1024)) == [RecordingSwitched(task="gpt", share=0.25)]
    assert job.core.handle(slowdown(world_size=16384)) == [RecordingSwitched(task="gpt", share=0.1)]


def test_what_a_user_has_switched_off_stays_off_and_an_order_comes_before_a_slowdown(job):
    job.core.answer(SwitchRecording(task="gpt", share=0.0))
    assert job.core.handle(slowdown()) == []
    job.core.answer(SwitchRecording(task="gpt", share=0.5))
    assert job.core.handle(slowdown()) == [RecordingSwitched(task="gpt", share=1.0)]
    job.core.answer(SwitchRecording(task="gpt", share=0.2))
    assert job.view.share == 0.2
    assert job.core.handle(slowdown(SlowdownEnded, reason="back in its band")) == []


def test_recording_is_switched_and_said_again_to_nodes_that_come(job):
    assert job.view.share == 0.1
    assert job.core.handle(ADMITTED) == []
    reply, facts = job.core.answer(SwitchRecording(task="gpt", share=0.5))
    assert "0.5" in reply.text
    assert facts == [RecordingSwitched(task="gpt", share=0.5)]
    assert job.view.share == 0.5
    assert job.core.handle(ADMITTED) == facts
    _, facts = job.core.answer(SwitchRecording(task="gpt", share=0.1))
    assert job.core.handle(ADMITTED) == facts, "a worker may still know of the old share"
    job.core.handle(ended())
    assert job.core.handle(ADMITTED) == []


@pytest.mark.parametrize(
    ("query", "error"),
    [
        (SwitchRecording(task="gpt", share=1.01), "share 1.01"),
        (SwitchRecording(task="gpt", share=float("nan")), "share nan"),
        (SwitchRecording(task="bert", share=0.1), "no task 'bert'; the known ones are gpt"),
        (GetStraggler(task="bert"), "no task 'bert'"),
        (GetStatus(), "does not answer GetStatus"),
    ],
)
def test_what_can_t_be_done_is_refused_and_changes_nothing(job, query, error):
    before = msgspec.msgpack.encode(job.core.state)
    reply, facts = job.core.answer(query)
    assert error in reply.error
    assert facts == []
    assert msgspec.msgpack.encode(job.core.state) == before


def test_the_end_of_a_task_keeps_its_history_and_a_new_one_of_its_name_begins_anew(job):
    job.windows(2, **SLOW)
    job.core.handle(ended())
    assert len(job.view.history) == 2
    assert job.view.alert == ""
    assert job.windows(2, **SLOW) == []
    assert "has ended" in job.core.answer(SwitchRecording(task="gpt", share=1.0))[0].error
    job.begin()
    assert job.view.history == []
    job.core.handle(TaskRemoved(task="gpt"))
    assert "no task" in job.core.answer(GetStraggler(task="gpt"))[0].error


def test_the_state_has_its_bounds_and_survives_a_restart(job):
    job.windows(HISTORY + 5, **SLOW)
    assert len(job.view.history) == HISTORY
    data = msgspec.msgpack.encode(job.core.state)
    assert len(data) < 30_000
    again = StragglerCore(msgspec.msgpack.decode(data, type=StragglerState), StragglerLimits(window=5))
    assert again.answer(GetStraggler(task="gpt"))[0].straggler == msgspec.structs.replace(job.view, waiting=0)
    job.core = again
    assert job.windows(3, **SLOW) == [], "told before the restart"
    for number in range(ENDED + 5):
        again.handle(submitted(f"t{number}"))
        again.handle(ended(f"t{number}"))
    assert len(again.state.tasks) == ENDED + 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("straggler_window", 0), ("straggler_windows", 0), ("straggler_threshold", 0.9), ("straggler_threshold", "nan")],
)
def test_settings_that_make_no_sense_are_refused(name, value):
    with pytest.raises(InvalidInputError, match=f"UNICRON_{name.upper()}"):
        StragglerSettings.load([f"--{name.replace('_', '-')}", str(value)], {})
