"""What is given to sbatch and srun, what a job is by its environment, and who follows whom in draining nodes."""

from contextlib import nullcontext

import pytest
from helpers import ROOT
from msgspec.structs import replace
from unicron_cli.slurm import check_script, within
from unicron_deploy.nats_server import QUIET_PORTS
from unicron_deploy.slurm import prolog
from unicron_deploy.slurm.allocation import Allocation, counts, node_names
from unicron_deploy.slurm.drains import REASON, DrainHere, Drains, DrainThere
from unicron_deploy.slurm.job import Job, srun, step_environment
from unicron_deploy.slurm.machine import Machine, tasks_in
from unicron_deploy.slurm.outcome import GIVEN_UP, UNFINISHED, Outcome
from unicron_deploy.slurm.script import batch_script, checked

from unicron.contracts.answers import TaskView
from unicron.contracts.tasks import TaskSpec, TaskState
from unicron.errors import InvalidInputError
from unicron.slurm import tools
from unicron.slurm.shown import NodeShown

ENVIRON = {
    "SLURM_JOB_ID": "12",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_JOB_CPUS_PER_NODE": "8(x2),4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_SUBMIT_DIR": "/home/me",
}


def test_a_job_by_its_environment():
    found = Allocation.read(ENVIRON)
    assert (found.job, found.family, found.nodes, found.slots, found.cpus) == ("12", "12", ["n1", "n2", "n3"], 2, 4)
    array = Allocation.read(
        ENVIRON | {"SLURM_ARRAY_JOB_ID": "10", "SLURM_GPUS_ON_NODE": "8", "SLURM_RESTART_COUNT": "1"}
    )
    assert (array.family, array.slots, array.restarts) == ("10", 8, 1)
    assert Allocation.read(ENVIRON, slots=3).slots == 3


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("SLURM_JOB_ID", ""),
        ("SLURM_JOB_ID", "x"),
        ("SLURM_JOB_NODELIST", ""),
        ("SLURM_JOB_NODELIST", "n[1"),
        ("SLURM_JOB_CPUS_PER_NODE", "many"),
        ("SLURM_NTASKS_PER_NODE", "0"),
    ],
)
def test_a_variable_that_can_not_be_used_is_named(variable, value):
    with pytest.raises(InvalidInputError) as refused:
        Allocation.read(ENVIRON | {variable: value})
    assert variable in str(refused.value) or "list of nodes" in str(refused.value)


def test_names_of_nodes():
    assert node_names(["n1", "gpu.site"]) == {"n1": "n1", "gpu.site": "gpu-site"}
    with pytest.raises(InvalidInputError, match=r"a-b, a\.b: here they would have the same name"):
        node_names(["a.b", "a-b"])
    with pytest.raises(InvalidInputError, match="registry"):
        node_names(["registry"])


def test_a_script_of_a_job():
    script = batch_script(["python", "-m", "x", "--dir", "a b", "$HOME"])
    assert script.startswith("#!/bin/sh\n#SBATCH --no-kill\n")
    assert "--signal=B:USR1@0\n" in script  # with a time before the limit it would come up to a minute early
    assert script.endswith("exec python -m x --dir 'a b' '$HOME'\n")


def test_options_of_sbatch():
    assert checked(["-N2", "--time=5"], (22, 5)) == (["-N2", "--time=5"], [])
    assert checked(["--requeue=expedite"], (25, 11)) == (["--requeue=expedite"], [])
    options, [change] = checked(["--requeue=expedite"], (22, 5))
    assert options == ["--requeue"]
    assert "22.05" in change
    assert checked(["--array=1-10%1"], (22, 5))[0] == ["--array=1-10%1"]
    assert checked(["-a", "7"], (22, 5))[0] == ["-a", "7"]
    for words in (["--array=1-10"], ["-a", "1-10%2"], ["--array", "1,2"], ["--wrap=ls"], ["--test-only"]):
        with pytest.raises(InvalidInputError):
            checked(words, (22, 5))


