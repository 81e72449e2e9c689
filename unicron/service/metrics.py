"""The metrics of a process: derived here, and nowhere else, from its messages in and out and its state.

Each message is counted by the process that says it, once that is committed, so that sums over processes count it once.
What can be read when somebody asks is not counted but read then, on the event loop of the process: so it is right from
the start, also after a restart.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from unicron.contracts.answers import Load, Status
from unicron.contracts.base import Message, Started
from unicron.contracts.commands import Command, Regroup, StartWorker
from unicron.contracts.events import (
    Alert,
    CommandRefused,
    DeadLetter,
    FailureDetected,
    IterationFinished,
    PlanDecided,
    Regrouped,
    TaskRecovered,
    TaskStateChanged,
    WorkerExited,
)
from unicron.contracts.notices import NotificationFailed, NotificationSent
from unicron.contracts.tasks import NodeState, TaskState
from unicron.errors import InvalidInputError
from unicron.metric_definitions import COUNTER, FAMILIES, HISTOGRAM, MetricSample
from unicron.settings import PREFIX
from unicron.subjects import TELEMETRY

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Seconds of phases: from a decision to a start of many processes."""

MOST_CHAINS = 10_000
"""Chains whose beginning is remembered, to measure the seconds since then; older ones are forgotten."""

MOST_NAMES = 20_000
"""Different tasks, and nodes, that one process names; what is said of others counts under `OTHER`."""

OTHER = "other"

KEEP_S = 600.0
"""How long an ended task's series are kept, so that a scrape sees what ended it. Then they are removed."""

SCRAPE_S = 5.0
"""How long a scrape waits for a busy process, before it fails."""


