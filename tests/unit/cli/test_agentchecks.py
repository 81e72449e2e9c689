"""What agents run with is held against the set-up: settings, rules and patterns, by node, with value and cure."""

import pytest
from msgspec.structs import replace
from unicron_agent.settings import AgentSettings
from unicron_cli.agentchecks import checks
from unicron_cli.observed import Observed
from unicron_deploy.production.hosts import Kind, checked
from unicron_deploy.production.layout import ETC, RULES
from unicron_deploy.production.setup import write
from unicron_deploy.production.wanted import SEEN_BY_ALL, read

from unicron.contracts.answers import RunningSettings, Status, TaskView
from unicron.contracts.tasks import Member, TaskSpec, TaskState
from unicron.contracts.watchdogs import LogPattern
from unicron.errors import InvalidInputError
from unicron.rules import load

LOSS = LogPattern(pattern="loss", absent_for_s=60.0)
SPEC = TaskSpec(name="t", command=["x"], max_workers=1, microbatches=1, watch_log=[LOSS])
TASK = TaskView(spec=SPEC, state=TaskState.RUNNING, members=[Member(worker="t-1", node="n1", slot=0)])
STATUS = Status(tasks=[TASK])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("wanted") / "cluster"
    write(found, checked(["a", "b", "c"], ["n1", "n2", "n3"], Kind.SYSTEMD))
    return found


def runs(folder, node, watch_log=None, **changes):
    """Return what an agent runs with that was started as the set-up says, but for changes."""
    agent = read(folder).nodes[node]
    settings = {
        **AgentSettings().texts(),
        **agent.settings,
        **{f"UNICRON_{name}": text for name, text in changes.items()},
    }
    return RunningSettings(settings=settings, rules=agent.rules, watch_log=watch_log or {})


def all_of(folder, **last):
    agents = {node: runs(folder, node) for node in ("n1", "n2", "n3")}
    agents["n1"] = replace(agents["n1"], watch_log={"t": [LOSS]})
    return Observed(version="1", agents={**agents, **last}, wanted=read(folder))


def lines(seen, status=STATUS):
    return {check.name: check for check in checks(seen, status)}


def test_agents_that_run_as_they_were_set_up_are_well(folder):
    found = lines(all_of(folder))
    assert {name: check.state for name, check in found.items()} == dict.fromkeys(
        ("settings", "rules", "log patterns"), "ok"
    )
    assert "of 3 agents, as set up" in found["settings"].found
    assert lines(all_of(folder, n3=runs(folder, "n3", HANG_S="20", CHAOS="false")))["settings"].state == "ok"


def test_a_setting_is_named_with_its_node_its_value_and_the_one_that_is_meant(folder):
    found = lines(all_of(folder, n3=runs(folder, "n3", HANG_S="60.0", RACK="r9")))["settings"]
    assert found.state == "warning"
    assert found.found == "n3: UNICRON_HANG_S is 60.0, not 20.0, n3: UNICRON_RACK is r9, not empty"
    assert "restart that agent" in found.cure


def test_a_setting_that_no_agent_has_and_an_agent_that_does_not_answer_are_named(folder):
    env = folder / "n2" / ETC / "agent.env"
    before = env.read_text()
    seen = all_of(folder, n3=None)
    env.write_text(f"{before}# our own\nUNICRON_HANGS=60\nOMP_NUM_THREADS=1\n")
    try:
        found = lines(replace(seen, wanted=read(folder)))["settings"].found
    finally:
        env.write_text(before)
    assert found == "n3 does not say what it runs with, n2: UNICRON_HANGS is unknown to that agent, not 60"


def test_a_node_that_nobody_has_set_up_is_named(folder):
    stranger = replace(runs(folder, "n3"), settings=AgentSettings(node="n9").texts())
    assert lines(all_of(folder, n9=stranger))["settings"].found == "n9 is not in the set-up"


def test_other_rules_are_found_where_their_file_was_not_brought(folder):
    seen = all_of(folder)
    rules = folder / "n2" / ETC / RULES
    before = rules.read_text()
    rules.write_text("[[worker]]\nmatch = 'slow'\nstatus = \"io_error\"\n")
    try:
        found = lines(replace(seen, wanted=read(folder)))["rules"]
    finally:
        rules.write_text(before)
    assert (found.state, found.found) == ("warning", "other ones than the set-up's on n2")
    assert "UNICRON_RULES" in found.cure


def test_a_task_is_to_be_watched_for_what_its_file_says(folder):
    other = replace(LOSS, pattern="lose")
    found = lines(all_of(folder, n1=runs(folder, "n1", {"t": [other]})))["log patterns"]
    assert found.state == "warning"
    assert found.found == "n1: watch_log of t is 'lose' within 0 absent 60, not 'loss' within 0 absent 60"
    assert "none, not 'loss'" in lines(all_of(folder, n1=runs(folder, "n1")))["log patterns"].found


def test_without_a_set_up_agents_are_held_against_one_another(folder):
    seen = replace(all_of(folder), wanted=None)
    assert {check.state for check in lines(seen).values()} == {"ok"}, "what is of each machine may differ"
    odd = replace(runs(folder, "n3", DISK_FREE="0.2"), rules="other")
    found = lines(replace(all_of(folder, n3=odd), wanted=None))
    assert found["settings"].found == "n3: UNICRON_DISK_FREE is 0.2, not 0.05"
    assert found["rules"].found == "other ones than most others' on n3"
    assert "--setup" in found["settings"].cure


def test_where_no_agent_is_up_nothing_is_said():
    assert not lines(Observed(version="1"))


def test_a_machine_of_a_pool_is_held_against_what_its_pool_is_given(tmp_path):
    folder = tmp_path / "cluster"
    write(folder, checked(["a", "b", "c"], ["h1"], Kind.SLURM, "gpu", "/shared/unicron"))
    pool = read(folder).pools["gpu"]
    assert pool.rules == load(str(folder / SEEN_BY_ALL / "shared/unicron/rules")).digest
    own = {"UNICRON_NODE": "gpu-1", "UNICRON_POOL": "gpu", "UNICRON_RACK": "r1", "UNICRON_SLOTS": "8"}
    running = RunningSettings(settings={**AgentSettings().texts(), **pool.settings, **own}, rules=pool.rules)
    seen = Observed(version="1", agents={"gpu-1": running}, wanted=read(folder))
    assert {check.state for check in lines(seen, Status()).values()} == {"ok"}
    changed = replace(running, settings={**running.settings, "UNICRON_METRICS": "9401"})
    found = lines(replace(seen, agents={"gpu-1": changed}), Status())["settings"].found
    assert found == "gpu-1: UNICRON_METRICS is 9401, not 0.0.0.0:9400"


def test_what_is_no_set_up_is_refused(tmp_path):
    with pytest.raises(InvalidInputError, match="give the folder that `unicron init` wrote"):
        read(tmp_path)
    (tmp_path / "n1" / ETC).mkdir(parents=True)
    for name in ("cluster.env", "agent.env"):
        (tmp_path / "n1" / ETC / name).write_text("UNICRON_NODE\n")
    with pytest.raises(InvalidInputError, match="write NAME=VALUE"):
        read(tmp_path)


def test_an_address_is_told_without_a_password():
    texts = AgentSettings(nats_url="nats://u:secret@a:4222,b:4222,tls://c@d").texts()
    assert texts["UNICRON_NATS_URL"] == "nats://a:4222,b:4222,tls://d"
