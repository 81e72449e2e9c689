"""Figure 9: the services lose a node of a modelled cluster, and what that takes grows as it should."""

import pytest
from msgspec.structs import replace
from unicron_simulator import transitions
from unicron_simulator.policies import experiments, parameters

from unicron.errors import InvalidInputError

pytestmark = pytest.mark.slow


def task(gpus):
    return replace(experiments.gpt3("7B", "7B", most=gpus, batch=1536), microbatches=128)


@pytest.fixture(scope="module")
def played():
    return {gpus: transitions.unicron(task(gpus), gpus) for gpus in (16, 32)}


def test_the_services_bring_the_task_onto_the_nodes_that_are_left(played):
    assert {gpus: one.left for gpus, one in played.items()} == {16: 8, 32: 24}
    for one in played.values():
        assert one.detect_s > 0 < one.plan_s
        assert one.meet_s + one.move_s < one.regroup_s < one.meet_s + one.move_s + 10
        assert one.seconds == one.plan_s + one.regroup_s + one.recompute_s


def test_what_was_lost_is_computed_again_and_no_more(played):
    # a worker of sixteen has at most its share of the iteration, and eight have to make good eight shares
    assert 0 < played[16].recompute_s < played[16].iteration_s


def test_a_larger_cluster_says_more(played):
    small, large = played[16], played[32]
    assert small.commands < large.commands < large.messages
    assert small.messages < large.messages < 4 * small.messages
    assert small.kilobytes < large.kilobytes
    assert small.writes > 4


def test_the_same_seed_is_the_same_transition_and_another_comes_at_another_moment(played):
    assert transitions.unicron(task(16), 16) == played[16]
    assert transitions.unicron(task(16), 16, seed=2).recompute_s < played[16].recompute_s


def test_a_restart_reads_the_checkpoint_on_each_node():
    known = parameters.phases()
    fixed = known.setup_s + known.recompute_s
    small, large = (transitions.restart_s(task(gpus), gpus, known) - fixed for gpus in (16, 64))
    assert large == pytest.approx(4 * small)
    faster = replace(known, storage_bandwidth=2 * known.storage_bandwidth)
    assert transitions.restart_s(task(16), 16, faster) - fixed == pytest.approx(small / 2)


def test_a_task_without_a_model_is_refused():
    with pytest.raises(InvalidInputError, match="no model"):
        transitions.unicron(replace(task(16), model=None), 16)
    with pytest.raises(InvalidInputError, match="can't run on 16"):
        transitions.unicron(replace(experiments.gpt3("big", "175B"), microbatches=128), 16)


def test_each_phase_has_its_source():
    known = parameters.phases()
    assert set(known.source) == set(known.__struct_fields__) - {"source"}
