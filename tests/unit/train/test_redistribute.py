"""Who computes which microbatch after a fault."""

from hypothesis import given
from hypothesis import strategies as st

from unicron.train.redistribute import Progress, resume


def progress(iteration=5, done=(), todo=(), buckets=(False,), has_state=True):
    return Progress(iteration=iteration, has_state=has_state, done=frozenset(done), todo=todo, buckets=buckets)


def test_the_lost_ranks_microbatches_go_round_robin_and_finished_ones_are_kept():
    # of 8 microbatches over 4 ranks, rank 3 (microbatches 3 and 7) is lost
    left = [progress(done=[0], todo=(4,)), progress(done=[1, 5]), progress(todo=(2, 6))]
    found = resume(left, 8, ["n1", "n1", "n2"])
    assert found.todo == ((2, 6), (3, 7), (4,))
    assert (found.kept, found.recomputed) == (3, 2)
    assert found.sources == ((), (), ())


def test_a_rank_behind_takes_the_state_of_one_ahead_and_its_old_work_does_not_count():
    found = resume([progress(iteration=6, done=[0]), progress(iteration=5, done=[1, 3])], 4, ["n1", "n2"])
    assert found.iteration == 6
    assert found.sources == ((), (0,))
    assert sorted(mb for mine in found.todo for mb in mine) == [1, 2, 3]


def test_a_new_rank_takes_its_state_from_its_own_node_first():
    ranks = [progress(), progress(), progress(has_state=False, iteration=0)]
    assert resume(ranks, 4, ["n1", "n2", "n2"]).sources[2] == (1, 0)
    assert resume(ranks, 4, ["n1", "n2", "n1"]).sources[2] == (0, 1)


def test_new_ranks_share_the_load_over_the_holders():
    ranks = [progress(), progress(), *(progress(has_state=False, iteration=0) for _ in range(4))]
    first = [sources[0] for sources in resume(ranks, 4, ["a", "b", "c", "d", "e", "f"]).sources if sources]
    assert sorted(first) == [0, 0, 1, 1]


def test_when_all_are_new_rank_0_sets_the_state_of_iteration_0():
    found = resume([progress(iteration=0, has_state=False) for _ in range(3)], 6, ["a", "b", "c"])
    assert found.iteration == 0
    assert found.sources == ((), (0,), (0,))
    assert found.todo == ((0, 3), (1, 4), (2, 5))
    assert (found.kept, found.recomputed) == (0, 0)


def test_buckets_that_any_rank_has_finished_are_shared():
    ranks = [progress(done=[0], buckets=(True, True, False)), progress(done=[1], buckets=(True, False, False))]
    found = resume(ranks, 3, ["a", "b"])
    assert found.bucket_from == (0, 0, None)
    assert found.todo == ((2,), ())


def test_when_all_buckets_are_finished_nothing_is_computed_again():
    ranks = [progress(done=[0], buckets=(True, False)), progress(done=[1], buckets=(False, True))]
    found = resume(ranks, 3, ["a", "b"])
    assert found.todo == ((), ())
    assert found.recomputed == 0


@given(st.data())
def test_every_microbatch_is_computed_exactly_once(data):
    total, world = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 6))
    owner = data.draw(st.lists(st.integers(-1, world - 1), min_size=total, max_size=total))  # -1: a lost rank's
    finished = data.draw(st.lists(st.booleans(), min_size=total, max_size=total))
    ranks = [
        progress(
            done=[mb for mb in range(total) if owner[mb] == rank and finished[mb]],
            todo=tuple(mb for mb in range(total) if owner[mb] == rank and not finished[mb]),
        )
        for rank in range(world)
    ]
    found = resume(ranks, total, ["n"] * world)
    again = [mb for mine in found.todo for mb in mine]
    kept = [mb for mb in range(total) if owner[mb] >= 0 and finished[mb]]
    assert sorted(again + kept) == list(range(total))
    assert found.kept == len(kept)
    assert found.recomputed == owner.count(-1)
    assert max(map(len, found.todo)) - min(map(len, found.todo)) <= 1


def test_what_a_rank_did_before_it_was_left_out_counts_once():
    # rank 2 sat out a membership of two, in which the others did its microbatches 2 and 5 as well
    left = [progress(done=[0, 2, 3]), progress(done=[1, 5], todo=(4,)), progress(done=[2, 5])]
    found = resume(left, 6, ["n1", "n2", "n3"])
    assert found.stale == (False, False, True)
    assert sorted(mb for mine in found.todo for mb in mine) == [4]
    assert found.kept == 5
    assert found.sources == ((), (), ())  # its parameters are as good as the others'


def test_a_rank_whose_sum_is_dropped_gives_no_bucket():
    left = [progress(done=[0, 1]), progress(done=[0], buckets=(True,))]
    found = resume(left, 2, ["n1", "n2"])
    assert found.stale == (False, True)
    assert found.bucket_from == (None,)
