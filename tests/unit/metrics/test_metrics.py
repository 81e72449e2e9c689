"""Metrics from messages and from a state, and the number of their series."""

import asyncio
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import ROOT
from helpers.ports import free_port
from prometheus_client.parser import text_string_to_metric_families
from unicron_agent.core import AgentCore
from unicron_agent.metrics import AgentMetrics
from unicron_agent.stimuli import Adopted, Sampled, WorkerProcess
from unicron_agent.workers.workers import StallLimits
from unicron_registry.core import RegistryCore

from unicron.contracts import events
from unicron.contracts.answers import Load
from unicron.contracts.base import Message, Started, TimerFired
from unicron.contracts.commands import Regroup, StopWorker
from unicron.contracts.failures import DetectionMethod, FailureStatus, Severity
from unicron.contracts.hardware import Gpu, GpusSampled
from unicron.contracts.notices import NotificationFailed, NotificationSent
from unicron.contracts.plans import Plan
from unicron.contracts.queries import GetStatus, SubmitTask
from unicron.contracts.tasks import Slot, TaskSpec, TaskState
from unicron.errors import InvalidInputError
from unicron.metric_definitions import FAMILIES
from unicron.service.metrics import KEEP_S, OTHER, Metrics, load_samples, status_samples
from unicron.settings import Settings

OWN = ("process_",)
"""What the names of prometheus-client's own metrics begin with."""


def series(metrics):
    """Return the value of each series, by its name and the values of its labels."""
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels) if label != "le")): sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if not sample.name.startswith(OWN) and not sample.name.endswith("_bucket")
    }


def count(metrics):
    return sum(len(family.samples) for family in metrics.registry.collect())


def take(metrics, cause, said=(), lag_s=None):
    metrics.count_received(cause, lag_s)
    for message in said:
        metrics.count_sent(cause, message)


def failure(**fields):
    known = {"severity": Severity.SEV2, "method": DetectionMethod.PROCESS_SUPERVISION, "task": "gpt", "node": "n1"}
    known |= {"status": FailureStatus.EXITED_ABNORMALLY, "at": 101.5, "correlation": "c"}
    return events.FailureDetected(**known | fields)


def fact(kind=events.WorkerExited, **fields):
    return kind(**{"node": "n1", "slot": 0, "task": "gpt", "worker": "gpt-1", "id": "c", "at": 101.0, **fields})


def regrouped(**fields):
    usual = {"epoch": 1, "rank": 0, "world_size": 2, "iteration": 3, "seconds": 0.5}
    return fact(events.Regrouped, **usual | fields)


# --- what is said ----------------------------------------------------------------------------------------------------


def test_a_failure_counts_by_severity_and_cause_and_its_detection_by_the_first_fact_of_its_chain():
    metrics = Metrics("detector")
    take(metrics, fact(), [], 0.25)
    take(metrics, TimerFired(name="hold", id="t", at=101.5, correlation="c"), [failure()])
    found = series(metrics)
    assert found["unicron_failures_total", "exited_abnormally", "n1", "2", "gpt"] == 1
    assert found["unicron_phase_seconds_sum", "detect", "gpt"] == pytest.approx(0.5)
    assert found["unicron_journal_lag_seconds", "detector"] == 0.25


def test_a_decision_takes_from_the_failure_to_the_first_command_that_heals_and_is_told_once():
    metrics = Metrics("transition")
    common = {"node": "n1", "task": "gpt", "correlation": "c"}
    regroup = Regroup(**common, epoch=1, rendezvous="h:1", members=[], at=101.75)
    stop = StopWorker(**common, slot=0, worker="gpt-1", at=101.75)
    take(metrics, failure(), [events.TaskStateChanged(task="gpt", state=TaskState.RECOVERING), stop, regroup, regroup])
    take(metrics, regrouped(recomputed=2), [])
    take(metrics, regrouped(rank=1, seconds=0.25, recomputed=2), [regroup])
    take(metrics, Message(), [events.TaskRecovered(task="gpt", epoch=1, workers=2, seconds=1.5)])
    found = series(metrics)
    assert found["unicron_commands_total", "Regroup"] == 3
    assert found["unicron_commands_total", "StopWorker"] == 1
    assert found["unicron_phase_seconds_count", "decide", "gpt"] == 1
    assert found["unicron_phase_seconds_sum", "decide", "gpt"] == pytest.approx(0.25)
    assert found["unicron_phase_seconds_sum", "regroup", "gpt"] == pytest.approx(0.75)
    assert found["unicron_phase_seconds_sum", "resume", "gpt"] == pytest.approx(1.5)
    assert found["unicron_regroups_total", "gpt"] == 2
    assert found["unicron_recomputed_microbatches_total", "gpt"] == 2, "all ranks tell the same"
    assert found["unicron_recoveries_total", "gpt"] == 1


