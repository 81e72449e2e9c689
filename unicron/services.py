"""The services of a cluster, by name: in subjects, leases and fencing, and as `python -m unicron_NAME`."""

SERVICES = ("registry", "detector", "planner", "transition", "straggler", "notifier")
"""In the order in which they are started; users and docs see them in it too."""

CONSOLE = "console"
"""Who shows a cluster to browsers: it decides nothing, so it holds no lease, and several may run."""
