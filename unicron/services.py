"""The services of a cluster, by name: in subjects, leases and fencing, and as `python -m unicron_NAME`."""

SERVICES = ("registry", "detector", "planner", "transition", "straggler", "notifier")
"""In the order in which they are started; users and docs see them in it too."""

PROVISIONER = "provisioner"
"""The service that creates and ends machines, where there are pools of them."""

NAMED = (*SERVICES, PROVISIONER)
"""All that have a core: subjects, leases and rights of their own, whether they run in a cluster or not."""

ENROLLER = "enroller"
"""The process that lets nodes in by join tokens. It has the cluster's keys, so it runs where they are, and only there.
"""

ANSWERING = (*NAMED, ENROLLER)
"""All beside nodes that are asked, and take orders, on a subject of their own."""

CONSOLE = "console"
"""The process that shows a cluster to browsers: it decides nothing, holds no lease, and may run several times."""
