"""Which instance a step goes to, and how often a failed one is tried again."""

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gateway.balancing import RetryBudget, choose


@dataclass(eq=False)
class Instance:
    in_flight: int = 0
    is_colocated: bool = True
    accepts: bool = True


def test_least_outstanding_work_first() -> None:
    idle = Instance(0)
    assert choose([Instance(3), idle, Instance(1)], turn=0) is idle


def test_one_that_reads_our_handles_before_one_that_does_not() -> None:
    near, far = Instance(9), Instance(0, is_colocated=False)
    assert choose([far, near], turn=0) is near
    near.accepts = False
    assert choose([far, near], turn=0) is far


def test_equals_take_turns() -> None:
    equals = [Instance() for _ in range(3)]
    counts = Counter(id(choose(equals, turn)) for turn in range(300))
    assert sorted(counts.values()) == [100, 100, 100]


def test_nobody_is_chosen_against_its_will() -> None:
    only = Instance()
    assert choose([only], 0, exclude=(only,)) is None
    only.accepts = False
    assert choose([only], 0) is None
    assert choose([], 0) is None


@given(st.lists(st.builds(Instance, st.integers(0, 5), st.booleans(), st.booleans()), max_size=8), st.integers(0, 1000))
def test_the_choice_is_the_best_that_accepts(instances: list[Instance], turn: int) -> None:
    chosen = choose(instances, turn)
    willing = [instance for instance in instances if instance.accepts]
    if chosen is None:
        assert not willing
    else:
        rank = (not chosen.is_colocated, chosen.in_flight)
        assert rank == min((not instance.is_colocated, instance.in_flight) for instance in willing)


def test_a_failing_mesh_is_not_buried_in_retries() -> None:
    budget = RetryBudget()
    allowed = 0
    for _ in range(1000):  # every request fails, all within a moment
        budget.note_request()
        allowed += budget.take(now=1.0)
    assert allowed <= 0.2 * 1000 + RetryBudget.BURST


def test_the_budget_comes_back_with_time() -> None:
    budget = RetryBudget()
    while budget.take(now=1.0):
        pass
    assert not budget.take(now=1.05)
    assert budget.take(now=1.2)
