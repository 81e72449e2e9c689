"""The costs of failures under each policy, by hand-made traces whose outcome can be worked out."""

import msgspec
import pytest
from unicron_simulator.policies import comparison, experiments, parameters, traces
from unicron_simulator.policies.economy import tariffs
from unicron_simulator.policies.parameters import Costs
from unicron_simulator.policies.policies import Unicron
from unicron_simulator.policies.traces import DAY, FailureTrace, TracedFailure, node_names

from unicron.contracts.tasks import TaskSpec
from unicron.errors import InvalidInputError

KINDS = ("sev1", "sev2", "sev3", "resize")
KNOWN, CIRCULAR = parameters.load()


def task(name, most=8, weight=1.0, flops=None):
    table = flops or {size: 1e12 * size for size in (1, 2, 4, 8)}
    return TaskSpec(name=name, command=["x"], weight=weight, max_workers=most, throughput=table)


def costs(detect=10.0, recover=90.0, efficiency=1.0, *, shrinks=True):
    seconds = {"detect": dict.fromkeys(KINDS, detect), "recover": dict.fromkeys(KINDS, recover)}
    return Costs(basis="test", source="test", efficiency=efficiency, shrinks=shrinks, **seconds)


def run(faults, tasks, policy="unicron", nodes=2, gpus=4, seconds=10_000.0, spares=0, delivery_s=None, **given):
    trace = FailureTrace("made", node_names(nodes), seconds, tuple(faults))
    known = {"unicron": costs(), policy: costs(**given)}
    ways = {"spares": spares, "delivery_s": delivery_s}
    return comparison.compare(trace, tasks, [policy], gpus=gpus, costs=known, **ways)[policy]


def test_without_failures_nothing_is_lost():
    result = run([], [task("a")])
    assert result.earned == pytest.approx(result.ideal) == pytest.approx(8e12 * 10_000)
    assert (result.detection, result.transition, result.sub_healthy) == (0, 0, 0)


@pytest.mark.parametrize("policy", ["unicron", "megatron"])
def test_a_restart_costs_detection_and_transition(policy):
    result = run([TracedFailure(1000, "node-0", "sev2")], [task("a")], policy, shrinks=False)
    assert result.detection == pytest.approx(8e12 * 10)
    assert result.transition == pytest.approx(8e12 * 90)
    assert result.sub_healthy == pytest.approx(0, abs=1)
    assert result.ideal == pytest.approx(result.earned + result.detection + result.transition)


def test_a_lost_node_leaves_half_until_it_is_back():
    result = run([TracedFailure(1000, "node-0", "sev1", 2000)], [task("a")])
    assert result.detection == pytest.approx(8e12 * 10)
    assert result.transition == pytest.approx(4e12 * 90 + 8e12 * 90)
    assert result.sub_healthy == pytest.approx(4e12 * (2000 - 10))
    assert next((sample.at, sample.gpus) for sample in result.samples if sample.gpus < 8) == (1000, 4)
    assert result.samples[-1].waf == pytest.approx(8e12)


def test_megatron_waits_for_the_node():
    result = run([TracedFailure(1000, "node-0", "sev1", 2000)], [task("a")], "megatron", shrinks=False)
    assert result.sub_healthy == pytest.approx(8e12 * (2000 - 10))
    assert result.transition == pytest.approx(8e12 * 90)
    assert result.earned == pytest.approx(result.ideal - 8e12 * 2090)


@pytest.mark.parametrize("policy", ["unicron", "megatron"])
def test_a_node_that_a_pool_replaces_is_missed_until_the_other_machine_has_joined(policy):
    twice = [TracedFailure(at, "node-0", "sev1", 10**6) for at in (1000, 5000)]
    result = run(twice, [task("a")], policy, delivery_s=300.0, shrinks=policy == "unicron")
    share = 4e12 if policy == "unicron" else 8e12
    assert result.sub_healthy == pytest.approx(2 * share * 300)
    assert result.samples[-1].waf == pytest.approx(8e12)


@pytest.mark.parametrize("policy", ["unicron", "megatron"])
def test_with_a_node_to_spare_nobody_waits_for_one(policy):
    lost = [TracedFailure(1000, "node-0", "sev1", 10**6)]
    result = run(lost, [task("a")], policy, spares=1, shrinks=policy == "unicron")
    assert result.sub_healthy == pytest.approx(0, abs=1)
    assert result.transition == pytest.approx(8e12 * 90)


def test_unicron_gives_a_hit_task_the_workers_of_another():
    """On four GPUs two of two are best; the heavier task keeps its two when it loses them."""
    tasks = [task("light", 2, weight=1.0), task("heavy", 2, weight=2.0)]
    struck = [TracedFailure(1000, f"node-{number}", "sev1", 9000) for number in (0, 1)]
    unicron = [run([fault], tasks, gpus=2).samples[-1].waf for fault in struck]
    others = [run([fault], tasks, "oobleck", gpus=2).samples[-1].waf for fault in struck]
    assert unicron == pytest.approx([4e12, 4e12])
    assert sorted(others) == pytest.approx([2e12, 4e12])


def test_a_returning_node_goes_to_whom_was_hit_first():
    tasks = [task("a", 4), task("b", 4)]
    faults = [TracedFailure(1000, "node-1", "sev1", 8999), TracedFailure(2000, "node-0", "sev1", 3000)]
    result = run(faults, tasks, "megatron", shrinks=False)
    trace_end = result.samples[-1]
    assert trace_end.waf == pytest.approx(4e12)
    assert result.sub_healthy > 0
    swapped = run(faults, [task("a", 4, weight=1.0), task("b", 4, weight=3.0)], "megatron", shrinks=False)
    assert swapped.samples[-1].waf == pytest.approx(12e12)  # b was on node-1, was hit first, and got node-0


