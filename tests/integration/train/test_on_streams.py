"""Scripts healed in place whose groups behave as NCCL's do on GPUs: what comes of them is what one process gets.

`make test-all` runs more of what the other modules show in this way (`--on-streams`).
"""

import pytest
from helpers import likenccl
from helpers.local_cluster import local_cluster
from helpers.scripts import GATHERS, SPREAD, disturbed
from helpers.training import shared

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not likenccl.can_be_built(), reason=likenccl.MISSING),
]

scene = shared(local_cluster, nodes=2, slots=2)


@pytest.mark.parametrize("script_text", [GATHERS, SPREAD], ids=["whole", "spread"])
async def test_a_lost_rank_of_a_script_that_is_healed_in_place_makes_none(scene, script_text):
    async with disturbed(scene, script_text, (0, 5), **likenccl.env()) as run:
        await run.at(0, 5, rank=1)  # the other waits for it
        await run.strike(1)
