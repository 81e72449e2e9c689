"""Pending timers: each is due once, at its newest time, however many there are."""

from hypothesis import given
from hypothesis import strategies as st

from unicron.timers import Timer, Timers


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
