"""The words of failures: how bad they are, how they were found, what they are, and what was tried against them."""

from enum import IntEnum

from unicron.contracts.base import Word


class Severity(IntEnum):
    """Paper table 1: how bad a failure is, and so what cures it."""

    SEV1 = 1
    """Reconfigure the cluster without the node."""
    SEV2 = 2
    """Restart the process."""
    SEV3 = 3
    """Reattempt in place."""


class DetectionMethod(Word):
    """How a failure was found (paper section 4.1)."""

    NODE_HEALTH = "node_health"
    """The connection or the heartbeats of a node ended."""
    PROCESS_SUPERVISION = "process_supervision"
    """A process ended."""
    EXCEPTION_PROPAGATION = "exception_propagation"
    """A process said why it can't go on."""
    ONLINE_STATISTICS = "online_statistics"
    """A process made no progress for much longer than usual."""
    DEVICE_HEALTH = "device_health"
    """The kernel of a node, or the driver of a GPU, reported that something is wrong with the machine."""
    UNKNOWN = "unknown"


class FailureStatus(Word):
    """The kind of failure."""

    LOST_CONNECTION = "lost_connection"
    EXITED_ABNORMALLY = "exited_abnormally"
    TASK_HANG = "task_hang"
    STATE_TRANSFER_FAILED = "state_transfer_failed"
    """No source could hand over the state that a worker needs."""
    STATE_DIVERGED = "state_diverged"
    """A worker's state is not what other replicas have of it."""
    GRADIENT_NOT_FINITE = "gradient_not_finite"
    """A script's order was to stop where that is so."""
    RANK_ENDED = "rank_ended"
    """A rank of a script waits for another that never comes: it has ended, or waits elsewhere for this one."""
    """Another process that took its place computed something else."""
    CONNECTION_REFUSED = "connection_refused"
    CONNECTION_RESET = "connection_reset"
    NCCL_TIMEOUT = "nccl_timeout"
    LINK_FLAPPING = "link_flapping"
    OTHER_NETWORK_ERROR = "other_network_error"
    ECC_ERROR = "ecc_error"
    NVLINK_ERROR = "nvlink_error"
    INVALID_DMA_MAPPING = "invalid_dma_mapping"
    GPU_DRIVER_ERROR = "gpu_driver_error"
    ILLEGAL_MEMORY_ACCESS = "illegal_memory_access"
    CUDA_ERROR = "cuda_error"
    OUT_OF_MEMORY = "out_of_memory"
    """The machine, or the container, had no memory left, and the kernel ended a process; or it was about to."""
    OUT_OF_RESOURCES = "out_of_resources"
    """A machine lacks what healing takes: room, memory, descriptors, processes or ports. No program is at fault."""
    IO_ERROR = "io_error"
    """A disk or a file system fails."""
    ADDRESS_IN_USE = "address_in_use"
    """A script wants a port of its own choice that another program on its node has."""
    OTHER_SOFTWARE_ERROR = "other_software_error"
    """A rule says that a program brings this about by itself: maybe the user's own error."""
    UNEXPLAINED = "unexplained"
    """No rule knows what brings this about: nobody is blamed, but if it comes again in the same place elsewhere."""
    UNKNOWN = "unknown"


class Cure(Word):
    """The measure that was tried against a failure."""

    REATTEMPT = "reattempt"
    """The same members form a new membership."""
    RESTART = "restart"
    """A new process in the slot of the failed one."""
    REGROUP = "regroup"
    """Other members form a new membership."""
    UNKNOWN = "unknown"
