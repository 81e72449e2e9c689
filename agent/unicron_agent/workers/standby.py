"""The warm standby: a process with torch already imported that forks workers in milliseconds.

It stays single-threaded and never touches CUDA, so that a fork of it is whole. It speaks JSON lines over its standard
input and output: each request names what to fork, each answer the process id. Forked processes become children of the
agent (which is their subreaper), so that the agent gets their exit status.
"""

import contextlib
import ctypes
import io
import json
import os
import re
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_NAME, LONGEST_NAME = 15, 15
PR_SET_PTRACER = 0x59616D61
"""Who may look at a process where Linux lets only those do so that it descends from (its Yama): all of this user."""
FORKED_AHEAD = (
    "torch",
    "torch.distributed",
    "torch.optim",
    "torch.utils.data",
    "unicron.train.scripts.launcher",
    "unicron.train.session.session",
)

FOR_PARTS = (
    "unicron.train.groups.inner",
    "torch.distributed.tensor.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
)
"""Takes seconds, and only workers that hold a part of a model need it: imported before the first of them is forked."""

FOR_SCRIPTS = ("unicron.train.scripts.run",)
"""What only workers need whose scripts are healed in place: likewise."""

FOR_MEGATRON = ("unicron.train.megatron",)
"""Likewise, for scripts that import it. Not next to GPUs: what else it imports there might touch CUDA."""

_KEPT: list[object] = []
"""What a script leaves behind stays until its process ends: torch can hang while it takes a process group of gloo down,
whose thread waits for the interpreter's lock."""


def main() -> None:
    """Import what workers need, say so, and fork on request until the agent is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    _warm_up()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a script's prints must not mix with the answers
    _say(answers, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        for name in _ahead(request):
            with contextlib.suppress(Exception):  # whatever is wrong with it, the worker that needs it tells
                __import__(name)
        _say(answers, {"pid": _fork(request, answers)})


def _warm_up() -> None:
    """Import all that a first training step imports; much of torch comes only when an optimizer is made (1.5 s)."""
    for name in FORKED_AHEAD:
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


def _ahead(request: dict[str, Any]) -> tuple[str, ...]:
    """Return what to import before the worker of a request is forked."""
    name = request["argv"][0]
    scripts = FOR_SCRIPTS if request["in_place"] else ()
    if request["module"] is None:
        return scripts
    script = Path(request["cwd"], name.replace(".", "/") + ".py" if request["module"] else name)
    try:
        text = script.read_bytes()
    except OSError:  # the worker tells
        text = b""
    parts = request["parts"] or b"fully_shard" in text
    megatron = re.search(rb"^(from|import) megatron\b", text, re.MULTILINE) and not Path("/dev/nvidiactl").exists()
    return (*scripts, *(FOR_PARTS if parts else ()), *(FOR_MEGATRON if megatron else ()))


def _say(answers: Any, what: dict[str, Any]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def _fork(request: dict[str, Any], answers: Any) -> int:
    """Fork twice, so that the process is orphaned at once and handed to the agent; return its id."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child:
            os.write(writer, str(child).encode())
            os._exit(0)
        os.close(reader)
        os.close(writer)
        answers.close()
        _become(request)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        pid = int(pipe.read())
    os.waitpid(between, 0)
    return pid


def _become(request: dict[str, Any]) -> None:
    """Be the requested process, and never return."""
    code = 1
    try:
        os.setpgid(0, 0)  # what it leaves behind is known by that
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        os.environ.update(request["env"])
        named = f"unicron {os.environ.get('UNICRON_WORKER', '')}"[-LONGEST_NAME:]
        ctypes.CDLL(None).prctl(PR_SET_NAME, named.encode())  # as ps and top show it
        own = os.environ.get("UNICRON_CHECKPOINT_DIR", "")
        if own and "://" not in own:
            with contextlib.suppress(
                OSError
            ):  # whoever needs it is told; that above is not made: it may not be mounted
                Path(own).mkdir()
        from unicron.train.scripts.forked import seed_anew  # noqa: PLC0415 of the worker

        seed_anew()
        code = _launch(request) if request["restarts"] else _run_script(request)
    finally:
        from unicron.train.scripts.ending import flush  # noqa: PLC0415 of the worker

        flush()
        os._exit(code)


def _launch(request: dict[str, Any]) -> int:
    """Run a program that knows nothing of Unicron, anew in each membership, and return its exit code."""
    from unicron.train.scripts import launcher  # noqa: PLC0415 imported long ago, in the parent
    from unicron.train.worker import channel  # noqa: PLC0415 imported long ago, in the parent

    connected = channel.connect()
    if connected is None:
        return 1
    command = request["argv"]
    program = (lambda: launcher.execute(command)) if request["module"] is None else (lambda: _run_script(request))
    os.chdir(request["cwd"])
    try:
        return launcher.Launcher(connected, program).run()
    except Exception as error:  # noqa: BLE001 whatever it is, it is told
        channel.report_exception(type(error), error, error.__traceback__)
        return 1


def _run_script(request: dict[str, Any]) -> int:
    """Run a training script as `python script.py` would, and return its exit code."""
    import torch  # noqa: PLC0415 imported long ago, in the parent

    from unicron.train.worker import channel  # noqa: PLC0415

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(-1))
    channel.connect()
    try:
        os.chdir(request["cwd"])
        sys.argv = request["argv"]
        what, in_place = sys.argv[0], request["in_place"] and channel.connect()
        sys.path.insert(0, request["cwd"] if request["module"] else str(Path(what).resolve().parent))
        if in_place:
            from unicron.train.scripts import run  # noqa: PLC0415 of the worker

            execute = run.execute_module if request["module"] else run.execute
            _KEPT.append(execute(in_place, what))
        elif request["module"]:
            _KEPT.append(runpy.run_module(what, run_name="__main__", alter_sys=True))
        else:
            _KEPT.append(runpy.run_path(what, run_name="__main__"))
    except SystemExit as ending:
        _KEPT.append(ending)
        if ending.code is None or isinstance(ending.code, int):
            return ending.code or 0
        print(ending.code, file=sys.stderr)  # noqa: T201 as the interpreter does
        return 1
    except BaseException as error:  # noqa: BLE001 whatever leaves a script is reported, then ends the process
        _KEPT.append(error)
        channel.report_exception(type(error), error, error.__traceback__)
        return 1
    return 0


if __name__ == "__main__":
    main()
