"""A script that was converted is healed as any other with a Session."""

import asyncio

import pytest
import torch
import unicron_convert
from helpers import plain_scripts
from helpers.gate import gate
from helpers.local_cluster import local_cluster
from helpers.training import plain_run, task, write_script

from unicron.contracts.events import Regrouped

pytestmark = pytest.mark.slow

RANKS, EPOCHS, BATCHES = 6, 4, 2  # 96 samples, 10 in a batch of each rank


async def test_a_converted_script_loses_nothing_with_a_rank(tmp_path):
    text = plain_scripts.EPOCHS.replace("EPOCHS = 3", f"EPOCHS = {EPOCHS}").replace("import os\n", "import gate, os\n")
    text = text.replace("            loss =", "            gate.at(epoch, place)\n            loss =")
    script, out = write_script(tmp_path, unicron_convert.convert(text, RANKS).text), tmp_path / "healed.pt"
    total = EPOCHS * BATCHES
    async with local_cluster(tmp_path) as scene, gate() as held:
        held.close(3, 1)  # in the middle of an epoch
        spec = task(script, microbatches=RANKS, iterations=total, env={"OUT": str(out), **held.env})
        await scene.client.submit(spec)
        await held.held(3)
        await scene.lose_worker("t", 2)
        held.open()
        await scene.ends("t")
        assert {each.iteration for each in scene.of(Regrouped) if each.epoch > 0} >= {5}, (
            "it was struck while it trained"
        )
        healed = await scene.saved(out)
    plain = await asyncio.to_thread(plain_run, script, tmp_path / "plain.pt")
    for name, value in plain.items():
        torch.testing.assert_close(healed[name], value, rtol=1e-4, atol=1e-6)