def test_agents_are_started_so_that_a_lost_node_ends_none(tmp_path):
    words = srun(Allocation.read(ENVIRON), tmp_path, "nats://n1:1")
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0", "--ntasks=3", "--cpus-per-task=4"} < set(words)
    kept = step_environment({"SLURM_JOB_END_TIME": "1", "SLURM_NTASKS": "6", "SRUN_X": "", "SLURM_JOB_ID": "1"})
    assert kept == {"SLURM_JOB_ID": "1", "PYTHONUNBUFFERED": "1"}


def test_what_failed_is_not_tried_again_by_the_same_array():
    assert Outcome(family="1", status=0).settles("2")
    assert Outcome(family="1", status=GIVEN_UP).settles("1")
    assert not Outcome(family="1", status=GIVEN_UP).settles("2")
    assert not Outcome(family="1", status=UNFINISHED).settles("1")


def shown(**states):
    return {name: NodeShown(name, state, reason) for name, (state, reason) in states.items()}


def test_a_node_drained_in_slurm_is_drained_here_and_back():
    drains = Drains({"n1": "n1", "n.2": "n-2"})
    assert drains.look(shown(n1=("allocated", "")), set()) == []
    there = shown(n1=("draining", "bad disk"))
    assert drains.look(there, set()) == [DrainHere("n1", True, "it was drained in Slurm: bad disk")]
    assert drains.look(there, {"n1"}) == []
    assert drains.drained_here("n1", drain=True) == []  # it heard of its own order
    assert drains.look(shown(n1=("mixed", "")), {"n1"}) == [DrainHere("n1", False, "it was resumed in Slurm")]


def test_a_node_drained_here_is_drained_in_slurm_and_back():
    drains = Drains({"n.2": "n-2"})
    drains.look({"n.2": NodeShown("n.2", "allocated", "")}, set())
    [order] = drains.drained_here("n-2", drain=True)
    assert order == DrainThere("n.2", True)
    assert order.words == ["update", "NodeName=n.2", "State=DRAIN", f"Reason={REASON}"]
    assert drains.look({"n.2": NodeShown("n.2", "draining", f"{REASON} [me]")}, {"n-2"}) == []
    [undo] = drains.drained_here("n-2", drain=False)
    assert undo.words[-1] == "State=RESUME"


def test_what_a_person_drained_in_slurm_is_not_resumed_from_here_and_stays_in_use_where_they_say_so():
    drains = Drains({"n1": "n1"})
    there = shown(n1=("drained", "bad disk"))
    assert len(drains.look(there, set())) == 1
    assert drains.drained_here("n1", drain=False) == []
    assert drains.look(there, set()) == []
    assert drains.drained_here("elsewhere", drain=True) == []


def test_a_node_that_leaves_is_not_drained_in_slurm():
    drains = Drains({"n1": "n1"})
    drains.look(shown(n1=("allocated", "")), set())
    drains.leaves("n1", leaves=True)
    assert drains.drained_here("n1", drain=True) == []
    drains.leaves("n1", leaves=False)
    assert len(drains.drained_here("n1", drain=True)) == 1


def test_a_node_that_slurm_gives_a_job_is_used():
    drains = Drains({"n1": "n1", "n2": "n2"})
    found = drains.look(shown(n1=("allocated", ""), n2=("draining", "x")), {"n1", "n2"})
    assert found == [DrainHere("n1", False, "Slurm has given it to this job")]


def test_the_page_names_the_ports_that_servers_take():
    first, end = QUIET_PORTS
    assert f"one of {first} to {end - 1} |" in (ROOT / "docs" / "reference" / "processes.md").read_text()


def test_counts():
    assert counts("X", "2(x3),1") == [2, 1]
    with pytest.raises(InvalidInputError, match="X '2\\(x\\)'"):
        counts("X", "2(x)")


def test_tasks_of_a_node(tmp_path):
    (tmp_path / "workers").mkdir()
    for name in ("a-b-1", "a-b-12", "c-3"):
        (tmp_path / "workers" / f"{name}.json").touch()
    assert tasks_in(tmp_path) == ["a-b", "c"]


