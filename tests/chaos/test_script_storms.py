"""Scripts without a session that are healed in place, in storms: what comes of them is what comes of a calm run.

`STORMS=30 MADE=100 python -m pytest tests/chaos/test_script_storms.py` plays as many; by default five and two are.
"""

import asyncio
import os
import random
import re

import pytest
from helpers import ROOT
from helpers.gate import gate
from helpers.scripts import ACCELERATED, GATHERS, LIGHTNING, SPREAD, TRAINER, Run, disturbed
from helpers.storms import SERVICES, mend
from helpers.training import running_cluster, shared, task, write_script
from unicron_chaos.injection import inject
from unicron_chaos.storm import Storm

from benchmarks.inplace_scripts.made import made, written
from benchmarks.inplace_scripts.runs import plain, results
from benchmarks.inplace_scripts.verdicts import difference
from unicron.contracts.tasks import UNCOUNTED, Healing, ParallelLayout, TaskState
from unicron.errors import UnicronError

pytestmark = [
    pytest.mark.real,
    pytest.mark.exhaustive("storms in virtual time strike denser, and each way of striking is shown on real processes"),
    pytest.mark.asyncio(loop_scope="module"),
]

STORMS, MADE, SEED = (int(os.environ.get(name, usual)) for name, usual in (("STORMS", 5), ("MADE", 2), ("SEED", 7)))
SCRIPTS = [GATHERS, TRAINER, ACCELERATED, LIGHTNING, SPREAD]
RANKS, STRIKES = 3, 6

scene = shared(running_cluster, nodes=4, slots=1)  # Lightning wants as many ranks on each node


async def storm_over(scene, run, chance, strikes, apart):
    """Strike a run, its nodes, the services and the bus where its ranks are held; return what was struck of it."""
    storm, struck = Storm(chance.randrange(1 << 30), nodes=True), []

    async def restart(node):
        await asyncio.to_thread(scene.cluster.start_process, node)

    for number in range(strikes):
        run.gate.close_after(chance.randrange(*apart))
        await run.gate.held()
        if number % 3 == 2:  # a service, or the bus
            name = chance.choice(SERVICES)
            print(name)  # noqa: T201 whoever plays many wants to know
            await asyncio.to_thread(scene.cluster.kill, name)
            await restart(name)
            continue
        await scene.view(run.name)  # services may be on their way up
        try:
            status = await scene.client.status()
            if (choice := storm.choose(status)) is not None:
                print(choice)  # noqa: T201
                await inject(scene.client, choice.fault, choice.target, restart)
                storm.record_hit(choice, status)
                struck.append(choice)
        except UnicronError as error:
            print(error)  # noqa: T201 whom it was for is gone
    run.gate.open()
    for node in storm.down:
        await restart(node)
    await mend(scene)
    return struck


@pytest.mark.parametrize("seed", range(STORMS))
async def test_a_storm_leaves_no_trace_in_what_a_script_has_trained(scene, seed):
    await mend(scene)
    async with disturbed(scene, SCRIPTS[seed % len(SCRIPTS)], (0,), ranks=RANKS) as run:
        struck = await storm_over(scene, run, random.Random(seed), STRIKES, (RANKS, 12))
        await scene.ends(run.name)
    assert struck
    assert run.failures, "no strike hit it"


@pytest.mark.parametrize("number", range(MADE))
async def test_a_storm_leaves_no_trace_in_what_a_made_up_script_has_trained(scene, tmp_path, number):
    await mend(scene)
    chance, (_, chosen) = random.Random(number), made(SEED, number)
    text = written(chosen | {"strike": chance.choice(["batch", "loss", "ended"])})
    text = re.sub(r"strike\(rank, (.+)\)", r"gate.at(\1, rank=rank)", text)
    text = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport gate\n{text}"
    script, name = write_script(tmp_path, text), f"made-{number}"
    (tmp_path / "struck").mkdir()
    theirs = await asyncio.to_thread(plain, script, tmp_path / "plain")
    if len(theirs) < 2:
        pytest.skip("torch itself refuses this script")
    usual = {"min_workers": 2, "max_workers": 2, "layout": ParallelLayout(shard=2), "iterations": UNCOUNTED}
    async with gate() as held:
        held.close(0)
        env = {**held.env, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        await scene.client.submit(task(script, name, str(tmp_path / "struck"), heal=Healing.IN_PLACE, env=env, **usual))
        run = Run(scene, name, 2, held)
        struck = await storm_over(scene, run, chance, 5, (4, 14))
        view = await scene.until_state(name, TaskState.FINISHED, TaskState.FAILED)
    print(view.state, view.reason, len(run.failures))  # noqa: T201
    if view.state is TaskState.FINISHED:
        assert not difference(results(tmp_path / "struck"), theirs)
    else:
        assert view.reason
    assert struck
