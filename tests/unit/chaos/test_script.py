"""Scripts of faults, what may stand in them, and what a storm chooses."""

from pathlib import Path

import pytest
from unicron_chaos.injection import find_member
from unicron_chaos.script import RankTarget, ScriptedFault, load, parse, parse_target
from unicron_chaos.storm import AWAY_FAULTS, WORKER_FAULTS, Choice, Storm

from unicron.contracts.answers import NodeView, Status, TaskView
from unicron.contracts.faults import FAULTS, LOGGED, NODE, WORKER
from unicron.contracts.tasks import Member, NodeState, TaskSpec, TaskState
from unicron.errors import InvalidInputError

HERE = Path("/jobs/faults.yaml")
GOOD = """\
# a comment
- at: {task: gpt, iteration: 3}
  fault: kill-worker
  target: {task: bert, rank: 1}
- at: {task: gpt, iteration: 0}
  fault: restart-node
  target: {node: node-3}
"""


def error_of(text):
    with pytest.raises(InvalidInputError) as caught:
        parse(text, HERE)
    return str(caught.value)


def test_faults_come_in_the_order_of_the_script():
    assert parse(GOOD, HERE) == [
        ScriptedFault(task="gpt", iteration=3, fault="kill-worker", target=RankTarget(task="bert", rank=1)),
        ScriptedFault(task="gpt", iteration=0, fault="restart-node", target="node-3"),
    ]


def test_the_script_for_containers_has_what_nodes_do_without_a_kernels_log_and_nobody_must_do_from_outside():
    assert {fault.fault for fault in load(Path("chaos/containers.yaml"))} == set(FAULTS) - {"restart-node"} - LOGGED


def test_the_scripts_that_come_with_it_can_be_read_and_have_every_fault():
    found = [fault for path in Path("chaos").glob("*.yaml") for fault in load(path)]
    assert {fault.fault for fault in found} == set(FAULTS)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("kill-worker", "kil-worker", ":2: fault 1: fault 'kil-worker': did you mean 'kill-worker'?"),
        ("kill-worker", "flood", "fault 'flood': must be one of raise, kill-worker"),
        ("kill-worker", "kill-node", "target.task 'bert': no such field here; it has node"),
        ("restart-node", "raise", ":5: fault 2: target.node 'node-3': no such field here; it has task and rank"),
        ("iteration: 3", "iteration: -3", "at.iteration -3: must be a whole number from 0"),
        ("iteration: 3", "iteration: soon", "at.iteration 'soon'"),
        ("iteration: 3", "step: 3", "at.step 3: no such field here; it has task and iteration"),
        (", iteration: 3", "", "at.iteration: is required"),
        ("rank: 1", "rank: yes", "target.rank True"),
        ("node: node-3", "node: a.b", "target.node 'a.b': use 1 to 64"),
        ("task: bert", "task: 7", "target.task 7: use 1 to 64"),
        ("  fault: kill-worker\n", "", "fault 1: fault: is required"),
        ("{task: gpt, iteration: 3}", "now", "at 'now': must be a mapping with task and iteration"),
        ("- at: {task: gpt, iteration: 3}", "- at: {task: gpt, iteration: 3", "not valid YAML"),
        (
            "kill-worker",
            "kill-worker\n  value: 3",
            "value 3: kill-worker takes no value, and '3' was given; leave it out",
        ),
        ("kill-worker", "slow-worker", "value: slow-worker needs a FACTOR: a number from 1 to 1000"),
        ("kill-worker", "slow-worker\n  value: 0.5", "FACTOR must be a number from 1 to 1000"),
        ("kill-worker", "slow-worker\n  value: .nan", "FACTOR must be a number from 1 to 1000"),
        ("kill-worker", "exit-worker\n  value: yes", "value True: must be a number or a word"),
        ("kill-worker", "exit-worker\n  value: [1]", "must be a number or a word"),
        ("kill-worker", "exit-worker\n  value: 256", "CODE must be a whole number from 0 to 255"),
        ("kill-worker", "raise\n  value: cuda-omm", "TYPE must be one of cuda-illegal-access, "),
        ("restart-node", "xid", "value: xid needs a CODE: a whole number from 1 to 999"),
        ("restart-node", "cut-node\n  value: 0", "SECONDS must be a number from 0.1 to 600"),
    ],
)
def test_an_error_names_the_line_the_fault_the_field_and_what_is_allowed(old, new, says):
    message = error_of(GOOD.replace(old, new, 1))
    assert message.startswith(str(HERE))
    assert says in message


@pytest.mark.parametrize("text", ["", "{}", "[]", "at: now", "- 3", "- [at]"])
def test_no_list_of_faults(text):
    assert "at, fault and target" in error_of(text)


