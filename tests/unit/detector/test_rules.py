"""Table 1 of the paper, as data: what an exception says about its cause."""

import pytest

from unicron.errors import InvalidInputError
from unicron.rules import Rules, load

DEFAULT = "default = { status = 'task_hang', severity = 2 }"
RULES = load()
BACKEND, GLOO = "torch.distributed.DistBackendError", "/pytorch/third_party/gloo/gloo/transport/tcp"


@pytest.mark.parametrize(
    ("exception", "text", "status", "severity"),
    [
        ("ConnectionRefusedError", "[Errno 111] Connection refused", "connection_refused", 3),
        ("RuntimeError", "connect() failed: Connection refused", "connection_refused", 3),
        ("ConnectionResetError", "[Errno 104] Connection reset by peer", "connection_reset", 3),
        ("RuntimeError", f"[{GLOO}/pair.cc:534] Connection closed by peer [127.0.0.1]:2543", "connection_reset", 3),
        ("BrokenPipeError", "[Errno 32] Broken pipe", "connection_reset", 3),
        (BACKEND, "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=41)", "nccl_timeout", 3),
        ("RuntimeError", "Timed out waiting 1800000ms for recv operation to complete", "nccl_timeout", 3),
        (BACKEND, "NCCL error: ncclSystemError: socket", "other_network_error", 3),
        ("socket.gaierror", "[Errno -2] Name or service not known", "other_network_error", 3),
        ("OSError", "[Errno 113] No route to host", "other_network_error", 3),
        ("RuntimeError", "mlx5: port down", "link_flapping", 3),
        ("RuntimeError", "CUDA error: an illegal memory access was encountered", "illegal_memory_access", 2),
        ("torch.AcceleratorError", "CUDA error: unspecified launch failure", "cuda_error", 2),
        ("RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "cuda_error", 2),
        ("RuntimeError", "CUDA error: uncorrectable ECC error encountered", "ecc_error", 1),
        ("RuntimeError", "CUDA error: uncorrectable NVLink error detected during the execution", "nvlink_error", 1),
        ("RuntimeError", "Invalid DMA mapping", "invalid_dma_mapping", 1),
        ("pynvml.NVMLError_GpuIsLost", "GPU is lost", "gpu_driver_error", 1),
        ("RuntimeError", "Unable to determine the device handle for GPU0", "gpu_driver_error", 1),
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 20 GiB", "other_software_error", 2),
        ("RuntimeError", "CUDA error: device-side assert triggered", "other_software_error", 2),
        ("ValueError", "shapes (3,4) and (5,6) do not fit", "other_software_error", 2),
        ("builtins.KeyError", "'connection'", "other_software_error", 2),
        ("ZeroDivisionError", "", "other_software_error", 2),
    ],
)
def test_a_row_of_table_1(exception, text, status, severity):
    verdict = RULES.classify(exception, text)
    assert (verdict.status, int(verdict.severity)) == (status, severity)


@pytest.mark.parametrize(
    ("code", "status", "severity"),
    [
        (13, "cuda_error", 2),
        (31, "illegal_memory_access", 2),
        (48, "ecc_error", 1),
        (74, "nvlink_error", 1),
        (79, "gpu_driver_error", 1),
        (94, "cuda_error", 2),
        (95, "ecc_error", 1),
        (119, "gpu_driver_error", 1),
        (145, "nvlink_error", 1),
        (43, "other_software_error", 2),
    ],
)
def test_an_xid(code, status, severity):
    verdict = RULES.classify("KernelLog", f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=1234, name=python")
    assert (verdict.status, int(verdict.severity)) == (status, severity)


def test_of_several_xids_the_worst_counts():
    assert RULES.classify("", "Xid (PCI:0000:3b:00): 13, x\nXid (PCI:0000:3b:00): 79, x").status == "gpu_driver_error"


def test_the_first_rule_that_matches_decides():
    rules = Rules("""
        default = { status = "task_hang", severity = 2 }
        [[rule]]
        status = "ecc_error"
        severity = 3
        match = "one"
        [[rule]]
        status = "cuda_error"
        severity = 1
        match = "one|two"
    """)
    found = [rules.classify("", text).status for text in ("ONE", "two", "three")]
    assert found == ["ecc_error", "cuda_error", "task_hang"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("default = ", "mine.toml"),
        ("[[rule]]\nstatus = 'a'", "rule[0]"),
        ("default = { status = 'z', severity = 4 }", "default.severity"),
        (f"{DEFAULT}\nrules = []", "rules"),
        (f"{DEFAULT}\n[[rule]]\nstatus = 'ecc_error'\nseverity = 1\nmatch = '('", "'ecc_error'"),
        (f"{DEFAULT}\n[[rule]]\nstatus = 'ecc_eror'\nseverity = 1\nmatch = 'x'", "no status 'ecc_eror'; use one of"),
        (f"{DEFAULT}\n[[xid]]\nstatus = 'unknown'\nseverity = 1\ncodes = [1]", "no status 'unknown'; use one of"),
        (f"{DEFAULT}\n[[rule]]\nstatus = 'io_error'\nseverity = 1\nmatch = 'a{{{'9' * 20}}}'", "'io_error': match"),
        (f"{DEFAULT}\n[[kernel]]\nstatus = 'io_error'\nseverity = 1\nmatch = '{'(' * 5000}'", "'io_error': match"),
        (f"{DEFAULT}\n[[worker]]\nstatus = 'io_error'\nmatch = '*'", "worker 'io_error': match '*'"),
        (f"{DEFAULT}\n[[worker]]\nstatus = 'io_error'\nmatch = 'x'\nseverity = 1", "unknown field `severity`"),
        ("default = { status = 'broken', severity = 2 }", "no status 'broken'; use one of"),
    ],
)
def test_bad_rules_are_named(text, says):
    with pytest.raises(InvalidInputError, match=r"mine\.toml") as caught:
        Rules(text, "mine.toml")
    assert says in str(caught.value)


def test_an_anchor_holds_for_each_line():
    rules = Rules(f"{DEFAULT}\n[[kernel]]\nstatus = 'io_error'\nseverity = 3\nmatch = '^weka: .*lost$'")
    assert [line for line, _ in rules.telling("a\nweka: 1 lost\nb weka: 2 lost\nc")] == ["weka: 1 lost"]