def test_a_plan_counts_by_what_it_answers_and_takes_from_the_failure():
    metrics = Metrics("planner")
    plan = Plan(number=1, trigger="node_lost:node-3", workers=4)
    take(metrics, failure(), [events.PlanDecided(plan=plan, at=101.6, correlation="c")])
    take(metrics, Started(token=7), [])
    found = series(metrics)
    assert found["unicron_plans_total", "node_lost"] == 1
    assert found["unicron_phase_seconds_sum", "plan", ""] == pytest.approx(0.1)
    assert found["unicron_lease_changes_total", "planner"] == 1


def test_goodput_is_what_the_registry_hears_of_iterations():
    metrics = Metrics("registry")
    for iteration in range(3):
        done = {"epoch": 0, "iteration": iteration, "world_size": 2, "seconds": 0.5, "loss": 1.0}
        take(metrics, fact(events.IterationFinished, **done), [events.DeadLetter(subject="s", error="e")])
    found = series(metrics)
    assert found["unicron_task_iterations_total", "gpt"] == 3
    assert found["unicron_task_training_seconds_total", "gpt"] == 1.5
    assert found["unicron_dead_letters_total", "registry"] == 3


def test_notices_count_by_channel_and_by_what_became_of_them():
    metrics, about = Metrics("notifier"), {"incident": "c", "channel": "ops", "delivery": "c.1.ops"}
    take(metrics, Message(), [NotificationSent(**about, attempts=2), NotificationFailed(**about, reason="x")])
    take(metrics, Message(), [NotificationSent(**about, attempts=1)])
    found = series(metrics)
    assert found["unicron_notifications_total", "ops", "sent"] == 2
    assert found["unicron_notifications_total", "ops", "failed"] == 1


def test_no_other_service_counts_what_it_hears():
    metrics = Metrics("straggler")
    take(metrics, failure(), [])
    take(metrics, regrouped(), [])
    assert series(metrics) == {}


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_the_series_of_a_task_go_a_while_after_it_ended_and_stay_where_it_was_launched_again():
    metrics = Metrics("transition")
    for name in ("gpt", "bert"):
        take(metrics, Message(), [events.TaskStateChanged(task=name, state=TaskState.RUNNING, at=100.0)])
        take(metrics, regrouped(task=name), [])
        take(metrics, Message(), [events.TaskStateChanged(task=name, state=TaskState.FINISHED, at=200.0)])
    take(metrics, Message(), [events.TaskStateChanged(task="bert", state=TaskState.STARTING, at=210.0)])
    tasks = lambda: {labels[-1] for labels in series(metrics) if labels[0] == "unicron_regroups_total"}  # noqa: E731
    assert tasks() == {"gpt", "bert"}, "who scrapes sees how it ended"
    take(metrics, events.TaskStateChanged(task="bert", state=TaskState.RUNNING, at=201.0 + KEEP_S), [])
    assert tasks() == {"bert"}
    assert not any("gpt" in labels for labels in series(metrics))


def test_beyond_so_many_names_the_rest_is_other(monkeypatch):
    monkeypatch.setattr("unicron.service.metrics.MOST_NAMES", 3)
    metrics = Metrics("detector")
    for number in range(9):
        take(metrics, fact(), [failure(task=f"t{number}", node=f"n{number}")])
    failures = {labels: value for labels, value in series(metrics).items() if labels[0] == "unicron_failures_total"}
    assert len(failures) == 4
    assert failures["unicron_failures_total", "exited_abnormally", OTHER, "2", OTHER] == 6