def test_a_prolog_refuses_a_node_without_memory(tmp_path, monkeypatch):
    prolog.check(tmp_path)
    with pytest.raises(InvalidInputError, match="can't be written"):
        prolog.check(tmp_path / "nowhere")
    monkeypatch.setattr(prolog, "LEAST_FREE", 1.1)
    with pytest.raises(InvalidInputError, match="is full"):
        prolog.check(tmp_path)


def test_an_epilog_removes_what_agents_of_the_user_left_long_ago(tmp_path, monkeypatch):
    for name in ("unicron-7-old", "unicron-8-others", "own"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "w.1.saved").touch()
    prolog.clean(tmp_path, {"SLURM_JOB_UID": "7"})
    assert (tmp_path / "unicron-7-old").exists()
    monkeypatch.setattr(prolog, "KEPT_S", -1.0)
    prolog.clean(tmp_path, {"SLURM_JOB_UID": "7"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "unicron-8-others"]
    with pytest.raises(InvalidInputError, match="SLURM_JOB_UID"):
        prolog.clean(tmp_path, {})


def test_a_machine_whose_comment_may_not_be_changed_leaves_at_its_limit_all_the_same(tmp_path, monkeypatch, capfd):
    run_dir = tmp_path / "gpu-1"
    (run_dir / "workers").mkdir(parents=True)
    (run_dir / "workers" / "t-1.json").touch()
    monkeypatch.setattr(tools, "ask", lambda tool, *_: "7|RUNNING|1|n1|gpu-1|x\n" if tool == "squeue" else "")
    monkeypatch.setattr(tools, "run", _refuse)
    machine = Machine("7", run_dir, leave_s=8.0)
    assert machine._look() < 0
    assert machine._look() < 0
    assert capfd.readouterr().err == "unicron: job 7 keeps its comment: scontrol: no\n"


def _refuse(_):
    raise tools.SlurmError("scontrol: no")


VIEW = TaskView(spec=TaskSpec(name="gpt", command=["x"]), state=TaskState.WAITING, reason="needs 2 workers")
RUNS = replace(VIEW, state=TaskState.RUNNING)


@pytest.mark.parametrize(
    ("seen", "given_up"),
    [
        ([(0, RUNS), (10, VIEW), (60, VIEW)], False),
        ([(0, RUNS), (10, VIEW), (71, VIEW)], True),
        ([(0, RUNS), (10, VIEW), (40, RUNS), (71, VIEW)], False),
        ([(0, VIEW), (99, VIEW)], False),  # it has never computed: other nodes would not help
        ([(0, RUNS), (10, VIEW), (71, replace(VIEW, paused=True))], False),
        ([(0, RUNS), (10, VIEW), (71, replace(VIEW, withheld="would be moved"))], False),
    ],
)
def test_a_job_is_given_up_where_its_task_waits_for_nodes_that_do_not_come(tmp_path, seen, given_up):
    said = []
    allocation = Allocation("c", "7", "7", ["n1", "n2"], 1, 1, tmp_path, 0)
    job = Job(allocation, None, {"n1": "n1", "n2": "n2"}, None, None, said.append)
    for at, view in seen:
        job.see(view, at)
    assert job.lacks_nodes == given_up
    assert any("is requeued, to go on on other nodes" in line for line in said) == any(
        view is VIEW for _, view in seen[1:] if seen[0][1] is RUNS
    )
    assert any(line.startswith("unicron: gpt has waited for 61 s: needs 2 workers") for line in said) == given_up


@pytest.mark.parametrize(("step", "refused"), [("0", True), ("4294967290", False), ("4294967291", False), ("", False)])
def test_a_step_of_srun_is_no_place_for_it(monkeypatch, step, refused):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", step)
    with pytest.raises(InvalidInputError, match="leave `srun` out") if refused else nullcontext():
        assert within([])


def test_a_script_that_is_not_there_is_not_submitted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match=r"there is no 'train.py' in /"):
        check_script(["python", "train.py"], ["--nodes=2"])
    check_script(["train.py"], ["--chdir=/there"])
    check_script(["torchrun", "--nnodes", "train.py"], [])
    check_script(["./generate", "out.py"], [])  # which is not there yet
    check_script(["python"], [])
    (tmp_path / "train.py").touch()
    check_script(["train.py", "--config", "x.py"], [])
