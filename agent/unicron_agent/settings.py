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
        node: name of this node, one token of letters, digits, '-' and '_'; where it comes with a join token, empty
            for the scheduler's (SLURMD_NODENAME), else its host name.
        slots: CPU slots to offer where neither NVML nor amd-smi finds a GPU.
        run_dir: where logs and the records of running workers are kept.
        host: address at which other nodes reach this one; empty: the one from which it reaches the bus.
        fabric_key: path of the file with the key that opens nodes to one another, which only we may read; empty for
            none: then they are open to everybody.
        join_token_file: path of the file with a join token, which only we may read: with it a node that no one has
            named gets its keys, once; they lie in its run folder from then on, and the token is not needed any more.
        rack: that the node is in, or the switch it is behind: copies of its states are kept elsewhere; empty: as the
            topology file or Slurm says.
        domain: of NVLink that the node is in: tensor-parallel groups stay inside of one; empty: as the topology file,
            Slurm or the driver of the GPUs says.
        topology: file that says in which racks and NVLink domains nodes are (docs/howto/racks.md); empty for none.
        machine: id of this machine at the provisioner, which has asked for it; empty where a person has started it.
        pool: that this node belongs to; empty for none.
        heartbeat_s: seconds between signs of life.
        state_limit: bytes that saved states may take in this node's memory; 0: half of the file system they lie in.
        asleep_s: seconds without progress after which a worker counts as hung whose processes all sleep meanwhile,
            where no other of its task here does so.
        hang_s: seconds without progress after which any worker that still answers counts as hung.
        between_s: seconds that a script may be busy between two iterations, with an evaluation, say.
        kernel_log: the kernel's log of this machine, /dev/kmsg or a file that a log daemon writes; empty: not watched.
        rules: folder of TOML files with rules of your own, tried before ours (docs/howto/machines.md); empty for none.
        leave_s: seconds that it takes at most to hand over its states, once its node is announced to go.
        disk_free: share of a file system, or of its inodes, below which an alert says that it is nearly full; 50 GiB
            are enough of any.
        ahead_s: seconds ahead of which an alert says that a file system or the memory of a GPU will be full.
        gpu_free: share of a GPU's memory below which an alert says that it is nearly full; 0: never.
        memory_ahead_s: seconds ahead of which an alert says that workers whose memory grows without end will fill it.
        replace_s: seconds ahead of which one of them is replaced, at the end of an iteration; 0: never.
        chaos: whether the agent breaks things of its own when asked to.
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