class Metrics:
    """The metrics of one process.

    Args:
        process: name of the service, or of the node.
        read: returns what is to be read whenever somebody asks; called on the event loop.

    Attributes:
        registry: of prometheus-client.

    Raises:
        InvalidInputError: prometheus-client is not installed.
    """

    def __init__(self, process: str, read: Callable[[], Iterable[MetricSample]] = tuple) -> None:
        try:
            import prometheus_client as client  # noqa: PLC0415 only processes with metrics need it
        except ImportError as error:
            raise InvalidInputError(f"{PREFIX}METRICS needs a package: pip install '.[metrics]'") from error
        client.disable_created_metrics()  # type: ignore[no-untyped-call] # a series more of each counter
        self.registry = client.CollectorRegistry()
        self._process, self._read = process, read
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lag: float | None = None
        self._since = OrderedDict[str, float]()
        self._ended: dict[str, float] = {}
        self._names: dict[str, set[str]] = {"task": set(), "node": set()}
        self._made: dict[str, Any] = {}
        self._client = client
        client.ProcessCollector(registry=self.registry)
        self.registry.register(_Read(self._asked))
        self._said: Mapping[type[Message], Callable[[Message, Any], None]] = {
            FailureDetected: self._failed,
            PlanDecided: self._planned,
            TaskRecovered: self._recovered,
            DeadLetter: lambda _, __: self._count("unicron_dead_letters_total", self._process),
            Alert: self._alerted,
            CommandRefused: lambda _, __: self._count("unicron_commands_refused_total", self._process),
            WorkerExited: self._exited,
            NotificationSent: lambda _, each: self._count("unicron_notifications_total", each.channel, "sent"),
            NotificationFailed: lambda _, each: self._count("unicron_notifications_total", each.channel, "failed"),
        }
        heard: dict[str, dict[type[Message], Callable[[Any], None]]] = {
            "registry": {IterationFinished: self._iterated},
            "planner": {FailureDetected: self._record_begin},
            "transition": {FailureDetected: self._record_begin, Regrouped: self._regrouped},
        }
        self._heard = heard.get(process, {})

    # --- messages ----------------------------------------------------------------------------------------------------

    def count_received(self, message: Message, lag_s: float | None = None) -> None:
        """Count a message that was taken in, and could be used.

        Args:
            message: of somebody known.
            lag_s: how old it was then, where it stands in the journal.
        """
        kind = type(message)
        if kind is Started:
            self._count("unicron_lease_changes_total", self._process)
        elif isinstance(message, TaskStateChanged):
            self._changed(message)
        if handler := self._heard.get(kind):
            handler(message)
        if self._process == "detector" and kind not in TELEMETRY:
            self._record_begin(message)
        if lag_s is not None:
            self._lag = max(0.0, lag_s)

    def count_sent(self, cause: Message, message: Message) -> None:
        """Count a message that this process said because of another."""
        if handler := self._said.get(type(message)):
            handler(cause, message)
        elif isinstance(message, Command):
            self._count("unicron_commands_total", type(message).__name__)
            if isinstance(message, Regroup | StartWorker):
                self._observe_end("decide", message)
        elif isinstance(message, TaskStateChanged):
            self._changed(message)

    def observe_phase(self, phase: str, task: str, seconds: float) -> None:
        """Note how long a phase of a recovery took."""
        self._of("unicron_phase_seconds", phase, self._name("task", task)).observe(max(0.0, seconds))

    def _failed(self, cause: Message, failure: FailureDetected) -> None:
        task, node = self._name("task", failure.task), self._name("node", failure.node)
        self._count("unicron_failures_total", str(int(failure.severity)), str(failure.status), task, node)
        self.observe_phase("detect", failure.task, failure.at - self._since.get(failure.correlation, cause.at))

    def _planned(self, _: Message, decided: PlanDecided) -> None:
        self._count("unicron_plans_total", str(decided.plan.cause.kind))
        self._observe_end("plan", decided)

    def _recovered(self, _: Message, recovered: TaskRecovered) -> None:
        self._count("unicron_recoveries_total", self._name("task", recovered.task))
        self.observe_phase("resume", recovered.task, recovered.seconds)

    def _alerted(self, _: Message, alert: Alert) -> None:
        if not alert.over:
            self._count("unicron_alerts_total", self._process, str(alert.kind))

    def _exited(self, _: Message, exited: WorkerExited) -> None:
        by = "signal" if exited.signal is not None else "exit"
        cause = "finished" if exited.finished else "ordered" if exited.expected else by
        self._count("unicron_worker_exits_total", self._process, cause)

    def _iterated(self, iterated: IterationFinished) -> None:
        task = self._name("task", iterated.task)
        self._count("unicron_task_iterations_total", task)
        self._of("unicron_task_training_seconds_total", task).inc(iterated.seconds)

    def _regrouped(self, regrouped: Regrouped) -> None:
        task = regrouped.task if regrouped.task in self._names["task"] else OTHER  # any agent may name any task
        self._count("unicron_regroups_total", task)
        if regrouped.rank == 0:  # all report the same
            self._of("unicron_recomputed_microbatches_total", task).inc(regrouped.recomputed)
        self.observe_phase("regroup", task, regrouped.seconds)

    def _record_begin(self, message: Message) -> None:
        """Remember when a chain began, here: with its first message, or its first failure."""
        self._since.setdefault(message.correlation or message.id, message.at)
        if len(self._since) > MOST_CHAINS:
            self._since.popitem(last=False)

    def _observe_end(self, phase: str, message: Message) -> None:
        """Note the seconds since a chain began, the first time that something comes of it."""
        since = self._since.pop(message.correlation, None)
        if since is not None:
            self.observe_phase(phase, str(getattr(message, "task", "")), message.at - since)

    # --- series ------------------------------------------------------------------------------------------------------

    def _changed(self, change: TaskStateChanged) -> None:
        """Remove the series of tasks that ended a while ago; one that was launched again is not among them."""
        if change.state.ended:
            self._ended[change.task] = change.at
        else:
            self._ended.pop(change.task, None)
            self._name("task", change.task)
        for task, at in list(self._ended.items()):
            if change.at - at > KEEP_S:
                del self._ended[task]
                self._names["task"].discard(task)
                for name, made in self._made.items():
                    if "task" in FAMILIES[name].labels:
                        made.remove_by_labels({"task": task})

    def _name(self, label: str, name: str) -> str:
        names = self._names[label]
        if name and name not in names:
            if len(names) >= MOST_NAMES:
                return OTHER
            names.add(name)
        return name

    def _count(self, name: str, *labels: str) -> None:
        self._of(name, *labels).inc()

    def _of(self, name: str, *labels: str) -> Any:
        made = self._made.get(name)
        if made is None:
            family, client = FAMILIES[name], self._client
            if family.kind == HISTOGRAM:
                made = client.Histogram(name, family.text, family.labels, registry=self.registry, buckets=BUCKETS)
            else:
                made = client.Counter(name, family.text, family.labels, registry=self.registry)
            self._made[name] = made
        return made.labels(*labels)

    # --- scrapes -----------------------------------------------------------------------------------------------------

    def serve(self, address: tuple[str, int]) -> None:
        """Answer scrapes at host and port until the process ends, in a thread.

        Raises:
            InvalidInputError: nobody can listen there.
        """
        host, port = address
        self._loop = asyncio.get_running_loop()
        try:
            server, _ = self._client.start_http_server(port, host, self.registry)
            # a client that connects and sends nothing keeps no thread
            server.RequestHandlerClass.timeout = SCRAPE_S  # type: ignore[attr-defined]
        except (OSError, OverflowError) as error:
            raise InvalidInputError(
                f"{PREFIX}METRICS: can't listen on {host}:{port}: {error}; give another port of this machine"
            ) from error

    def _asked(self) -> list[MetricSample]:
        if self._loop is None:
            return self._samples()
        return asyncio.run_coroutine_threadsafe(self._on_the_loop(), self._loop).result(SCRAPE_S)

    async def _on_the_loop(self) -> list[MetricSample]:
        return self._samples()

    def _samples(self) -> list[MetricSample]:
        lag = [] if self._lag is None else [MetricSample("unicron_journal_lag_seconds", (self._process,), self._lag)]
        return [*self._read(), *lag]


