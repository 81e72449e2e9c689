"""Floods are summed up once, and timers fire once."""

from hypothesis import given
from hypothesis import strategies as st

from unicron.rate_limits import OTHERS, TELEMETRY, Limit, RateLimiter, more_text
from unicron.service.timers import Timer, Timers

LIMIT = Limit(each=3, overall=5, period_s=10.0)


def admitted(floods, sender, count, now=0.0):
    return sum(floods.admit(sender, now) for _ in range(count))


def test_one_sender_is_let_through_so_often_and_the_rest_is_summed_up_once():
    floods = RateLimiter(LIMIT)
    assert admitted(floods, "n1", 4015) == 3
    assert admitted(floods, "n2", 1) == 1, "others are not drowned"
    assert floods.held_back(9.9) == {}
    assert floods.held_back(10.0) == {"n1": 4012}
    assert floods.held_back(10.0) == {}
    assert admitted(floods, "n1", 2, 10.0) == 2
    assert more_text(4012) == "4,012 more like this"


def test_senders_together_have_a_limit_and_a_forger_of_names_fills_no_memory():
    floods = RateLimiter(Limit(each=1, overall=2000, period_s=1.0))
    assert sum(floods.admit(f"n{number}", 0.0) for number in range(5000)) == 1001
    over = floods.held_back(1.0)
    assert over == {OTHERS: 5000 - 1001}
    assert admitted(RateLimiter(LIMIT), "a", 3) == 3
    floods = RateLimiter(LIMIT)
    assert [admitted(floods, name, 3) for name in "abc"] == [3, 2, 0]


def test_the_nodes_of_a_very_large_cluster_do_not_drown_one_another():
    floods = RateLimiter(TELEMETRY)
    beats = [f"node-{number}" for number in range(16384)] * 2
    assert all(floods.admit(node, 0.0) for node in beats)


def test_a_clock_that_is_set_back_ends_the_period():
    floods = RateLimiter(LIMIT)
    assert admitted(floods, "n1", 5, 1e6) == 3
    assert admitted(floods, "n1", 5, 100.0) == 3
    assert floods.held_back(100.0) == {"n1": 2}


# --- pending timers: each is due once, at its newest time, however many there are -------------------------------------


def timer(due):
    return Timer(due=due, cause="c", correlation="c")


KINDS = st.sampled_from(["set", "cancel", "now"])
MOVES = st.lists(st.tuples(KINDS, st.sampled_from("abcd"), st.integers(0, 9)), max_size=40)


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9)), MOVES)
def test_as_a_table_that_is_searched_each_time(first, moves):
    timers, table = Timers({name: timer(due) for name, due in first.items()}), dict(first)
    for move, name, number in moves:
        match move:
            case "set":
                timers.set(name, timer(number))
                table[name] = number
            case "cancel":
                timers.cancel(name)
                table.pop(name, None)
            case _:
                due = timers.due(number)
                assert due == [(each, timer(at)) for each, at in sorted(table.items()) if at <= number]
                for each, _ in due:
                    timers.cancel(each)
                    del table[each]
        assert timers.next_due() == min(table.values(), default=None)
        assert {each: pending.due for each, pending in timers.pending.items()} == table
