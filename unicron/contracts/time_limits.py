"""The time limits of a cluster, in seconds, shortest first: all that waits for a sign of life is made from these.

They are one table since they depend on one another: who is waited for at one place must not be given up sooner at
another. docs/reference/time-limits.md explains each; a test holds that page against this.
"""

COLLECTIVE_HOLD_S = 0.3
"""For what explains a broken collective."""

ANSWER_S = 0.35
"""For a worker's answer to its agent."""

STOPPED_S = 0.7
"""For a worker whose process is stopped."""

GRACE_S = 1.0
"""For an agent whose connection ended."""

LEASE_S = 2.0
"""For an active service that is gone."""

ASLEEP_S = 2.0
"""For a worker whose processes all sleep."""

HEARTBEATS_S = 3.0
"""For a silent node."""

PING_S = HEARTBEATS_S / 6
"""Between pings of the bus's server, which ends a connection after two without an answer: before the node is given up,
so that its agent has connected again when it is back; what that says is no more than the silence itself."""

HANG_S = 20.0
"""For a worker in an iteration."""

LEAVE_S = 20.0
"""For others to take what a node has that is to go."""

REGROUP_S = 30.0
"""For the members of a new membership."""

STATES_S = 60.0
"""For nodes that are gone, with states that nobody else has."""

START_S = 180.0
"""For a worker to build its model."""

IDLE_S = 600.0
"""For slots, with the state of a task in memory."""

WINDOW_S = 600.0
"""In which failures count together."""

TRIAL_S = 900.0
"""For what comes of a trial, which has a low priority, so that it may wait for a processor for long."""

SILENCE_S = 1800.0
"""For a script without a session of which no rank shows any sign of life."""

BETWEEN_S = 1800.0
"""For a script between two iterations."""