def test_an_agent_that_names_tasks_that_there_are_not_makes_no_series_of_them():
    metrics = Metrics("transition")
    for number in range(9):
        take(metrics, regrouped(task=f"made-up-{number}"))
    assert series(metrics)["unicron_regroups_total", OTHER] == 9


def test_chains_without_an_end_are_forgotten(monkeypatch):
    monkeypatch.setattr("unicron.service.metrics.MOST_CHAINS", 5)
    metrics = Metrics("transition")
    for number in range(100):
        take(metrics, failure(correlation=f"c{number}"), [])
    assert list(metrics._since) == [f"c{number}" for number in range(95, 100)]


NODES = 16_384


def registry_of(nodes):
    core = RegistryCore()
    for number in range(nodes):
        slots = [Slot(index=index) for index in range(8)]
        name = f"node-{number}"
        core.handle(events.NodeJoined(node=name, source=name, incarnation="a", host="h", slots=slots, id=f"j{number}"))
    core.answer(SubmitTask(spec=TaskSpec(name="gpt", command=["x"], max_workers=2, microbatches=2)))
    return core


def test_how_many_series_16384_nodes_give():
    core = registry_of(NODES)
    status = core.answer(GetStatus())[0].status
    assert len(status.nodes) == NODES
    registry = Metrics("registry", lambda: [*load_samples("registry", LOAD), *status_samples(status)])
    found = series(registry)
    assert found["unicron_nodes", "up"] == NODES
    assert found["unicron_tasks", "waiting"] == 1
    assert count(registry) < 60, "what services tell does not grow with the nodes"

    detector = Metrics("detector")
    for view in status.nodes:
        take(detector, fact(), [failure(task="", node=view.node, severity=Severity.SEV1)])
    assert sum(key[0] == "unicron_failures_total" for key in series(detector)) == NODES, "one each where each failed"

    plain, gpus = count(an_agent().metrics), count(an_agent(gpus=8).metrics)
    assert (plain, gpus) == (AGENT_SERIES, AGENT_SERIES + 72)
    assert f"{plain * NODES:,}" in PAGE
    assert f"{gpus * NODES:,}" in PAGE


AGENT_SERIES = 10
"""Of an agent with workers of one task on which nothing has happened yet: with the six of its process."""

PAGE = (ROOT / "docs" / "reference" / "metrics.md").read_text()
LOAD = Load(waiting=3, position=70, dropped=2, disbelieved=1)


# --- what is read ----------------------------------------------------------------------------------------------------


class Quiet:
    unpublished = 4


def an_agent(gpus=0):
    slots = [Slot(index=0), Slot(index=1)]
    card = events.NodeJoined(node="n1", incarnation="", host="h", slots=slots, rendezvous="h:1", pid=7)
    core = AgentCore(card, "b", 0, StallLimits())
    found = [
        WorkerProcess(worker=name, task="gpt", slot=slot, pid=slot + 1) for slot, name in enumerate(("gpt-1", "gpt-2"))
    ]
    measured = AgentMetrics(core, Quiet(), lambda: 77.0)
    for message in [*core.handle(Adopted(found), 0.0), events.NodeHeartbeat(node="n1", incarnation="a")]:
        if isinstance(message, Message):
            measured.observe(message)
    core.workers["gpt-2"].iteration = 1
    gauges = {"temperature_c": 61, "power_w": 300.5, "memory_used": 10**10, "throttled": 0, "ecc_corrected": 3}
    errors = {"ecc_uncorrected": 1, "rows_remapped": 1, "pcie_replays": 2, "nvlink_replays": 1, "nvlink_crc": 4}
    told = [Gpu(slot=slot, **gauges, **errors) for slot in range(gpus)]
    for message in core.handle(Sampled(tuple(told)), 1.0) if told else ():
        measured.observe(message)
    return measured


