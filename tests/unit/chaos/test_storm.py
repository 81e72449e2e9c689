import pytest
from unicron_chaos.script import Rank
from unicron_chaos.storm import AWAY_FAULTS, WORKER_FAULTS, Choice, Storm

from unicron.contracts.faults import FAULTS, NODE, WORKER
from unicron.contracts.queries import NodeView, Status, TaskView
from unicron.contracts.tasks import Member, NodeState, TaskSpec, TaskState

NODE_FAULTS = {"kill-node", "restart-node", *AWAY_FAULTS}
MEMBERS = [Member(worker=f"w{number}", node="node-1", slot=number) for number in range(3)]


def cluster(iteration=5, state=TaskState.RUNNING, members=MEMBERS, nodes=("node-1", "node-2"), since=1.0):
    view = TaskView(spec=TaskSpec(name="gpt", command=["x"]), state=state, members=members, iteration=iteration)
    return Status(nodes=[NodeView(node=node, state=NodeState.UP, since=since) for node in nodes], tasks=[view])


def choices(storm, status, count=300):
    return [storm.choose(status) for _ in range(count)]


def test_the_same_seed_gives_the_same_storm():
    one, two, other = Storm(7, nodes=True), Storm(7, nodes=True), Storm(8, nodes=True)
    first = choices(one, cluster())
    assert first == choices(two, cluster())
    assert first != choices(other, cluster())
    assert one.wait_s(10) == two.wait_s(10)


def test_every_fault_comes_up():
    found = choices(Storm(1, nodes=True), cluster())
    assert {choice.fault for choice in found} == {*WORKER_FAULTS, *AWAY_FAULTS, "kill-node"}
    kinds = {name: FAULTS[name] for name in {choice.fault for choice in found}}
    assert not [name for name, kind in kinds.items() if kind.value and kind.value.default is None]
    for choice in found:
        assert (WORKER if isinstance(choice.target, Rank) else NODE) in kinds[choice.fault].strikes
    ranks = {Rank(task="gpt", rank=rank) for rank in range(3)}
    assert {choice.target for choice in found if choice.fault == "raise"} == ranks


def test_one_node_at_a_time_and_it_comes_back():
    storm = Storm(1, nodes=True)
    storm.struck(Choice("kill-node", "node-2"), cluster())
    found = {choice for choice in choices(storm, cluster()) if choice.fault in NODE_FAULTS}
    assert found == {Choice("restart-node", "node-2")}
    storm.struck(Choice("restart-node", "node-2"), cluster())
    assert "kill-node" in {choice.fault for choice in choices(storm, cluster())}


def test_a_node_that_is_away_is_waited_for_before_another_is_struck():
    for fault in AWAY_FAULTS:
        storm = Storm(1, nodes=True)
        storm.struck(Choice(fault, "node-2"), cluster(since=1.0))
        assert not {choice.fault for choice in choices(storm, cluster(since=1.0))} & NODE_FAULTS, "not given up yet"
        back = cluster(since=9.0)
        assert NODE_FAULTS & {choice.fault for choice in choices(storm, back)}


def test_nodes_are_spared_where_nobody_can_bring_them_back_or_none_would_be_left():
    for storm, status in ((Storm(1, nodes=False), cluster()), (Storm(1, nodes=True), cluster(nodes=["node-1"]))):
        assert not {choice.fault for choice in choices(storm, status)} & NODE_FAULTS


@pytest.mark.parametrize("fault", ["raise", "exit-worker"])
def test_no_second_exception_and_no_second_exit_in_an_iteration(fault):
    storm = Storm(1, nodes=False)
    storm.struck(Choice(fault, Rank(task="gpt", rank=0)), cluster(iteration=5))
    assert not {"raise", "exit-worker"} & {choice.fault for choice in choices(storm, cluster(iteration=6))}
    assert {choice.fault for choice in choices(storm, cluster(iteration=7))} >= {"raise", "exit-worker"}


@pytest.mark.parametrize(("fault", "spared"), [("kill-worker", "node-1"), ("reset-connection", "")])
def test_no_task_suffers_more_than_it_is_healed_of(fault, spared):
    now = 0.0
    storm, members = Storm(1, nodes=False, clock=lambda: now), [*MEMBERS[:2], Member(worker="w", node="node-2", slot=0)]
    status = cluster(members=members)
    for _ in range(3):
        assert fault in {choice.fault for choice in choices(storm, status)}
        storm.struck(Choice(fault, Rank(task="gpt", rank=0)), status)
    found = {(choice.fault, members[choice.target.rank].node) for choice in choices(storm, status)}
    others = {each for each in WORKER_FAULTS if each != "reset-connection"}
    if spared:
        assert {kind for kind, node in found if node == spared} == {"reset-connection"}
        assert {kind for kind, node in found if node == "node-2"} == set(WORKER_FAULTS)
    else:
        assert {kind for kind, _ in found} == others
    now = 601.0
    assert {choice.fault for choice in choices(storm, status)} == set(WORKER_FAULTS)


def test_tasks_that_heal_or_are_alone_are_spared():
    storm = Storm(1, nodes=False)
    assert storm.choose(cluster(state=TaskState.RECOVERING)) is None
    assert storm.choose(cluster(members=MEMBERS[:1])) is None
