"""Workers are named by TASK:RANK, whatever says so, with their processes in brackets."""

from hypothesis import given
from hypothesis import strategies as st

from unicron.contracts.answers import TaskView
from unicron.contracts.commands import Regroup
from unicron.contracts.events import Regrouped, TaskStateChanged, TaskSubmitted
from unicron.contracts.tasks import Member, TaskSpec, TaskState
from unicron.observe.words.ranks import RankNames


def members(*numbers):
    return [Member(worker=f"gpt-{number}", node="node-1", slot=number) for number in numbers]


def grouped(epoch, **ranks):
    there = members(*(int(name[1:]) for name in ranks))
    return Regroup(
        node="node-1", task="gpt", epoch=epoch, rendezvous="", members=there, ranks=list(ranks.values()), world_size=2
    )


def knowing(*messages):
    names = RankNames()
    for message in messages:
        names.observe(message)
    return names


def test_ranks_are_those_of_the_newest_membership_and_of_those_who_are_gone_the_last():
    first, second = grouped(1, w1=0, w2=1), grouped(2, w3=1, w1=0)
    names = knowing(first)
    assert names.explain(str(first)).endswith("form membership 1 of gpt, 2 workers, here gpt:0 (gpt-1), gpt:1 (gpt-2)")
    assert names.explain("gpt-2 on node-1:1 ended; start gpt-3") == "gpt:1 (gpt-2) on node-1:1 ended; start gpt-3"
    names.observe(second)
    assert [names.rank(f"gpt-{number}") for number in (1, 2, 3, 4)] == ["gpt:0", "gpt:1", "gpt:1", "gpt-4"]
    assert (names.worker("gpt:1"), names.worker("gpt:2")) == ("gpt-3", None)
    names.observe(TaskStateChanged(task="gpt", state=TaskState.RUNNING, members=members(3, 1)))
    assert names.rank("gpt-3") == "gpt:0"
    view = TaskView(spec=TaskSpec(name="gpt", command=["x"]), state=TaskState.RUNNING, members=members(7))
    assert RankNames.of([view]).explain("gpt-7: x") == "gpt:0 (gpt-7): x"


def test_who_is_left_keeps_its_rank_until_it_computes_as_another():
    """What it says meanwhile, or dies of, is not what the lost one said."""
    names = knowing(grouped(1, w1=0, w2=1))
    names.observe(grouped(2, w2=0))
    names.observe(TaskStateChanged(task="gpt", state=TaskState.RECOVERING, members=members(2)))
    assert names.rank("gpt-2") == "gpt:1"
    computes = Regrouped(task="gpt", node="node-1", slot=2, worker="gpt-2", epoch=2, rank=0, world_size=1, iteration=3)
    running = TaskStateChanged(task="gpt", state=TaskState.RUNNING, members=members(2))
    for now in (computes, running):
        after = knowing(grouped(1, w1=0, w2=1), now)
        assert after.explain(str(now)).startswith("gpt:0 (gpt-2) is rank 0" if now is computes else "gpt is running")
        assert after.rank("gpt-2") == "gpt:0"
    names.forget(knowing(grouped(1, w1=0)))
    assert names.explain("gpt-1 and gpt-2") == "gpt-1 and gpt:1 (gpt-2)"


def test_what_is_no_worker_stays_as_it_is():
    names = knowing(grouped(1, w1=0, w2=1))
    for text in ('it wrote "gpt-2 loaded"', "see gpt-2.log", "a/gpt-2", "gpt-2:1", "on gpt-2", "my-gpt-2", "gpt-22"):
        assert names.explain(text) == text
    names.observe(TaskSubmitted(task="gpt-2", spec=TaskSpec(name="gpt-2", command=["x"])))
    assert names.explain("gpt-2 is waiting") == "gpt-2 is waiting", "it may be the task"


WORDS = st.sampled_from(["gpt-1", "gpt-2", '"gpt-2"', '"', "gpt-9", "(", ")", ":", ".", ",", "on", "gpt", "x", ";"])


@given(st.lists(WORDS).flatmap(lambda words: st.sampled_from([" ".join(words), "".join(words)])))
def test_who_is_named_so_already_is_not_again_and_nothing_else_changes(text):
    names = knowing(grouped(1, w1=0, w2=1))
    once = names.explain(text)
    assert names.explain(once) == once
    assert once.replace("gpt:0 (gpt-1)", "gpt-1").replace("gpt:1 (gpt-2)", "gpt-2") == text