def test_an_agent_tells_its_workers_its_heartbeat_its_gpus_and_what_went_wrong():
    measured = an_agent(gpus=1)
    measured.observe(fact(events.WorkerExited, signal=9))
    measured.observe(events.CommandRefused(node="n1", command="c", reason="stale"))
    measured.record_fetch(0.25)
    found = series(measured.metrics)
    assert found["unicron_agent_workers", "n1", "gpt"] == 2
    assert found["unicron_agent_iteration", "n1", "gpt"] == 1
    assert found["unicron_agent_heartbeat_timestamp_seconds", "n1"] == 77.0
    assert found["unicron_queue_depth", "n1"] == 4
    assert found["unicron_gpu_temperature_celsius", "n1", "0"] == 61
    assert found["unicron_gpu_nvlink_errors_total", "n1", "0"] == 5
    assert found["unicron_worker_exits_total", "signal", "n1"] == 1
    assert found["unicron_commands_refused_total", "n1"] == 1
    assert found["unicron_phase_seconds_sum", "fetch", ""] == 0.25
    measured.observe(GpusSampled(node="n1", gpus=[]))
    assert not any(key[0].startswith("unicron_gpu") for key in series(measured.metrics)), "gone with the GPU"


def test_a_service_that_waits_tells_that_and_an_active_one_its_load():
    assert list(load_samples("planner", None)) == [("unicron_active", ("planner",), 0.0)]
    found = {sample.family: sample.value for sample in load_samples("planner", LOAD)}
    dropped = {"unicron_telemetry_dropped_total": 2, "unicron_telemetry_disbelieved_total": 1}
    assert found == {"unicron_active": 1.0, "unicron_queue_depth": 3, "unicron_journal_position": 70, **dropped}


# --- scrapes ---------------------------------------------------------------------------------------------------------


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


async def test_a_scrape_gets_all_of_it_read_on_the_loop_and_a_taken_port_is_refused():
    port, threads = free_port(), []

    def read():
        threads.append(asyncio.current_task() is not None)
        return load_samples("planner", LOAD)

    metrics = Metrics("planner", read)
    take(metrics, Started(token=1), [])
    metrics.serve(("127.0.0.1", port))
    found = await asyncio.to_thread(scrape, port)
    assert found["unicron_queue_depth"].samples[0].value == 3
    assert found["unicron_lease_changes"].samples[0].labels == {"source": "planner"}
    assert found["process_cpu_seconds"].samples[0].value > 0
    assert threads == [True], "a state is read where it is changed"
    with pytest.raises(InvalidInputError, match=rf"can't listen on 127.0.0.1:{port}: .*in use.*another port"):
        Metrics("detector").serve(("127.0.0.1", port))


async def test_a_process_that_hangs_is_not_told_to_be_well_and_who_connects_and_says_nothing_is_shown_out(monkeypatch):
    monkeypatch.setattr("unicron.service.metrics.SCRAPE_S", 0.1)
    port = free_port()
    Metrics("planner").serve(("127.0.0.1", port))
    with ThreadPoolExecutor() as threads, pytest.raises((urllib.error.URLError, ConnectionError)):
        threads.submit(scrape, port).result()  # on the loop itself, which hangs for as long
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize(
    ("text", "address"),
    [("", None), ("9464", ("127.0.0.1", 9464)), ("0.0.0.0:1", ("0.0.0.0", 1)), ("[::1]:65535", ("::1", 65535))],
)
def test_an_address_is_a_port_or_a_host_and_a_port(text, address):
    assert Settings.parse({"metrics": text}).metrics_address == address


@pytest.mark.parametrize("text", ["host", "0", "65536", "127.0.0.1:", "a:b", "-1", "٣"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(InvalidInputError, match=r"UNICRON_METRICS.*give a port from 1 to 65535"):
        Settings.parse({"metrics": text})


def test_each_family_that_is_made_or_read_is_in_the_catalogue_and_named_as_prometheus_wants():
    labels = {*("task", "node", "severity", "cause", "source", "state", "slot", "phase", "command", "channel", "kind")}
    for name, family in FAMILIES.items():
        assert name.startswith("unicron_")
        assert name.endswith("_total") == (family.kind == "counter"), name
        assert set(family.labels) <= labels
