"""What comes too often: so much of each sender is let through, and the rest counted and summed up once."""

from unicron.floods import OTHERS, TELEMETRY, Floods, Limit, more

LIMIT = Limit(each=3, overall=5, period_s=10.0)


def admitted(floods, sender, count, now=0.0):
    return sum(floods.admit(sender, now) for _ in range(count))


def test_one_sender_is_let_through_so_often_and_the_rest_is_summed_up_once():
    floods = Floods(LIMIT)
    assert admitted(floods, "n1", 4015) == 3
    assert admitted(floods, "n2", 1) == 1, "others are not drowned"
    assert floods.over(9.9) == {}
    assert floods.over(10.0) == {"n1": 4012}
    assert floods.over(10.0) == {}
    assert admitted(floods, "n1", 2, 10.0) == 2
    assert more(4012) == "4,012 more like this"


def test_senders_together_have_a_limit_and_a_forger_of_names_fills_no_memory():
    floods = Floods(Limit(each=1, overall=2000, period_s=1.0))
    assert sum(floods.admit(f"n{number}", 0.0) for number in range(5000)) == 1001
    over = floods.over(1.0)
    assert over == {OTHERS: 5000 - 1001}
    assert admitted(Floods(LIMIT), "a", 3) == 3
    floods = Floods(LIMIT)
    assert [admitted(floods, name, 3) for name in "abc"] == [3, 2, 0]


def test_the_nodes_of_a_very_large_cluster_do_not_drown_one_another():
    floods = Floods(TELEMETRY)
    beats = [f"node-{number}" for number in range(16384)] * 2
    assert all(floods.admit(node, 0.0) for node in beats)


def test_a_clock_that_is_set_back_ends_the_period():
    floods = Floods(LIMIT)
    assert admitted(floods, "n1", 5, 1e6) == 3
    assert admitted(floods, "n1", 5, 100.0) == 3
    assert floods.over(100.0) == {"n1": 2}
