"""The warm standby: a process with torch already imported that forks workers in milliseconds.

It stays single-threaded and never touches CUDA, so that a fork of it is whole. It speaks JSON lines over its standard
input and output: each request names what to fork, each answer the process id. Forked processes become children of the
agent (which is their subreaper), so that the agent gets their exit status. Each answers for itself: wherever this
process dies, the agent knows of a forked one, or there is none.
"""

import contextlib
import ctypes
import importlib
import io
import json
import os
import re
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unicron.own_modules import forget_others

PR_SET_PDEATHSIG = 1
PR_SET_NAME, LONGEST_NAME = 15, 15
PR_SET_PTRACER = 0x59616D61
"""Allows all processes of this user to trace a process, where Linux (Yama) allows only its ancestors to."""
IMPORTED_FIRST = (
    "torch",
    "torch.distributed",
    "torch.optim",
    "torch.utils.data",
    "unicron.train.restart.launcher",
    "unicron.train.session.session",
)

FOR_PARTS = (
    "unicron.train.groups.inner",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
)
"""Modules that take seconds to import and that only workers with a part of a model need: imported before the first of
those is forked."""

FOR_MEGATRON = ("unicron.train.megatron",)
"""Modules for scripts that import Megatron: likewise. Not next to GPUs, where its imports might touch CUDA."""

AT_START = frozenset(sys.modules)
"""Names of modules that Python itself imports, a few of ours among them."""

_NEVER_FREED: list[object] = []
"""The globals of a script, kept until its process ends: torch can hang while it frees a process group of gloo whose
thread waits for the interpreter's lock."""