def test_values_are_taken_as_they_are_written_or_have_their_default():
    lines = {"exit-worker, value: 3": "3", "exit-worker": "1", "raise": "", "raise, value: cuda-oom": "cuda-oom"}
    lines |= {"slow-worker, value: 2.5": "2.5", "ecc, value: '94'": "94"}
    where = "at: {task: gpt, iteration: 3}, target: {task: gpt, rank: 1}"
    text = "\n".join(f"- {{{where}, fault: {line}}}" for line in lines)
    assert [fault.value for fault in parse(text, HERE)] == list(lines.values())


def test_what_strikes_either_takes_either():
    text = "- {at: {task: gpt, iteration: 3}, fault: ecc, target: {TARGET}}"
    [worker] = parse(text.replace("TARGET", "task: gpt, rank: 1"), HERE)
    [node] = parse(text.replace("TARGET", "node: node-1"), HERE)
    assert (worker.target, node.target) == (RankTarget(task="gpt", rank=1), "node-1")
    assert "target.task: is required" in error_of(text.replace("TARGET", "rank: 1"))


def test_an_unreadable_script_says_which(tmp_path):
    with pytest.raises(InvalidInputError, match=r"no\.yaml"):
        load(tmp_path / "no.yaml")


def test_targets_of_a_person():
    assert parse_target("gpt:12") == RankTarget(task="gpt", rank=12)
    assert parse_target("node-3") == "node-3"
    for wrong in ("gpt:", "gpt:-1", "gpt:x", ":1", "", "a b"):
        with pytest.raises(InvalidInputError, match="expected TASK:RANK" if "gpt:" in wrong else "use 1 to 64"):
            parse_target(wrong)


def test_a_rank_is_found_in_the_membership_of_now():
    members = [Member(worker="w1", node="node-1", slot=0), Member(worker="w2", node="node-2", slot=1)]
    spec = TaskSpec(name="gpt", command=["x"])
    status = Status(tasks=[TaskView(spec=spec, state=TaskState.RUNNING, members=members)])
    assert find_member(status, RankTarget(task="gpt", rank=1)) == members[1]
    with pytest.raises(InvalidInputError, match=r"no rank 2 .* running; it has ranks 0 to 1"):
        find_member(status, RankTarget(task="gpt", rank=2))
    with pytest.raises(InvalidInputError, match="no task 'bert'; the known ones are gpt"):
        find_member(status, RankTarget(task="bert", rank=0))


# --- storms -----------------------------------------------------------------------------------------------------------


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
        assert (WORKER if isinstance(choice.target, RankTarget) else NODE) in kinds[choice.fault].targets
    ranks = {RankTarget(task="gpt", rank=rank) for rank in range(3)}
    assert {choice.target for choice in found if choice.fault == "raise"} == ranks


def test_one_node_at_a_time_and_it_comes_back():
    storm = Storm(1, nodes=True)
    storm.record_hit(Choice("kill-node", "node-2"), cluster())
    found = {choice for choice in choices(storm, cluster()) if choice.fault in NODE_FAULTS}
    assert found == {Choice("restart-node", "node-2")}
    storm.record_hit(Choice("restart-node", "node-2"), cluster())
    assert "kill-node" in {choice.fault for choice in choices(storm, cluster())}


def test_a_node_that_is_away_is_waited_for_before_another_is_struck():
    for fault in AWAY_FAULTS:
        storm = Storm(1, nodes=True)
        storm.record_hit(Choice(fault, "node-2"), cluster(since=1.0))
        assert not {choice.fault for choice in choices(storm, cluster(since=1.0))} & NODE_FAULTS, "not given up yet"
        back = cluster(since=9.0)
        assert NODE_FAULTS & {choice.fault for choice in choices(storm, back)}


def test_nodes_are_spared_where_nobody_can_bring_them_back_or_none_would_be_left():
    for storm, status in ((Storm(1, nodes=False), cluster()), (Storm(1, nodes=True), cluster(nodes=["node-1"]))):
        assert not {choice.fault for choice in choices(storm, status)} & NODE_FAULTS


@pytest.mark.parametrize("fault", ["raise", "exit-worker"])
def test_no_second_exception_and_no_second_exit_in_an_iteration(fault):
    storm = Storm(1, nodes=False)
    storm.record_hit(Choice(fault, RankTarget(task="gpt", rank=0)), cluster(iteration=5))
    assert not {"raise", "exit-worker"} & {choice.fault for choice in choices(storm, cluster(iteration=6))}
    assert {choice.fault for choice in choices(storm, cluster(iteration=7))} >= {"raise", "exit-worker"}


@pytest.mark.parametrize(("fault", "spared"), [("kill-worker", "node-1"), ("reset-connection", "")])
def test_no_task_suffers_more_than_it_is_healed_of(fault, spared):
    now = 0.0
    storm, members = Storm(1, nodes=False, clock=lambda: now), [*MEMBERS[:2], Member(worker="w", node="node-2", slot=0)]
    status = cluster(members=members)
    for _ in range(3):
        assert fault in {choice.fault for choice in choices(storm, status)}
        storm.record_hit(Choice(fault, RankTarget(task="gpt", rank=0)), status)
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
