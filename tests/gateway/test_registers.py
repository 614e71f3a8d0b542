"""Values that processes agree about, whatever the order in which they hear of each other."""

import itertools

from gateway.registers import Registers

K = ("k",)


def test_the_later_of_two_holds_in_both() -> None:
    one, two = Registers(1, lambda: 100), Registers(2, lambda: 200)
    first, second = one.set({K: "a"}), two.set({K: "b"})
    assert one.merge(second) == {K: "b"}
    assert two.merge(first) == {}
    assert one.entries == two.entries


def test_of_two_at_one_time_the_same_one_holds_everywhere() -> None:
    one, two = Registers(1, lambda: 100), Registers(2, lambda: 100)
    first, second = one.set({K: "a"}), two.set({K: "b"})
    one.merge(second)
    two.merge(first)
    assert one.entries == two.entries == [(K, "b", (100, 2))]


def test_any_order_ends_the_same() -> None:
    source = Registers(3, lambda: 5)
    told = [source.set({K: number, ("j",): -number}) for number in range(4)]
    for order in itertools.permutations(told):
        other = Registers(4)
        for entries in order:
            other.merge(entries)
        assert sorted(other.entries) == sorted(source.entries)


def test_what_is_set_after_hearing_of_a_value_is_later_than_it_whatever_the_clock_says() -> None:
    ahead, behind = Registers(1, lambda: 10**9), Registers(2, lambda: 1)
    behind.merge(ahead.set({K: "old"}))
    ahead.merge(behind.set({K: "new"}))
    assert ahead.entries[0][1] == behind.entries[0][1] == "new"
    assert ahead.stamp(K) == behind.stamp(K) > (10**9, 1)
    assert ahead.stamp(("unknown",)) == (0, 0)
