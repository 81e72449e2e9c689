"""What an agent can be told."""

from typing import ClassVar

from unicron.settings import Settings

SLOWEST_BEAT_S = 1.0
"""Detectors give a node up that is silent for three; in a large cluster both are told that it beats more rarely."""


class AgentSettings(Settings, kw_only=True, frozen=True):
    """The agent of one node.

    Attributes:
        node: name of this node, one token of letters, digits, '-' and '_'.
        slots: CPU slots to offer where NVML finds no GPU.
        run_dir: where logs and the records of running workers are kept.
        host: address at which other nodes reach this one; empty: the one from which it reaches the bus.
        fabric_key: path of the file with the key that opens nodes to one another, which only we may read; empty for
            none: then they are open to everybody.
        rack: that the node is in, or the switch it is behind: copies of its states are kept elsewhere.
        machine: id of this machine at the provisioner, which has asked for it; empty where a person has started it.
        pool: that this node belongs to; empty for none.
        heartbeat_s: seconds between signs of life.
        state_limit: bytes that saved states may take in this node's memory; 0: half of the file system they lie in.
        asleep_s: seconds without progress after which a worker counts as hung whose processes all sleep meanwhile,
            where no other of its task here does so.
        hang_s: seconds without progress after which any worker that still answers counts as hung.
        between_s: seconds that a script may be busy between two iterations, with an evaluation, say.
        kernel_log: the kernel's log of this machine, /dev/kmsg or a file that a log daemon writes; empty: not watched.
        rules: folder of TOML files with rules of your own, tried before ours (docs/operations.md); empty for none.
        leave_s: seconds that it takes at most to hand over what it has, once it is told that its node is to go.
        chaos: whether the agent breaks things of its own when asked to.
    """

    process: ClassVar[str] = "unicron-agent"

    node: str = ""
    slots: int = 0
    run_dir: str = ".unicron/node"
    host: str = ""
    fabric_key: str = ""
    rack: str = ""
    machine: str = ""
    pool: str = ""
    heartbeat_s: float = 0.5
    state_limit: int = 0
    asleep_s: float = 2.0
    hang_s: float = 20.0
    between_s: float = 1800.0
    kernel_log: str = ""
    rules: str = ""
    leave_s: float = 20.0
    chaos: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_seconds("heartbeat_s", most=SLOWEST_BEAT_S)
        self.check_seconds("asleep_s", "hang_s", "between_s")
        self.check_order("hang_s", "between_s", "a script would have less time between two iterations than in one")

    @property
    def log_name(self) -> str:
        """The agent with its node: those of several nodes may log to one place."""
        return f"agent.{self.node}"
