"""Tasks whose groups behave as NCCL's do on GPUs: ranks are struck, and what comes of it is what one process gets.

`make test-all` runs more of what the other modules show in this way (`--on-streams`).
"""

import pytest
import pytest_asyncio
from helpers import likenccl
from helpers.local_cluster import local_cluster
from helpers.parallel import (
    EXAMPLE,
    ITERATIONS,
    MICROBATCHES,
    PARALLEL,
    differing,
    plain_parameters,
    struck_script,
    trained,
)
from helpers.scripts import GATHERS, SPREAD, disturbed
from helpers.training import shared

from unicron.contracts.events import Regrouped
from unicron.contracts.tasks import ParallelLayout

pytestmark = [
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not likenccl.can_be_built(), reason=likenccl.MISSING),
]

scene = shared(local_cluster, nodes=2, slots=2)


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    return struck_script(tmp_path_factory.mktemp("script"), EXAMPLE, PARALLEL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(script, tmp_path_factory):
    """The parameters after a run of one plain process."""
    return await plain_parameters(script, tmp_path_factory.mktemp("expected"), ITERATIONS, MICROBATCHES)


CASES = [("tensor", "kill forward 12"), ("shard", "kill backward 12"), ("pipeline", "kill update 3")]


@pytest.mark.parametrize(("degree", "strike"), CASES, ids=["tensor", "shard", "pipeline"])
async def test_a_lost_rank_of_a_model_that_is_spread_makes_no_difference(
    expected, scene, script, tmp_path, degree, strike
):
    marker, layout = tmp_path / "marker", ParallelLayout(**{degree: 2})
    strikes = {"STRIKE": strike, "MARKER": str(marker)}
    found = await trained(scene, script, tmp_path, degree, layout, **strikes, **likenccl.env())
    assert marker.exists(), "nothing was struck"
    assert differing(found, expected) == []
    assert max(each.epoch for each in scene.of(Regrouped, task=degree)) > 0


@pytest.mark.parametrize("script_text", [GATHERS, SPREAD], ids=["whole", "spread"])
async def test_a_lost_rank_of_a_script_that_is_healed_in_place_makes_none(scene, script_text):
    async with disturbed(scene, script_text, (0, 5), **likenccl.env()) as run:
        await run.at(0, 5, rank=1)  # the other waits for it
        await run.strike(1)
