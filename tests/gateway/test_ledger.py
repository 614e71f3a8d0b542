"""Each block goes back exactly once, and not before its last tensor is read."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.ledger import Ledger
from tensorline.tensor import Handle, Tensor


def tensor(block: int) -> Tensor:
    return Tensor("t", "FP32", (4,), None, Handle(b"a" * 16, block, block + 64, 16, 7))


def test_a_block_with_two_tensors_goes_back_with_the_second() -> None:
    returned: list[Handle] = []
    ledger = Ledger(returned.append)
    ledger.hold([tensor(1), tensor(1)])
    ledger.drop([tensor(1)])
    assert returned == []
    ledger.drop([tensor(1)])
    assert [handle.block for handle in returned] == [1]


def test_inline_and_unknown_tensors_are_nothing_to_it() -> None:
    returned: list[Handle] = []
    ledger = Ledger(returned.append)
    ledger.hold([Tensor("t", "FP32", (1,), b"1234")])
    ledger.drop([Tensor("t", "FP32", (1,), b"1234"), tensor(9)])
    ledger.close()
    assert returned == []


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=40))
def test_whatever_happens_each_hold_ends_in_one_return(actions: list[tuple[bool, int]]) -> None:
    returned: list[Handle] = []
    ledger = Ledger(returned.append)
    live: dict[int, int] = {}
    expected = 0
    for is_hold, block in actions:
        if is_hold:
            ledger.hold([tensor(block)], inputs=[tensor(block)] if live.get(block) else [])
            live[block] = live.get(block, 0) + 1
        else:
            ledger.drop([tensor(block)])
            if live.get(block):
                live[block] -= 1
                expected += not live[block]
        assert len(returned) == expected
    ledger.close()
    assert len(returned) == expected + sum(1 for count in live.values() if count)
    ledger.close()
    assert len(returned) == expected + sum(1 for count in live.values() if count)


def test_two_steps_in_one_batch_have_a_lease_each() -> None:
    returned: list[Handle] = []
    ledger = Ledger(returned.append)
    ledger.hold([tensor(1)])
    ledger.hold([tensor(1)])
    ledger.drop([tensor(1), tensor(1)])
    assert [handle.block for handle in returned] == [1, 1]


def test_a_tensor_that_is_passed_on_brings_no_lease() -> None:
    returned: list[Handle] = []
    ledger = Ledger(returned.append)
    ledger.hold([tensor(1)])
    ledger.hold([tensor(1)], inputs=[tensor(1)])
    ledger.close()
    assert [handle.block for handle in returned] == [1]
