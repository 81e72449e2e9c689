"""The settings of an agent."""

from typing import ClassVar

from unicron.contracts import time_limits
from unicron.errors import InvalidInputError
from unicron.settings import PREFIX, Settings
from unicron_agent.watchdogs.limits import WatchdogLimits

SLOWEST_BEAT_S = 1.0
"""Detectors give a node up that is silent for three; in a large cluster the registry has agents beat more rarely."""


class AgentSettings(Settings, kw_only=True, frozen=True):
    """The agent of one node.

    Attributes:
        node: name of this node: letters, digits, '-' and '_'. With a join token it may be empty: then it is the
            scheduler's (SLURMD_NODENAME), else the host name.
        slots: CPU slots to offer where neither NVML nor amd-smi finds a GPU.
        run_dir: where logs and the records of running workers are kept.
        host: address at which other nodes reach this one; empty: the one from which it reaches the bus.
        fabric_key: file with the key that opens nodes to one another (mode 600). Empty: this node is open to everybody.
        join_token_file: file with a join token (mode 600). A node without keys gets them by it, once, and keeps them in
            its run folder.
        rack: rack or switch of this node. Copies of its states are kept in another one. Empty: as the topology file or
            Slurm says.
        domain: NVLink domain of this node. Tensor-parallel groups stay within one. Empty: as the topology file, Slurm
            or the GPUs' driver says.
        topology: file that names the racks and NVLink domains of nodes (docs/howto/racks.md).
        machine: id of this machine at the provisioner that asked for it. Empty: a person has started it.
        pool: pool of this node. Empty: none.
        heartbeat_s: seconds from one heartbeat to the next.
        state_limit: bytes that saved states may take in this node's memory; 0: half of the file system they lie in.
        asleep_s: seconds without progress after which a worker counts as hung if all its processes sleep, and no other
            worker of its task on this node does.
        hang_s: seconds without progress after which any worker that still answers counts as hung.
        between_s: seconds that a script may take between two iterations, for example for an evaluation.
        kernel_log: the kernel's log of this machine: /dev/kmsg, or a file of a log daemon. Empty: not watched.
        rules: folder of TOML files with rules of your own, tried before Unicron's (docs/howto/machines.md).
        leave_s: most seconds in which an agent that is to end hands its states over.
        disk_free: free share of a file system, or of its inodes, below which there is an alert. 50 GiB always do.
        ahead_s: an alert comes this many seconds before a file system or a GPU's memory will be full.
        gpu_free: free share of a GPU's memory below which there is an alert. 0: never.
        memory_ahead_s: an alert comes this many seconds before growing workers will fill the machine's memory.
        replace_s: this many seconds before, one of them is replaced, at the end of an iteration. 0: never.
        chaos: whether the agent breaks things of its own when `unicron chaos` asks.
    """

    process: ClassVar[str] = "unicron-agent"

    node: str = ""
    slots: int = 0
    run_dir: str = ".unicron/node"
    host: str = ""
    fabric_key: str = ""
    join_token_file: str = ""
    rack: str = ""
    domain: str = ""
    topology: str = ""
    machine: str = ""
    pool: str = ""
    heartbeat_s: float = 0.5
    state_limit: int = 0
    asleep_s: float = time_limits.ASLEEP_S
    hang_s: float = time_limits.HANG_S
    between_s: float = time_limits.BETWEEN_S
    kernel_log: str = ""
    rules: str = ""
    leave_s: float = time_limits.LEAVE_S
    disk_free: float = 0.05
    ahead_s: float = WatchdogLimits().ahead_s
    gpu_free: float = WatchdogLimits().gpu_free
    memory_ahead_s: float = WatchdogLimits().memory_ahead_s
    replace_s: float = WatchdogLimits().replace_s
    chaos: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_seconds("heartbeat_s", most=SLOWEST_BEAT_S)
        self.check_seconds("asleep_s", "hang_s", "between_s")
        self.check_seconds("ahead_s", "memory_ahead_s")
        for name in ("disk_free", "gpu_free"):
            if not 0 <= getattr(self, name) < 1:  # not a number is no share either
                raise InvalidInputError(
                    f"{PREFIX}{name.upper()} {getattr(self, name):g}: give a share from 0 to below 1"
                )
        if self.replace_s:
            self.check_seconds("replace_s")
            self.check_order("replace_s", "memory_ahead_s", "a worker would be replaced before there is an alert")
        self.check_order("hang_s", "between_s", "a script would have less time between two iterations than in one")

    @property
    def watchdogs(self) -> WatchdogLimits:
        """The watchdogs' part of the settings."""
        return WatchdogLimits(self.ahead_s, self.gpu_free, self.memory_ahead_s, self.replace_s)

    @property
    def log_name(self) -> str:
        """The agent with its node: those of several nodes may log to one place."""
        return f"agent.{self.node}"