def test_a_second_failure_during_recovery_begins_it_anew():
    result = run([TracedFailure(1000, "node-0", "sev2"), TracedFailure(1050, "node-1", "sev2")], [task("a")])
    assert result.detection + result.transition == pytest.approx(8e12 * (50 + 100))


def test_a_failed_node_that_fails_again_changes_nothing():
    once = [TracedFailure(1000, "node-0", "sev1", 3000)]
    assert run([*once, TracedFailure(1500, "node-0", "sev2")], [task("a")]).earned == run(once, [task("a")]).earned


def test_efficiency_is_no_loss_by_failures():
    result = run([TracedFailure(1000, "node-0", "sev2")], [task("a")], "varuna", efficiency=0.5)
    assert result.ideal == pytest.approx(4e12 * 10_000)
    assert result.transition == pytest.approx(4e12 * 90)


def test_sums_agree_and_nobody_beats_the_oracle():
    for name in ("trace-a", "trace-b"):
        found = comparison.compare(traces.generate(name, 5), experiments.case_5())
        for result in found.values():
            lost = result.detection + result.transition + result.sub_healthy
            assert result.earned + lost == pytest.approx(result.ideal)
            assert result.earned <= found["oracle"].earned
            whole = [later.at - now.at for now, later in zip(result.samples, result.samples[1:], strict=False)]
            paid = sum(each.waf * lasted for each, lasted in zip(result.samples, whole, strict=False))
            assert paid == pytest.approx(result.earned)
        found.pop(comparison.ORACLE)
        assert found["unicron"].earned == max(result.earned for result in found.values())


def test_the_planner_expects_what_is_earned():
    trace = traces.generate("trace-b", 2)
    cluster = Unicron(trace, 8, tariffs(experiments.case_5(), 128), KNOWN["unicron"])
    cluster.run("unicron")
    last = cluster.plans[-1]
    assert len(cluster.plans) > 40
    assert last.waf == pytest.approx(sum(cluster.tariff[one.task].at(len(one.slots)) for one in last.shares))
    assert last.transition_s == pytest.approx(60, rel=0.05)  # what it was told of


def test_plans_are_the_same_without_tables():
    trace = traces.generate("trace-b", 2)
    tariff = tariffs(experiments.case_5(), 128)
    ready, computed = (Unicron(trace, 8, tariff, KNOWN["unicron"], every) for every in (0.0, float("inf")))
    assert ready.run("unicron").earned == pytest.approx(computed.run("unicron").earned, rel=1e-3)
    assert sum(plan.prepared for plan in ready.plans) > 10
    assert not any(plan.prepared for plan in computed.plans)


def test_all_tasks_of_case_5_run():
    cluster = Unicron(traces.generate("trace-a", 0), 8, tariffs(experiments.case_5(), 128), KNOWN["unicron"])
    cluster.start()
    assert [cluster.size(task) for task in cluster.tariff] == list(experiments.ALL_RUN)


def test_a_trace_of_eight_weeks_is_the_same_each_time():
    trace = traces.generate("trace-a", 1)
    first, second = (comparison.compare(trace, experiments.case_5(), ["unicron"]) for _ in range(2))
    assert first == second


def test_circular_figures_are_marked_and_kept_out():
    assert CIRCULAR.basis == "circular"
    assert all(one.basis != "circular" for one in KNOWN.values())
    used = comparison.circular()
    assert {name for name, one in used.items() if one.basis == "circular"} == {"oobleck", "varuna", "bamboo"}
    assert all(one.source for one in used.values())


@pytest.mark.parametrize(
    ("tasks", "policies", "said"),
    [
        ([], ["unicron"], "no tasks"),
        ([task("a")], ["slurm"], "no policy 'slurm'; there are unicron"),
        ([task("a"), task("a")], ["unicron"], "two tasks are called 'a'"),
        ([task("a"), TaskSpec(name="b", command=["x"])], ["unicron"], "task b: its FLOP/s are unknown"),
    ],
)
def test_what_can_not_be_compared_is_said(tasks, policies, said):
    with pytest.raises(InvalidInputError, match=said):
        comparison.compare(FailureTrace("made", node_names(2), DAY, ()), tasks, policies)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"efficiency": 0}, "efficiency 0"),
        ({"detect": {"sev1": 1.0}}, "detect has no sev2"),
        ({"recover": dict.fromkeys(KINDS, -1.0)}, "recover.sev1 -1.0"),
        ({"speed": 3}, "speed"),
    ],
)
def test_parameters_are_checked(tmp_path, change, said):
    entry = msgspec.structs.asdict(costs()) | change
    plain = {key: value for key, value in entry.items() if not isinstance(value, dict)}
    text = "\n".join(f"{key} = {msgspec.json.encode(value).decode()}" for key, value in plain.items())
    for key, value in entry.items():
        if isinstance(value, dict):
            text += f"\n[mine.{key}]\n" + "\n".join(f"{kind} = {seconds}" for kind, seconds in value.items())
    path = tmp_path / "mine.toml"
    path.write_text(f"[mine]\n{text}\n")
    with pytest.raises(InvalidInputError, match=r"mine\.toml") as error:
        parameters.load(path)
    assert said in str(error.value)
