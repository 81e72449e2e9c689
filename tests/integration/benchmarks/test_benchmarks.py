"""The benchmarks run, and what they measure is right; how fast it is depends on the machine."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT
from helpers.browser import CHROMIUM

from benchmarks.provision_moods import MOODS

pytestmark = pytest.mark.exhaustive("benchmarks are run by hand, and nothing of the product depends on them")


def run(*arguments):
    command = [sys.executable, "-m", *arguments, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["benchmark"] == arguments[0].partition(".")[2]
    return found["figures"]


def test_the_table_agrees_with_other_solvers():
    found = run("benchmarks.planner", "--tasks", "5", "--workers", "32", "--repeats", "1")
    assert (found["naive_agrees"], found["ilp_agrees"]) == (True, True)
    assert found["rows"] == found["events"] > 5
    assert found["refresh_ms"] > 0 < found["lookup_us"]


def test_each_lost_node_is_answered_from_the_table():
    found = run("benchmarks.decision", "--rounds", "5")
    assert found["prepared"] == found["rounds"] == 5
    assert 0 < found["decision_p50_ms"] <= found["decision_p99_ms"]


def test_a_lost_node_of_a_cluster_and_its_return_are_weighed():
    found = run("benchmarks.scale", "--nodes", "64", "--tasks", "2")
    assert found["gpus"] == 512
    assert found["lost_messages"] > 100 < found["joined_messages"]
    assert 0 < found["largest_message_kb"] < 1000 > found["largest_value_kb"] > 0
    assert found["decision_cpu_ms"] > 0


def test_the_evaluation_is_made_with_all_its_figures():
    found = run("benchmarks.evaluation", "--seeds", "1")
    assert found["trace_a_over_megatron"] > 1
    assert found["trace_b_share_of_oracle"] > 0.98
    assert found["transition_64_gpus_s"] < found["transition_16_gpus_s"]
    assert found["messages_64_gpus"] > found["messages_16_gpus"]


def test_a_plain_script_is_healed_in_place_as_torchrun_runs_it():
    found = run("benchmarks.inplace", "plain_loop")
    assert (found["cases"], found["right"], found["struck_as_undisturbed"]) == (1, 1, 1)
    assert found["undisturbed_s"] > 0 < found["struck_s"]


def test_the_simulator_is_timed():
    found = run("benchmarks.simulator", "--only", "trace_a")
    assert found["trace_a_s"] > 0 < found["peak_memory_mb"]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome in PATH")
def test_the_console_is_timed_in_a_browser():
    few = ("--events", "5", "--seconds", "2", "--nodes", "96", "--tasks", "2", "--updates", "5")
    found = run("benchmarks.console", *few)
    assert 0 < found["event_to_page_p50_ms"] <= found["event_to_page_p99_ms"]
    assert 0 < found["nodes_96_update_p50_ms"] <= found["nodes_96_update_p99_ms"]
    assert found["first_paint_ms"] > 0 < found["first_paint_96_ms"]
    assert found["pages_100_cpu_percent"] > 0 < found["memory_mb_96"]
    assert found["journal_replay_messages_s"] > 0


def test_a_rank_of_a_replica_is_struck_and_the_task_heals():
    found = run("benchmarks.parallel", "--layouts", "dp2_tp2", "--faults", "killed", "--phases", "backward")
    assert (found["dp2_tp2_killed_strikes"], found["dp2_tp2_killed_redone"]) == (1, 0)
    assert found["dp2_tp2_killed_rel_diff"] <= 1e-5
    assert 0 < found["dp2_tp2_killed_first_s"] > found["dp2_tp2_killed_beyond_s"]
    assert found["dp2_tp2_killed_whole_s"] > 0


def test_a_lost_node_is_replaced_whatever_its_provider_does():
    found = run("benchmarks.provision", "--repeat", "1", "--ways", "local,moods")
    assert (found["local_replaced"], found["moods_replaced"]) == (1, len(MOODS))
    assert 0 < found["local_healed_s"] < found["local_replaced_p50_s"]
    assert {found[f"{way}_{count}"] for way in ("local", "moods") for count in ("wrongly_replaced", "doubled")} == {0}


def test_replacing_lost_nodes_is_worth_something():
    found = run("benchmarks.replacement", "--seeds", "1")
    assert found["repair_goodput"] < found["1_d_goodput"] < found["1_h_goodput"] < found["10_min_goodput"] < 1
    assert found["spare_repair_goodput"] > found["repair_goodput"]
