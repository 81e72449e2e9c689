"""A dead rank's microbatch draws and reads the same where it is computed instead."""

import asyncio
import re
import textwrap
from collections import defaultdict
from pathlib import Path

import pytest
from helpers import standby
from helpers.gate import gate
from helpers.local_cluster import local_cluster
from helpers.training import TRAIN, plain_run, task, write_script

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "session.md"
ITERATIONS = 6

SCRIPT = TRAIN.replace("    gradients.BUCKET", "    import random, numpy\n    gradients.BUCKET").replace(
    "schedule=schedule)", "schedule=schedule, stream=stream)"
)
SCRIPT = SCRIPT.replace(
    "    session = ", "    stream = Stream([7 * n % 11 for n in range(997)], 12, 4)\n    session = "
)
SCRIPT = SCRIPT.replace("        schedule.step()", "        schedule.step()\n        stream.advance()").replace(
    "            x = torch.randn(16, 32)",
    """
            x = torch.nn.functional.dropout(torch.randn(16, 32), 0.5)
            drawn = [float(x.sum()), random.random(), numpy.random.rand(), stream.taken[microbatch::6]]
            with open(os.environ["DRAWN"], "a") as told:
                print(iteration, microbatch, os.environ.get("UNICRON_WORKER"), drawn, file=told, flush=True)""",
)


def drawn(path):
    """Return what each microbatch of each iteration drew, by who computed it."""
    found = defaultdict(dict)
    for line in path.read_text().splitlines():
        iteration, microbatch, worker, values = line.split(" ", 3)
        found[int(iteration), int(microbatch)][worker] = values
    return found


def stream():
    [block] = re.findall(r"```python\n( *class Stream.*?)```", PAGE.read_text(), re.DOTALL)
    return textwrap.dedent(block)


async def test_whoever_computes_a_microbatch_draws_the_same_and_reads_the_same(tmp_path):
    script = write_script(tmp_path, SCRIPT)
    script.write_text(script.read_text().replace("torch.manual_seed(0)", f"{stream()}\ntorch.manual_seed(0)"))
    env = {"ACCUMULATE": "float64"}
    async with local_cluster(tmp_path) as scene, gate() as held:
        held.close(3)
        spec = task(script, iterations=ITERATIONS, env={**env, **held.env, "DRAWN": str(tmp_path / "drawn")})
        await scene.client.submit(spec)
        await held.held(3)
        await scene.lose_worker("t", 2)
        held.open()
        await scene.ends("t")
    await asyncio.to_thread(
        plain_run, script, tmp_path / "plain.pt", ITERATIONS=str(ITERATIONS), DRAWN=str(tmp_path / "plain"), **env
    )
    plain, healed = drawn(tmp_path / "plain"), drawn(tmp_path / "drawn")
    assert len(plain) == len(healed) == 6 * ITERATIONS
    again = [where for where, by in healed.items() if len(by) > 1]
    assert {iteration for iteration, _ in again} == {3}, "it was computed elsewhere"
    assert {where: {*by.values()} for where, by in healed.items()} == {
        where: {*by.values()} for where, by in plain.items()
    }


def test_what_is_drawn_without_a_seed_differs_by_process(tmp_path):
    script = write_script(tmp_path, "import random, numpy\nprint([random.random(), float(numpy.random.rand())])\n")
    (code, first), (_, second) = standby.run(script), standby.run(script)
    assert code == 0, first
    assert not set(standby.printed(first)) & set(standby.printed(second))
