"""Errors as programs of the field print them: the text around a line, of several versions of torch, Python and NCCL."""

from collections.abc import Iterator

ASYNC = (
    "\n{0} kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
)
COMPILE = "\nCompile with `TORCH_USE_{0}_DSA` to enable device-side assertions.\n"
OMITTED = (
    "\nDevice-side assertions were explicitly omitted for this error check; the error probably arose while "
    "initializing the DSA handlers."
)
NATIVE = (
    "\nException raised from c10_cuda_check_implementation at ../c10/CUDAException.cpp:44 (most recent call first):\n"
    "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x57 (0x7f9d in /opt/torch/lib/libc10.so)\n"
    "frame #1: c10d::TCPStore::doWait(c10::ArrayRef<std::string>) + 0x1d2 (0x7f9d in /opt/torch/lib/libtorch_cuda.so)\n"
)
ENDINGS = [
    "",
    ASYNC + ".",  # torch 1.10
    ASYNC + "." + COMPILE,  # 2.0
    ASYNC + COMPILE + NATIVE,  # 2.3
    "\nSearch for `{1}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more "
    "information." + ASYNC + COMPILE,  # 2.9
    "\nFor more detailed error information, run with CUDA_LOG_FILE=stderr" + OMITTED,
    ASYNC + "\nLooking for device-side assertion failure information...\n",  # built with device-side assertions
]

BACK = """Traceback (most recent call last):
  File "/home/u/train.py", line 214, in <module>
    main()  # ConnectionResetError, CUDA out of memory, device-side assert, uncorrectable ECC error
  File "/home/u/train.py", line 180, in main
    raise OSError("No space left on device") if full else error
          ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
"""
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"
ELASTIC = (
    "[rank0]:[W1127 10:00:00.1 ProcessGroupNCCL.cpp:1250] Warning: WARNING: process group has NOT been destroyed "
    "before we destruct ProcessGroupNCCL. On normal program exit, pending NCCL operations have finished.\n"
    "E1127 10:00:01.123000 140 torch/distributed/elastic/api.py:874] failed (exitcode: 1) local_rank: 0\n"
    'Traceback (most recent call last):\n  File "/opt/bin/torchrun", line 33, in <module>\n    sys.exit(main())\n'
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\n============\ntrain.py FAILED\nFailures:\n"
    "  <NO_OTHER_FAILURES>\n------\n  exitcode  : 1 (pid: 4711)\n  error_file: <N/A>\n"
    "  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html\n============\n"
)


def endings(error: str, name: str) -> list[str]:
    """Return an error of CUDA or HIP with what versions of torch put behind it."""
    whose = "HIP" if error.startswith("HIP") else "CUDA"
    return [error + ending.format(whose, name) for ending in ENDINGS]


def whole_texts(kind: str, line: str) -> Iterator[str]:
    """Yield a line of a log, or an exception, as what is printed around it has it."""
    if kind == "k":
        yield f"[   12.1] systemd[1]: Started Daily apt upgrade.\n{line}\n[   13.1] IPv6: eth0: link becomes ready"
        yield f"Nov 27 10:00:00 node-1 kernel: [123456.789012] {line}"
    elif kind == "w":
        yield f"step 12 loss 2.3\n{line}\nstep 13 loss 2.2"
    else:
        trace = f"{BACK}{line}\n"
        yield trace
        yield "".join(f"[rank0]: {each}\n" for each in trace.splitlines())
        yield f"{trace}{CAUSE}{BACK}RuntimeError: training failed at step 12\n"
        yield f"{BACK}KeyError: 'key'\n{HANDLING}{trace}"
        yield f"{BACK}RuntimeError: Caught RuntimeError in DataLoader worker process 0.\nOriginal {trace}"
        for begins in (1, 2, 4, 5):  # the last lines that a process wrote begin anywhere
            yield "".join(trace.splitlines(keepends=True)[begins:]) + ELASTIC