def main() -> None:
    """Import what workers need, answer that it is ready, and fork on request until the agent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import or a script prints must not mix with the answers
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # forks would write the rest of a line again
    with contextlib.suppress(Exception):  # a module of the user's that stands in the way is the worker's own error
        _warm_up()
    _answer(answers, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        for name in () if request.get("again") else _modules_needed(request):  # it died of one of them, perhaps
            with contextlib.suppress(Exception):  # the worker's own import of it raises
                __import__(name)
        _fork(request, answers)


def _warm_up() -> None:
    """Import all that a first training step imports; much of torch comes only when an optimizer is made (1.5 s)."""
    for name in IMPORTED_FIRST:
        __import__(name)
    import torch  # noqa: PLC0415 this very import is what the process is for

    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)


def _modules_needed(request: dict[str, Any]) -> tuple[str, ...]:
    """Return the modules to import before the worker of a request is forked."""
    name = request["argv"][0]
    ahead = tuple(request["ahead"])  # of its way of healing
    if request["module"] is None:
        return ahead
    script = Path(request["cwd"], name.replace(".", "/") + ".py" if request["module"] else name)
    try:
        text = script.read_bytes()
    except OSError:  # the worker's own read of it raises
        text = b""
    parts = request["parts"] or b"fully_shard" in text
    megatron = re.search(rb"^(from|import) megatron\b", text, re.MULTILINE) and not Path("/dev/nvidiactl").exists()
    return (*ahead, *(FOR_PARTS if parts else ()), *(FOR_MEGATRON if megatron else ()))


def _answer(answers: Any, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def _fork(request: dict[str, Any], answers: Any) -> None:
    """Fork twice, so that the process is orphaned at once and handed to the agent, which it answers with its id.

    Raises:
        SystemExit: there is no such process, and no answer.
    """
    between = os.fork()
    if between == 0:
        _fork_orphan(request, answers)
    _, status = os.waitpid(between, 0)
    if status:
        raise SystemExit("it could not fork")


def _fork_orphan(request: dict[str, Any], answers: Any) -> None:
    """Fork the process that runs the request, and exit."""
    ours, code = os.getpid(), 1
    try:
        if os.fork():
            code = 0
            return
        while os.getppid() == ours:  # until it is the agent's child, who would not learn how another's ends
            os.sched_yield()
        _answer(answers, {"pid": os.getpid()})
        answers.close()
        _run_request(request)
    except OSError as error:  # no process more is allowed, or the agent is gone
        print(error, file=sys.stderr, flush=True)  # noqa: T201 into the log
    finally:
        os._exit(code)


def _run_request(request: dict[str, Any]) -> None:
    """Set up this process (group, log, environment, name) as the request says, run the request, and exit."""
    code = 1
    try:
        os.setpgid(0, 0)  # what it leaves behind is known by that
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        _open_streams()
        os.environ.update(request["env"])
        _show_as(f"unicron {os.environ.get('UNICRON_WORKER', '')}", request["argv"])
        own = os.environ.get("UNICRON_CHECKPOINT_DIR", "")
        if own and "://" not in own:
            with contextlib.suppress(
                OSError
            ):  # a script that needs it fails; its parents are not made: a file system may not be mounted
                Path(own).mkdir()
        from unicron.train.restart.forked import begin_anew  # noqa: PLC0415 of the worker

        begin_anew(request["argv"], request["cwd"])
        code = _launch(request)
    finally:
        from unicron.train.restart.ending import flush  # noqa: PLC0415 of the worker

        flush()
        os._exit(code)


def _open_streams() -> None:
    """Have this process's streams be what Python makes of them: no script that exchanges one closes what is below."""
    streams = (
        ("stdin", open(0, closefd=False)),  # noqa: SIM115 it stays open
        ("stdout", open(1, "w", 1, closefd=False)),  # noqa: SIM115 likewise
        ("stderr", open(2, "w", 1, errors="backslashreplace", closefd=False)),  # noqa: SIM115 likewise
    )
    for name, stream in streams:
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _show_as(name: str, argv: list[str]) -> None:
    """Have ps and top show this process by its name, and by what it runs, as far as the standby's words leave room."""
    short = name if len(name) <= LONGEST_NAME else name.rpartition(" ")[2][-LONGEST_NAME:]
    ctypes.CDLL(None).prctl(PR_SET_NAME, short.encode())
    with contextlib.suppress(OSError):
        numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = int(numbers[45]), int(numbers[46])  # arg_start and arg_end of proc(5); 0 where it hides them
        shown = f"{name}: {' '.join(argv)}".encode(errors="replace")[: max(0, end - begin - 1)]
        ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def _launch(request: dict[str, Any]) -> int:
    """Run the program as its way of healing does; return its exit code."""
    if not request["runner"]:
        return run_script(request)
    return int(importlib.import_module(request["runner"]).launch(request, run_script))


def run_script(request: dict[str, Any], execute: Callable[[str], object] | None = None) -> int:
    """Run a training script as `python script.py` would, and return its exit code.

    Args:
        request: that names it.
        execute: runs what has that name, of a file or a module; else it is done as the interpreter does.
    """
    import torch  # noqa: PLC0415 imported long ago, in the parent

    from unicron.train.worker import channel  # noqa: PLC0415

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1))
    channel.connect()
    try:
        os.chdir(request["cwd"])
        sys.argv = request["argv"]
        what = sys.argv[0]
        folder = request["cwd"] if request["module"] else str(Path(what).resolve().parent)
        sys.path.insert(0, folder)
        forget_others(folder, AT_START)
        if execute is not None:
            _NEVER_FREED.append(execute(what))
        elif request["module"]:
            _NEVER_FREED.append(runpy.run_module(what, run_name="__main__", alter_sys=True))
        else:
            _NEVER_FREED.append(runpy.run_path(what, run_name="__main__"))
    except SystemExit as ending:
        _NEVER_FREED.append(ending)
        if ending.code is None or isinstance(ending.code, int):
            return ending.code or 0
        print(ending.code, file=sys.stderr)  # noqa: T201 as the interpreter does
        return 1
    except BaseException as error:  # noqa: BLE001 whatever leaves a script is reported, then ends the process
        _NEVER_FREED.append(error)
        channel.report_exception(type(error), error, error.__traceback__)
        return 1
    return 0


if __name__ == "__main__":
    main()
