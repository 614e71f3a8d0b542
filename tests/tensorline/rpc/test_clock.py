from hypothesis import given
from hypothesis import strategies as st

from tensorline.rpc.clock import ClockOffset

MS = 1_000_000


def test_the_sample_with_the_shortest_round_trip_is_believed() -> None:
    clock = ClockOffset()
    clock.add(sent=0, peer=500 * MS, received=20 * MS)
    assert (clock.offset_ns, clock.error_ns) == (-490 * MS, 10 * MS)
    clock.add(sent=100 * MS, peer=600 * MS, received=102 * MS)
    assert (clock.offset_ns, clock.error_ns) == (-499 * MS, 1 * MS)
    clock.add(sent=200 * MS, peer=650 * MS, received=300 * MS)
    assert clock.offset_ns == -499 * MS


def test_an_offset_within_half_a_round_trip_is_none() -> None:
    clock = ClockOffset()
    clock.add(sent=0, peer=1 * MS, received=4 * MS)
    assert (clock.offset_ns, clock.error_ns) == (0, 2 * MS)


def test_a_good_sample_is_forgotten_after_sixteen_others() -> None:
    clock = ClockOffset()
    clock.add(sent=0, peer=1000 * MS, received=0)
    for at in range(16):
        clock.add(sent=at * MS, peer=5000 * MS + at * MS, received=at * MS + 2 * MS)
    assert clock.offset_ns == -4999 * MS


def test_an_answer_from_before_its_question_is_no_sample() -> None:
    clock = ClockOffset()
    clock.add(sent=9 * MS, peer=0, received=5 * MS)
    assert (clock.offset_ns, clock.error_ns) == (0, 0)


@given(st.integers(-(1 << 62), 1 << 62), st.lists(st.tuples(st.integers(0, MS), st.integers(0, MS)), min_size=1))
def test_the_truth_lies_within_the_error(offset: int, legs: list[tuple[int, int]]) -> None:
    """`offset`: what to add to the peer's time; `legs`: how long each beat and its answer took."""
    clock, now = ClockOffset(), 1 << 62
    for there, back in legs:
        clock.add(sent=now, peer=now + there - offset, received=now + there + back)
        now += 2 * MS
    assert abs(clock.offset_ns - offset) <= 2 * clock.error_ns + 1
