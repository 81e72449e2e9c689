"""The microbatches of each replica after a fault."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from unicron.contracts.states import ParkedSnapshot, StateLocation, StateRef
from unicron.contracts.tasks import ParallelLayout
from unicron.errors import InvalidInputError, StateTransferError
from unicron.train.worker import redistribute
from unicron.train.worker.redistribute import Standing


def standing(iteration=5, done=(), todo=(), buckets=(False,), has_state=True, node="n"):
    work = {"done": frozenset(done), "todo": tuple(todo), "buckets": buckets}
    return Standing(node=node, iteration=iteration, has_state=has_state, **work)


def new(node="n"):
    return standing(iteration=0, has_state=False, node=node)


def seated(standings, layout):
    return [replace(each, place=layout.seat(rank).place) for rank, each in enumerate(standings)]


def resume(standings, microbatches, **shape):
    layout = ParallelLayout(**shape).with_workers(len(standings))
    return redistribute.resume(seated(standings, layout), microbatches, layout)


def test_the_lost_ranks_microbatches_go_round_robin_and_finished_ones_are_kept():
    # of 8 microbatches over 4 ranks, rank 3 (microbatches 3 and 7) is lost
    found = resume([standing(done=[0], todo=[4]), standing(done=[1, 5]), standing(todo=[2, 6])], 8)
    assert found.todo == ((2, 6), (3, 7), (4,))
    assert (found.kept, found.recomputed) == (3, 2)
    assert found.sources == ((), (), ())


def test_a_rank_behind_takes_the_state_of_one_ahead_and_its_old_work_does_not_count():
    found = resume([standing(iteration=6, done=[0]), standing(iteration=5, done=[1, 3])], 4)
    assert found.iteration == 6
    assert found.sources == ((), (0,))
    assert sorted(mb for mine in found.todo for mb in mine) == [1, 2, 3]


def test_a_new_rank_takes_its_state_from_its_own_node_first():
    assert resume([standing(node="n1"), standing(node="n2"), new("n2")], 4).sources[2] == (1, 0)
    assert resume([standing(node="n1"), standing(node="n2"), new("n1")], 4).sources[2] == (0, 1)


def test_new_ranks_share_the_load_over_the_holders():
    ranks = [standing(node="a"), standing(node="b"), *(new(node) for node in "cdef")]
    assert sorted(sources[0] for sources in resume(ranks, 4).sources if sources) == [0, 0, 1, 1]


def test_when_all_are_new_rank_0_sets_the_state_of_iteration_0():
    found = resume([new("a"), new("b"), new("c")], 6)
    assert (found.established, found.iteration) == (False, 0)
    assert found.sources == ((), (0,), (0,))
    assert found.todo == ((0, 3), (1, 4), (2, 5))
    assert (found.kept, found.recomputed) == (0, 0)


def test_buckets_that_any_rank_has_finished_are_shared():
    ranks = [standing(done=[0], buckets=(True, True, False)), standing(done=[1], buckets=(True, False, False))]
    found = resume(ranks, 3)
    assert found.bucket_from == ((0, 0, None),)
    assert found.todo == ((2,), ())


def test_when_all_buckets_are_finished_nothing_is_computed_again():
    found = resume([standing(done=[0], buckets=(True, False)), standing(done=[1], buckets=(False, True))], 3)
    assert found.todo == ((), ())
    assert (found.kept, found.recomputed) == (3, 0)


@given(st.data())
def test_every_microbatch_is_computed_exactly_once(data):
    total, world = data.draw(st.integers(1, 24)), data.draw(st.integers(1, 6))
    owner = data.draw(st.lists(st.integers(-1, world - 1), min_size=total, max_size=total))  # -1: a lost rank's
    finished = data.draw(st.lists(st.booleans(), min_size=total, max_size=total))
    own = [[mb for mb in range(total) if owner[mb] == rank] for rank in range(world)]
    split = [([mb for mb in mine if finished[mb]], [mb for mb in mine if not finished[mb]]) for mine in own]
    found = resume([standing(done=done, todo=todo) for done, todo in split], total)
    again = [mb for mine in found.todo for mb in mine]
    kept = [mb for mb in range(total) if owner[mb] >= 0 and finished[mb]]
    assert sorted(again + kept) == list(range(total))
    assert found.kept == len(kept)
    assert found.recomputed == owner.count(-1)
    assert max(map(len, found.todo)) - min(map(len, found.todo)) <= 1


def test_what_a_rank_did_before_it_was_left_out_counts_once():
    # rank 2 sat out a membership of two, in which the others did its microbatches 2 and 5 as well
    found = resume([standing(done=[0, 2, 3]), standing(done=[1, 5], todo=[4]), standing(done=[2, 5])], 6)
    assert found.stale == (False, False, True)
    assert sorted(mb for mine in found.todo for mb in mine) == [4]
    assert found.kept == 5
    assert found.sources == ((), (), ())  # its parameters are as good as the others'


def test_a_rank_whose_sum_is_dropped_gives_no_bucket():
    found = resume([standing(done=[0, 1]), standing(done=[0], buckets=(True,))], 2)
    assert found.stale == (False, True)
    assert found.bucket_from == ((None,),)


# --- replicas of several workers -------------------------------------------------------------------------------------

TWO = {"tensor": 2}


def test_a_replica_s_ranks_get_the_same_microbatches_and_a_state_comes_from_the_same_place():
    ranks = [standing(done=[0], todo=[2]), standing(done=[0], todo=[2]), new("x"), new("y")]
    found = resume(ranks, 4, **TWO)
    assert found.todo == ((1, 3), (2,)), "by replica"
    assert found.sources == ((), (), (0,), (1,))
    assert (found.kept, found.recomputed) == (1, 2)


def test_a_replica_whose_ranks_have_not_done_the_same_keeps_nothing():
    ranks = [standing(done=[0, 2]), standing(done=[0]), standing(done=[1]), standing(done=[1])]
    found = resume(ranks, 4, **TWO)
    assert found.stale == (True, True, False, False)
    assert sorted(mb for mine in found.todo for mb in mine) == [0, 2, 3]


def test_a_replica_with_a_rank_that_must_take_its_state_keeps_nothing_but_still_gives_its_other_place():
    ranks = [standing(done=[0]), standing(iteration=4), standing(done=[1]), standing(done=[1]), new(), new()]
    found = resume(ranks, 3, **TWO)
    assert found.stale == (True, False, False, False, False, False)
    assert found.kept == 1
    assert set(found.sources[4]) == {0, 2}
    assert found.sources[5] == found.sources[1] == (3,)


def test_buckets_are_kept_place_by_place():
    one = standing(done=[0], buckets=(True, False))
    other = standing(done=[1], buckets=(False, True))
    left = [one, standing(done=[0], buckets=(True, True)), other, standing(done=[1], buckets=(False, False))]
    found = resume(left, 4, **TWO)
    assert found.bucket_from == ((0, 2), (1, 1))
    assert found.todo == ((), ()), "all is summed at every place"
    left[1] = one
    found = resume(left, 4, **TWO)
    assert found.bucket_from == ((0, 2), (1, None))
    assert found.todo == ((2,), (3,))


def test_where_no_iteration_is_there_as_a_whole_nothing_is_made_up():
    with pytest.raises(StateTransferError, match=r"place 0 of \[5\], place 1 of none"):
        resume([standing(), new()], 4, **TWO)
    with pytest.raises(StateTransferError, match=r"place 0 of \[5\], place 1 of \[6\]"):
        resume([standing(), standing(iteration=6)], 4, **TWO)


def test_where_no_update_was_made_yet_all_begin_with_what_they_have_built():
    begun = standing(iteration=0, done=[1], buckets=(True,))
    found = resume([new(), begun, new(), new()], 4, **TWO)
    assert (found.iteration, found.sources, found.lacking) == (0, ((), (), (0,), (1,)), ())
    assert (found.todo, found.stale[1]) == (((0, 2), (1, 3)), True), "what one place did alone counts for nothing"
    with pytest.raises(StateTransferError, match="place 0 of none"):
        resume([replace(new(), doubted=True), begun], 4, **TWO)


def test_the_newest_iteration_that_is_there_as_a_whole_is_the_one_to_go_on_with():
    found = resume([standing(iteration=6), standing(), standing(), standing()], 4, **TWO)
    assert found.iteration == 5
    assert found.sources == ((2,), (), (), ())


def test_who_is_in_no_replica_takes_its_place_s_state_and_computes_nothing():
    ranks = [standing(done=[0]), standing(done=[0]), replace(new("x"), place=1)]
    found = redistribute.resume([ranks[0], replace(ranks[1], place=1), ranks[2]], 4, ParallelLayout(tensor=2))
    assert found.sources == ((), (), (1,))
    assert found.todo == ((1, 2, 3),)
    assert not any(found.stale)


def test_ranks_of_one_place_with_parameters_of_other_shapes_are_refused():
    ranks = [replace(standing(), shapes=shapes) for shapes in ("a", "b", "a", "c")]
    with pytest.raises(InvalidInputError, match=r"ranks 1 and 3 .* build the model from session\.mesh"):
        resume(ranks, 4, **TWO)


@st.composite
def standings(draw, layout, microbatches):
    """What the ranks of a membership may bring: whole replicas, torn ones, new ones, and such as sat out."""
    found = []
    for _ in range(layout.replicas):
        mine = draw(st.sets(st.integers(0, microbatches - 1)))
        for _ in range(layout.replica_workers):
            kind = draw(st.sampled_from(["whole", "whole", "torn", "behind", "new"]))
            done = draw(st.sets(st.sampled_from(sorted(mine)))) if kind == "torn" and mine else mine
            todo = sorted(set(range(microbatches)) - done)[:2]
            buckets = tuple(draw(st.lists(st.booleans(), min_size=2, max_size=2)))
            node = draw(st.sampled_from("abc"))
            known = standing(5 - (kind == "behind"), done=done, todo=todo, buckets=buckets, node=node)
            found.append(new(node) if kind == "new" else known)
    return found


SHAPES = [(1, 1, 1), (2, 1, 1), (1, 3, 1), (2, 2, 1), (1, 1, 4)]


@given(data=st.data())
def test_for_every_shape_each_microbatch_counts_once_and_each_state_has_its_place(data):
    tensor, pipeline, shard = data.draw(st.sampled_from(SHAPES))
    layout = ParallelLayout(tensor=tensor, pipeline=pipeline, shard=shard, replicas=data.draw(st.integers(1, 4)))
    microbatches = data.draw(st.integers(1, 12))
    given_ = seated(data.draw(standings(layout, microbatches)), layout)
    try:
        found = redistribute.resume(given_, microbatches, layout)
    except StateTransferError:
        of_place = [given_[at :: layout.replica_workers] for at in range(layout.replica_workers)]
        held = [{each.iteration for each in ranks if each.has_state} for ranks in of_place]
        assert any(held)
        assert not set.intersection(*held)
        return
    assert found == redistribute.resume(list(given_), microbatches, layout), "every rank works out the same"
    summed = [source is not None for of_place in found.bucket_from for source in of_place]
    counted = [mb for mine in found.todo for mb in mine]
    for replica in range(layout.replicas):
        ranks = range(replica * layout.replica_workers, (replica + 1) * layout.replica_workers)
        keeps = all(not found.sources[rank] and not found.stale[rank] for rank in ranks)
        if keeps and found.established:
            [done] = {given_[rank].done for rank in ranks}
            counted += [] if all(summed) else done
        else:
            assert not any(rank in of for of in found.bucket_from for rank in ranks)
    assert sorted(counted) == ([] if all(summed) else list(range(microbatches)))
    for rank, sources in enumerate(found.sources):
        for source in sources:
            assert layout.seat(source).place == layout.seat(rank).place
            assert not found.sources[source]
        near = [given_[source].node == given_[rank].node for source in sources]
        assert near == sorted(near, reverse=True), "its own node first"
        is_new = not given_[rank].has_state and (found.established or layout.seat(rank).replica > 0)
        assert bool(sources) == (given_[rank].iteration != found.iteration or is_new)
    for place, sources in enumerate(found.bucket_from):
        assert all(layout.seat(source).place == place for source in sources if source is not None)


# --- what others have left behind ------------------------------------------------------------------------------------


def shelf(*states, iteration=5, **shape):
    """Return a shelf with states given as (place, node)."""
    layout = ParallelLayout(**shape)

    def ref(place, node="n"):
        location = StateLocation(node=node, worker=f"w{place}", name=f"w{place}.1.kept")
        return StateRef(task="t", iteration=iteration, place=place, location=location, size=1, checksum=b"")

    refs = [ref(*each) for each in states] or [ref(place) for place in range(layout.replica_workers)]
    return ParkedSnapshot(layout=layout, iteration=iteration, states=refs)


def shelved(standings, found, microbatches=4, **shape):
    layout = ParallelLayout(**shape).with_workers(len(standings))
    first, *others = seated(standings, layout)
    return redistribute.resume([replace(first, shelf=found), *others], microbatches, layout)


def test_all_that_are_new_take_what_was_left_and_go_on_where_that_was():
    found = shelved([new(), new(), new()], shelf(), shard=3)
    assert (found.established, found.iteration, found.lacking) == (True, 5, (0, 1, 2))
    assert found.todo == ((0, 1, 2, 3),)
    assert found.sources == ((), (), ())


def test_a_peer_that_has_it_is_asked_before_the_shelf():
    found = shelved([standing(iteration=5), new(), new(), new()], shelf(), tensor=2)
    assert (found.iteration, found.lacking) == (5, (1, 3))
    assert found.sources == ((), (), (0,), ())


def test_who_is_ahead_of_the_shelf_alone_goes_back_to_it():
    found = shelved([standing(iteration=6, done=[1]), new()], shelf(), tensor=2)
    assert (found.iteration, found.lacking, found.kept) == (5, (0, 1), 0)


def test_a_shelf_that_all_are_ahead_of_is_not_needed():
    found = shelved([standing(iteration=6), standing(iteration=6)], shelf(), tensor=2)
    assert (found.iteration, found.lacking) == (6, ())


@pytest.mark.parametrize(
    ("before", "after", "place", "first"),
    [
        ({"shard": 4}, {"shard": 2}, 1, [2, 3]),
        ({"shard": 2}, {"shard": 4}, 3, [1]),
        ({"shard": 4}, {"shard": 3}, 1, [1, 2]),
        ({"pipeline": 2, "tensor": 2}, {"pipeline": 2}, 1, [2, 3]),
        ({"pipeline": 2, "tensor": 2}, {"tensor": 2}, 1, [1, 3]),
        ({"pipeline": 2}, {"tensor": 2}, 1, [0, 1]),
        ({"pipeline": 2, "shard": 2, "tensor": 2}, {"pipeline": 2, "shard": 2, "tensor": 2}, 6, [6]),
    ],
)
def test_the_parts_that_a_rank_needs_come_first(before, after, place, first):
    parts = redistribute.parked_sources(shelf(**before), ParallelLayout(**after), place, "n")
    assert [copies[0].place for copies in parts][: len(first)] == first
    assert len(parts) == ParallelLayout(**before).replica_workers


def test_of_copies_that_on_the_own_node_comes_first():
    states = shelf((0, "a"), (1, "a"), (0, "b"), (1, "b"), tensor=2)
    parts = redistribute.parked_sources(states, ParallelLayout(), 0, "b")
    assert [[ref.location.node for ref in copies] for copies in parts] == [["b", "a"], ["b", "a"]]
