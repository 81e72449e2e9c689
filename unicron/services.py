"""The services of a cluster, by name: in subjects, leases and fencing, and as `python -m unicron_NAME`."""

SERVICES = ("registry", "detector", "planner", "transition", "straggler", "notifier")
"""In the order in which they are started; users and docs see them in it too."""

PROVISIONER = "provisioner"
"""Who has machines come and go, where there are pools of them."""

NAMED = (*SERVICES, PROVISIONER)
"""All that have a core: subjects, leases and rights of their own, whether they run in a cluster or not."""

CONSOLE = "console"
"""Who shows a cluster to browsers: it decides nothing, so it holds no lease, and several may run."""
