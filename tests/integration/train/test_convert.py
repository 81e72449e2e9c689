"""A script that was converted is healed as any other with a Session."""

import asyncio

import pytest
import torch
import unicron_convert
from helpers import plain_scripts
from helpers.training import plain_run, running_cluster, task

from unicron.contracts.events import Regrouped
from unicron.contracts.tasks import TaskState

pytestmark = pytest.mark.slow

RANKS, EPOCHS, BATCHES = 6, 14, 2  # 96 samples, 10 in a batch of each rank


async def test_a_converted_script_loses_nothing_with_a_rank(tmp_path):
    script, out, hurry = tmp_path / "train.py", tmp_path / "healed.pt", tmp_path / "hurry"
    text = plain_scripts.EPOCHS.replace("EPOCHS = 3", f"EPOCHS = {EPOCHS}").replace(
        "import os\n", "import os\nimport time\n"
    )
    paced = '            time.sleep(0 if os.path.exists(os.environ.get("HURRY", "/")) else 0.2)\n            loss ='
    text = text.replace("            loss =", paced)
    script.write_text(unicron_convert.convert(text, RANKS).text)
    total = EPOCHS * BATCHES
    async with running_cluster(tmp_path) as scene:
        spec = task(script, microbatches=RANKS, iterations=total, env={"OUT": str(out), "HURRY": str(hurry)})
        await scene.client.submit(spec)
        await scene.reached("t", 5)  # in the middle of an epoch
        victim = (await scene.view("t")).members[2]
        await scene.client.inject(victim.node, "kill-worker", victim.worker)
        hurry.touch()
        view = await scene.until_state("t", TaskState.FINISHED, TaskState.FAILED)
        assert view.state is TaskState.FINISHED, view
        assert [each for each in scene.of(Regrouped) if 5 < each.iteration < total], "it was struck while it trained"
        healed = await scene.saved(out)
    plain = await asyncio.to_thread(plain_run, script, tmp_path / "plain.pt")
    for name, value in plain.items():
        torch.testing.assert_close(healed[name], value, rtol=1e-4, atol=1e-6)
