"""Case G01: the caller's flags are obeyed; of the rest the configured share."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from tensorline.telemetry.record import RequestRecord
from tensorline.telemetry.sampling import Kept, Sampler, TokenBucket
from tests.tensorline.telemetry.records import CALLED, START, failed, refused, root_context, single

UNSAMPLED = replace(CALLED, flags=0)


def settled(sampler: Sampler) -> Sampler:
    """Past the first requests of the minute, of which the slowest so far is always kept."""
    sampler.decide(slow(10**6), 0.0)
    return sampler


def slow(compute_us: int, flags: int = 0) -> RequestRecord:
    return single(root_context(flags), compute_us=compute_us)


def test_sampled_by_the_caller_is_always_kept() -> None:
    sampler = Sampler(0.0, 0.0, keeps_notable=False)
    assert {sampler.decide(single(CALLED), n / 1000) for n in range(100)} == {Kept.CALLER}


def test_unsampled_by_the_caller_is_never_kept() -> None:
    sampler = Sampler(1.0, None)
    records = [single(UNSAMPLED, compute_us=10**6), failed(13, context=UNSAMPLED), refused(14, context=UNSAMPLED)]
    assert {sampler.decide(record, 0.0) for record in records} == {None}


@pytest.mark.parametrize("ratio", [0.0, 0.25, 0.5, 1.0])
def test_of_the_rest_the_configured_ratio_is_kept(ratio: float) -> None:
    sampler = settled(Sampler(ratio, None))
    kept = sum(sampler.decide(slow(10), 0.0) is not None for _ in range(4000))
    assert kept == pytest.approx(4000 * ratio, abs=150)


@settings(deadline=None)  # the machine may be busy
@given(st.binary(min_size=16, max_size=16), st.floats(0, 1))
def test_the_share_is_the_sdks(trace_id: bytes, ratio: float) -> None:
    theirs = TraceIdRatioBased(ratio).should_sample(None, int.from_bytes(trace_id, "big"), "x")
    assert Sampler(ratio, None).head(trace_id, 0.0) == (theirs.decision is Decision.RECORD_AND_SAMPLE)


def test_the_share_has_a_rate() -> None:
    sampler = settled(Sampler(1.0, 100.0))
    kept = sum(sampler.decide(slow(10), second + n / 1500) is not None for second in range(10) for n in range(1500))
    assert kept == pytest.approx(1000 + 100, abs=20)


def test_what_the_head_took_is_kept_and_paid_once() -> None:
    sampler = settled(Sampler(1.0, 1.0))
    trace = root_context()
    assert sampler.head(trace.trace_id, 1.0)
    assert not sampler.head(trace.trace_id, 1.0)
    assert sampler.decide(single(replace(trace, flags=1)), 1.0) is Kept.HEAD


def test_errors_are_kept_but_a_flood_is_not() -> None:
    sampler = Sampler(0.0, None, errors_per_s=50.0)
    kept = [sampler.decide(failed(13, context=root_context()), 0.0) for _ in range(1000)]
    assert kept.count(Kept.ERROR) == 50
    assert sampler.decide(refused(3, context=root_context()), 1.0) is Kept.ERROR
    assert sampler.decide(refused(1, context=root_context()), 1.0) is None


def test_the_slowest_of_each_model_and_minute_is_kept() -> None:
    sampler = Sampler(0.0, None)
    assert sampler.decide(slow(500), 0.0) is Kept.SLOW
    assert sampler.decide(slow(400), 1.0) is None
    assert sampler.decide(slow(600), 2.0) is Kept.SLOW
    other = slow(10)
    other.model = "other"
    assert sampler.decide(other, 3.0) is Kept.SLOW
    assert sampler.decide(slow(10), 60.0) is Kept.SLOW
    assert sampler.decide(slow(5), 61.0) is None


def test_few_of_many_equal_requests_are_the_slowest() -> None:
    sampler = Sampler(0.0, None)
    durations = [(n * 7919) % 10_007 for n in range(10_000)]
    kept = sum(sampler.decide(slow(duration), 0.0) is not None for duration in durations)
    assert 1 <= kept < 40


def test_switched_off_keeps_nothing_but_the_callers() -> None:
    sampler = Sampler(0.0, None, keeps_notable=False)
    assert sampler.decide(failed(13, context=root_context()), 0.0) is None
    assert sampler.decide(slow(10**6), 0.0) is None


def test_invented_models_do_not_fill_the_memory() -> None:
    sampler = Sampler(0.0, None)
    for number in range(5000):
        record = slow(10)
        record.model = f"m{number}"
        sampler.decide(record, 0.0)
    assert len(sampler._slowest) <= 1024


def test_a_bucket_gives_what_its_rate_allows() -> None:
    bucket = TokenBucket(2.0)
    assert [bucket.take(0.0) for _ in range(3)] == [True, True, False]
    assert not bucket.take(0.4)
    assert bucket.take(0.5)
    assert not bucket.take(0.1)  # a clock that goes back gives nothing
    assert [bucket.take(100.0) for _ in range(3)] == [True, True, False]
    assert not TokenBucket(0.0).take(START)
