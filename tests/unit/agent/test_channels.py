"""The channels between workers and their agent."""

import asyncio
import signal
import socket
import sys

from unicron_agent.workers.channels import Channels

from unicron.contracts.frames import frame
from unicron.contracts.worker import Finished, Hello, Progress, WorkerPhase

MANY = 1000
"""More than are received at once."""


async def test_all_that_a_worker_said_is_heard_before_its_end_also_where_a_child_of_it_holds_the_connection(tmp_path):
    said = []
    channels = Channels(lambda _: True, lambda _, message: said.append(message))
    server = await channels.serve(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as worker:
        worker.connect(str(tmp_path / "s"))
        worker.sendall(frame(Hello(worker="t-1", pid=1)))
        while not said:
            await asyncio.sleep(0)
        last = [frame(Progress(iteration=1, phase=WorkerPhase.COMPUTE, done=number)) for number in range(MANY)]
        worker.sendall(b"".join([*last, frame(Finished(iterations=2))]))
        await channels.drain("t-1")
        assert len(said) == MANY + 2
        assert isinstance(said[-1], Finished)
    await channels.drain("t-1")  # the connection ends meanwhile
    server.close()


async def test_one_that_never_connected_has_said_nothing(tmp_path):
    await Channels(lambda _: True, lambda *_: None).drain("t-1")


async def test_a_worker_that_is_none_of_this_agent_s_is_ended(tmp_path):
    server = await Channels(lambda _: False, lambda *_: None).serve(tmp_path / "s")
    knocks = "import socket, sys\none = socket.socket(socket.AF_UNIX)\none.connect(sys.argv[1])\n"
    knocks += f"one.sendall({frame(Hello(worker='t-1', pid=1))!r})\nwhile True:\n    one.recv(1)\n"
    stray = await asyncio.create_subprocess_exec(sys.executable, "-c", knocks, str(tmp_path / "s"))
    assert await stray.wait() == -signal.SIGKILL
    server.close()