class _Read:
    """The collector that prometheus-client calls at each scrape."""

    def __init__(self, asked: Callable[[], list[MetricSample]]) -> None:
        self._asked = asked

    def describe(self) -> list[Any]:
        """Return nothing: nobody else has these names."""
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # noqa: PLC0415 as above

        found: dict[str, Any] = {}
        for name, labels, value in self._asked():
            if name not in found:
                family = FAMILIES[name]
                kind = CounterMetricFamily if family.kind == COUNTER else GaugeMetricFamily
                found[name] = kind(name, family.text, labels=family.labels)
            found[name].add_metric(labels, value)
        return iter(found.values())


def load_samples(service: str, load: Load | None) -> Iterator[MetricSample]:
    """Return the samples of a service's backlog; `load` is None of an instance that only waits."""
    who = (service,)
    yield MetricSample("unicron_active", who, float(load is not None))
    if load is not None:
        yield MetricSample("unicron_queue_depth", who, load.waiting)
        yield MetricSample("unicron_journal_position", who, load.position)
        yield MetricSample("unicron_telemetry_dropped_total", who, load.dropped)
        yield MetricSample("unicron_telemetry_disbelieved_total", who, load.disbelieved)


def status_samples(status: Status) -> Iterator[MetricSample]:
    """Return the samples of a cluster: its nodes, its tasks, and the plan in force."""
    for state in NodeState:
        yield MetricSample("unicron_nodes", (state.value,), sum(view.state is state for view in status.nodes))
    for kind in TaskState:
        yield MetricSample("unicron_tasks", (kind.value,), sum(view.state is kind for view in status.tasks))
    yield MetricSample("unicron_waf", (), sum(view.waf for view in status.tasks))
    yield MetricSample("unicron_planned_waf", (), status.plan.waf if status.plan else 0.0)
    planned = {share.task: share.waf for share in status.plan.shares} if status.plan else {}
    for view in status.tasks:
        if view.state.ended:
            continue
        task = (view.spec.name,)
        yield MetricSample("unicron_task_waf", task, view.waf)
        yield MetricSample("unicron_task_planned_waf", task, planned.get(view.spec.name, 0.0))
        yield MetricSample("unicron_task_workers", task, len(view.members))
        yield MetricSample("unicron_task_iteration", task, view.iteration)
        yield MetricSample("unicron_task_iteration_seconds", task, view.iteration_s)
        if view.loss is not None:
            yield MetricSample("unicron_task_loss", task, view.loss)
