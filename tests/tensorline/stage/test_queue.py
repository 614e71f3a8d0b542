"""The queue beside a model of it that is too simple to be wrong."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tensorline.errors import OverloadedError
from tensorline.stage.queue import BatchQueue
from tensorline.stage.request import StageRequest


def request(rows: int = 1, shape: object = "a", deadline: float = math.inf) -> StageRequest:
    return StageRequest("m", "", [], (), "", deadline, lambda _: None, rows=rows, signature=(shape,))


def taken(queue: BatchQueue, now: float = 0.0) -> list[int]:
    batch, _ = queue.take(now)
    return [each.rows for each in batch]


@dataclass
class Waiting:
    since: float
    request: StageRequest


@dataclass
class Model:
    """The rules, in the order in which they are written down."""

    limit: int
    max_rows: int
    delay_s: float
    waiting: list[Waiting] = field(default_factory=list)

    def drop_front(self, now: float) -> list[StageRequest]:
        dropped = []
        while self.waiting and is_over(self.waiting[0].request, now):
            dropped.append(self.waiting.pop(0).request)
        return dropped

    def batch(self, now: float) -> tuple[list[StageRequest], bool]:
        """What would run together if it ran now, and whether nothing more can join it."""
        live = [each.request for each in self.waiting if not is_over(each.request, now)]
        if self.max_rows == 1:
            return live[:1], True
        together: list[StageRequest] = []
        for each in live:
            rows = sum(one.rows for one in together)
            if together and (each.signature != together[0].signature or rows + each.rows > self.max_rows):
                return together, True
            together.append(each)
        return together, sum(one.rows for one in together) >= self.max_rows


def is_over(each: StageRequest, now: float) -> bool:
    return each.is_cancelled or each.deadline <= now


class QueueBesideModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.added: list[StageRequest] = []
        self.left: list[StageRequest] = []

    @initialize(limit=st.integers(1, 8), max_rows=st.integers(1, 8), delay_s=st.sampled_from([0.0, 1.0, 5.0]))
    def begin(self, limit: int, max_rows: int, delay_s: float) -> None:
        self.queue = BatchQueue(limit, max_rows, delay_s)
        self.model = Model(limit, max_rows, delay_s)

    @rule(passed_s=st.sampled_from([0.25, 1.0, 3.0]))
    def wait(self, passed_s: float) -> None:
        self.now += passed_s

    @rule(
        rows=st.integers(0, 8),
        shape=st.sampled_from("ab"),
        left_s=st.one_of(st.just(math.inf), st.sampled_from([-1.0, 0.0, 0.5, 2.0, 10.0])),
    )
    def add(self, rows: int, shape: str, left_s: float) -> None:
        new = request(min(rows, self.model.max_rows), shape, self.now + left_s)
        is_full = len(self.model.waiting) >= self.model.limit
        live = [each for each in self.model.waiting if not is_over(each.request, self.now)]
        if is_full and len(live) >= self.model.limit:
            with pytest.raises(
                OverloadedError, match=rf"Exceeds maximum queue size \({self.model.limit}\) of model 'm'"
            ):
                self.queue.add(new, self.now)
            return
        dropped = self.queue.add(new, self.now)
        expected = [each.request for each in self.model.waiting if each not in live] if is_full else []
        assert dropped == expected
        self.added.append(new)
        self.left += dropped
        self.model.waiting = (live if is_full else self.model.waiting) + [Waiting(self.now, new)]

    @rule()
    def take(self) -> None:
        batch, dropped = self.queue.take(self.now)
        expected_drops = self.model.drop_front(self.now)
        together, is_closed = self.model.batch(self.now)
        must_wait = together and not is_closed and self.now < self.model.waiting[0].since + self.model.delay_s
        assert batch == ([] if must_wait else together)
        assert sum(each.rows for each in batch) <= self.model.max_rows
        assert not any(is_over(each, self.now) for each in batch)
        assert len({each.signature for each in batch}) <= 1
        gone = {id(each) for each in (*batch, *dropped)}
        # What is dropped is over, and stood in front of the batch's last.
        assert all(is_over(each, self.now) for each in dropped)
        assert {id(each) for each in expected_drops} <= gone
        self.model.waiting = [each for each in self.model.waiting if id(each.request) not in gone]
        self.left += [*batch, *dropped]

    @precondition(lambda self: self.model.waiting)
    @rule(data=st.data(), is_removed=st.booleans())
    def cancel(self, data: st.DataObject, is_removed: bool) -> None:
        one = data.draw(st.sampled_from(self.model.waiting))
        one.request.is_cancelled = True
        if is_removed:
            assert self.queue.remove(one.request)
            self.model.waiting.remove(one)
            self.left.append(one.request)
            assert not self.queue.remove(one.request)

    @rule()
    def clear(self) -> None:
        assert self.queue.clear() == [each.request for each in self.model.waiting]
        self.left += [each.request for each in self.model.waiting]
        self.model.waiting = []

    @invariant()
    def nothing_is_lost_and_nothing_leaves_twice(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert len(self.queue) == len(self.model.waiting) <= self.model.limit
        assert sorted(map(id, self.left + [w.request for w in self.model.waiting])) == sorted(map(id, self.added))

    @invariant()
    def it_says_when_to_look_again(self) -> None:
        if not hasattr(self, "queue"):
            return
        if not self.model.waiting or not self.model.delay_s:
            assert self.queue.wake_at() == math.inf
        else:
            assert self.queue.wake_at() == self.model.waiting[0].since + self.model.delay_s


def test_it_does_what_the_plain_model_does() -> None:
    run_state_machine_as_test(
        QueueBesideModel, settings=settings(max_examples=80, stateful_step_count=40, deadline=None)
    )


@given(st.lists(st.integers(1, 4), min_size=1, max_size=40), st.integers(4, 9))
def test_requests_leave_in_the_order_they_came_in(rows: list[int], max_rows: int) -> None:
    queue = BatchQueue(100, max_rows)
    requests = [request(count) for count in rows]
    for each in requests:
        queue.add(each, 0.0)
    out: list[StageRequest] = []
    while queue:
        batch, _ = queue.take(0.0)
        assert 0 < sum(each.rows for each in batch) <= max_rows
        out += batch
    assert out == requests


def test_without_batching_each_runs_alone() -> None:
    queue = BatchQueue(10)
    for _ in range(3):
        queue.add(request(), 0.0)
    assert [taken(queue) for _ in range(4)] == [[1], [1], [1], []]


def test_the_limit_counts_rows_and_not_requests() -> None:
    queue = BatchQueue(10, max_rows=8)
    for rows in (5, 5, 3, 8, 1):
        queue.add(request(rows), 0.0)
    assert [taken(queue) for _ in range(4)] == [[5], [5, 3], [8], [1]]


def test_only_neighbours_of_one_shape_are_stacked() -> None:
    queue = BatchQueue(10, max_rows=8)
    for shape in "aabba":
        queue.add(request(1, shape), 0.0)
    assert [len(taken(queue)) for _ in range(3)] == [2, 2, 1]


def test_a_batch_waits_for_more_until_it_is_full_closed_or_late() -> None:
    queue = BatchQueue(10, max_rows=4, delay_s=1.0)
    queue.add(request(2), 0.0)
    assert taken(queue, 0.5) == []
    assert queue.wake_at() == 1.0
    queue.add(request(2), 0.6)
    assert taken(queue, 0.6) == [2, 2]
    queue.add(request(2), 1.0)
    queue.add(request(3), 1.0)  # can never join the first
    assert taken(queue, 1.0) == [2]
    assert taken(queue, 1.9) == []
    assert taken(queue, 2.0) == [3]


def test_the_dead_make_room_when_the_queue_is_full() -> None:
    queue = BatchQueue(2)
    dead, alive = request(deadline=1.0), request()
    queue.add(dead, 0.0)
    queue.add(alive, 0.0)
    with pytest.raises(OverloadedError):
        queue.add(request(), 0.5)
    assert queue.add(request(), 1.0) == [dead]


def test_the_dead_within_a_batch_are_not_run_and_take_no_place() -> None:
    queue = BatchQueue(10, max_rows=3)
    requests = [request() for _ in range(5)]
    for each in requests:
        queue.add(each, 0.0)
    requests[1].is_cancelled = True
    batch, dropped = queue.take(0.0)
    assert batch == [requests[0], requests[2], requests[3]]
    assert dropped == [requests[1]]
