"""The metrics that processes export to Prometheus: names, descriptions, and which process has which."""

from typing import NamedTuple

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"


class Family(NamedTuple):
    """One metric.

    Attributes:
        name: of it, whole.
        kind: counter, gauge or histogram.
        labels: in the order in which values are given.
        teller: which processes have it: "services", "agents", "all", or the name of a service.
        text: what it is, one line.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    teller: str
    text: str


class MetricSample(NamedTuple):
    """A sample of a scrape: a value of a family, with the values of its labels."""

    family: str
    labels: tuple[str, ...]
    value: float


FAMILIES = {
    family.name: family
    for family in (
        Family(
            "unicron_failures_total",
            COUNTER,
            ("severity", "cause", "task", "node"),
            "detector",
            "Failures, by severity (1 costs the node, 2 the process, 3 a new attempt) and `FailureStatus`.",
        ),
        Family("unicron_commands_total", COUNTER, ("command",), "transition", "Commands to agents, by type."),
        Family("unicron_commands_refused_total", COUNTER, ("node",), "agents", "Commands that an agent refused."),
        Family("unicron_plans_total", COUNTER, ("cause",), "planner", "Plans, by what they answer."),
        Family("unicron_regroups_total", COUNTER, ("task",), "transition", "Workers that joined a new membership."),
        Family(
            "unicron_recomputed_microbatches_total",
            COUNTER,
            ("task",),
            "transition",
            "Microbatches that were lost with a rank and computed again, once for each regroup that says so.",
        ),
        Family("unicron_recoveries_total", COUNTER, ("task",), "transition", "Returns to full membership."),
        Family(
            "unicron_round_trip_seconds",
            GAUGE,
            ("source",),
            "console",
            "Seconds that a fact takes into the journal and through the service; infinite if it does not arrive.",
        ),
        Family("unicron_console_pages", GAUGE, (), "console", "Pages that are open in a browser."),
        Family(
            "unicron_task_gpu_seconds_total",
            COUNTER,
            ("task", "phase"),
            "console",
            "GPU time by phase since the journal begins; `training` over all is goodput. No task: free slots.",
        ),
        Family("unicron_dead_letters_total", COUNTER, ("source",), "all", "Messages put aside, reported by `source`."),
        Family(
            "unicron_notifications_total",
            COUNTER,
            ("channel", "state"),
            "notifier",
            "Notices to people, by channel of its file; `sent` or `failed`.",
        ),
        Family(
            "unicron_alerts_total",
            COUNTER,
            ("source", "kind"),
            "all",
            "What a person should look at; `kind` is the watchdog (docs/reference/watchdogs.md), or `other`.",
        ),
        Family(
            "unicron_lease_changes_total", COUNTER, ("source",), "services", "How often this instance took the lease."
        ),
        Family(
            "unicron_worker_exits_total",
            COUNTER,
            ("node", "cause"),
            "agents",
            "Workers that ended: `ordered`, `finished`, by a `signal`, or with an `exit` status.",
        ),
        Family(
            "unicron_phase_seconds",
            HISTOGRAM,
            ("phase", "task"),
            "all",
            "Seconds of a recovery: `detect` from the first fact of the chain to the failure, `plan` from there to a "
            "plan, `decide` from the failure to the first command that forms a membership or starts a worker, "
            "`regroup` from a worker's interruption to its new group, `fetch` of a state by an agent, and `resume` "
            "from the failure to full membership.",
        ),
        Family("unicron_task_iterations_total", COUNTER, ("task",), "registry", "Iterations that were done."),
        Family(
            "unicron_task_training_seconds_total",
            COUNTER,
            ("task",),
            "registry",
            "Seconds of iterations that were done; its rate is the goodput of the task.",
        ),
        Family("unicron_active", GAUGE, ("source",), "services", "1 while this instance holds the service's lease."),
        Family(
            "unicron_queue_depth", GAUGE, ("source",), "all", "Inputs that wait; of an agent, facts not yet stored."
        ),
        Family(
            "unicron_journal_position",
            GAUGE,
            ("source",),
            "services",
            "Position of the last journal entry that the service has read.",
        ),
        Family(
            "unicron_journal_lag_seconds",
            GAUGE,
            ("source",),
            "services",
            "Age of the last fact that it processed, by the clocks of both.",
        ),
        Family(
            "unicron_telemetry_dropped_total",
            COUNTER,
            ("source",),
            "services",
            "Telemetry that was dropped since too much waited.",
        ),
        Family(
            "unicron_telemetry_disbelieved_total",
            COUNTER,
            ("source",),
            "services",
            "Telemetry of workers that are elsewhere, or unknown.",
        ),
        Family("unicron_nodes", GAUGE, ("state",), "registry", "Nodes, by state."),
        Family("unicron_tasks", GAUGE, ("state",), "registry", "Tasks, by state."),
        Family(
            "unicron_waf", GAUGE, (), "registry", "Weighted FLOP/s that all tasks achieved in their last iterations."
        ),
        Family("unicron_planned_waf", GAUGE, (), "registry", "Weighted FLOP/s that the plan in force expects."),
        Family(
            "unicron_task_waf",
            GAUGE,
            ("task",),
            "registry",
            "Weighted FLOP/s of the last iteration; 0 at rest.",
        ),
        Family("unicron_task_planned_waf", GAUGE, ("task",), "registry", "Weighted FLOP/s that the plan expects."),
        Family("unicron_task_workers", GAUGE, ("task",), "registry", "Workers that compute for the task."),
        Family("unicron_task_iteration", GAUGE, ("task",), "registry", "Last iteration that was done."),
        Family("unicron_task_iteration_seconds", GAUGE, ("task",), "registry", "Seconds of the last iteration."),
        Family("unicron_task_loss", GAUGE, ("task",), "registry", "Mean loss of the last iteration."),
        Family("unicron_agent_workers", GAUGE, ("node", "task"), "agents", "Workers that live on this node."),
        Family("unicron_agent_iteration", GAUGE, ("node", "task"), "agents", "The highest iteration of its workers."),
        Family(
            "unicron_agent_heartbeat_timestamp_seconds", GAUGE, ("node",), "agents", "Unix time of its last heartbeat."
        ),
        Family("unicron_gpu_temperature_celsius", GAUGE, ("node", "slot"), "agents", "Temperature of the GPU."),
        Family("unicron_gpu_power_watts", GAUGE, ("node", "slot"), "agents", "Power that the GPU draws."),
        Family("unicron_gpu_memory_used_bytes", GAUGE, ("node", "slot"), "agents", "GPU memory in use."),
        Family(
            "unicron_gpu_throttled",
            GAUGE,
            ("node", "slot"),
            "agents",
            "Why the clock is low, as the bits of NVML.",
        ),
        Family("unicron_gpu_ecc_corrected_total", COUNTER, ("node", "slot"), "agents", "Memory errors, corrected."),
        Family(
            "unicron_gpu_ecc_uncorrected_total",
            COUNTER,
            ("node", "slot"),
            "agents",
            "Memory errors, uncorrected.",
        ),
        Family("unicron_gpu_rows_remapped_total", COUNTER, ("node", "slot"), "agents", "Memory rows replaced."),
        Family("unicron_gpu_pcie_replays_total", COUNTER, ("node", "slot"), "agents", "PCIe packets sent again."),
        Family(
            "unicron_gpu_nvlink_errors_total",
            COUNTER,
            ("node", "slot"),
            "agents",
            "NVLink replays and errors.",
        ),
    )
}
"""All metrics of Unicron, by name. Those of the process itself, such as its CPU, are prometheus-client's own."""
