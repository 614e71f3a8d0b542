from hypothesis import given
from hypothesis import strategies as st

from tensorline.cli.backoff import Backoff

RUNS = st.lists(st.floats(0, 1e6, allow_nan=False), min_size=1, max_size=60)


def test_it_doubles_from_half_a_second_to_thirty() -> None:
    backoff = Backoff()
    assert [backoff.ended(1.0) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_minute_of_health_starts_it_anew() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.ended(59.9)
    assert backoff.ended(60.0) == 0.5
    assert backoff.ended(0.0) == 1.0


@given(RUNS)
def test_a_delay_is_bounded_and_never_shrinks_without_a_healthy_run(runs: list[float]) -> None:
    backoff = Backoff()
    before = 0.0
    for ran_s in runs:
        delay_s = backoff.ended(ran_s)
        assert backoff.first_s <= delay_s <= backoff.most_s
        assert delay_s == backoff.first_s if ran_s >= backoff.healthy_s else delay_s >= before
        before = delay_s


@given(st.integers(31, 10_000))
def test_weeks_of_failing_do_not_overflow(ends: int) -> None:
    assert Backoff(ends=ends).ended(0.0) == 30.0
