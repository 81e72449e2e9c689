"""What DistributedDataParallel sums at once, and in which order."""

import torch

from unicron.train.inplace.buckets import ReadyOrder

SIZES = (1000, 300_000, 10, 500_000, 7)


def order(**named):
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    found = ReadyOrder(parameters, **{"varies": False, "cap_bytes": None, **named})
    return parameters, found


def sizes(found):
    return [[len(each) for each in bucket] for bucket in found.buckets()]


def test_all_is_summed_at_once_until_the_first_ranks_order_is_known_and_in_that_order_since():
    parameters, found = order()
    assert sizes(found) == [[*SIZES]]
    for parameter in reversed(parameters[1:]):
        found.note(parameter)
    assert found.noted == [0] * 5, "one is missing"
    found.begin()
    for parameter in reversed(parameters):
        found.note(parameter)
    assert found.noted == [4, 3, 2, 1, 0]
    found.take([0] * 5)
    assert found.known is None, "it is no order"
    found.take([4, 3, 0, 2, 1])
    found.take([0, 1, 2, 3, 4])
    assert sizes(found) == [[7, 500_000], [1000, 10, 300_000]], "1 MiB, and then 25"


def test_where_parameters_may_be_left_out_torch_keeps_to_the_order_of_the_model():
    _, found = order(varies=True)
    found.take([4, 3, 2, 1, 0])
    assert sizes(found) == [[10, 500_000, 7], [1000, 300_000]]
    found.static = True  # then none are, and the second backward pass counts
    found.take([4, 3, 2, 1, 0])
    assert sizes(found) == [[*SIZES]]
    found.take([4, 3, 2, 1, 0])
    assert sizes(found) == [[7, 500_000], [10, 300_000, 1000]]


def test_a_limit_of_the_scripts_own_counts_for_all_buckets():
    _, found = order(cap_bytes=1000)
    found.take([4, 3, 2, 1, 0])
    assert sizes(found) == [[7, 500_000], [10, 300_000], [1000]]
