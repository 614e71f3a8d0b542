import random

from hypothesis import given
from hypothesis import strategies as st

from tensorline.shm.allocator import Allocator, block_size


@given(st.integers(1, 1 << 40))
def test_a_size_class_fits_wastes_an_eighth_at_most_and_stays_aligned(byte_size: int) -> None:
    payload = block_size(byte_size) - 64
    assert payload >= byte_size
    assert payload % 64 == 0
    assert payload - byte_size < max(64, byte_size / 8)
    assert block_size(payload) == payload + 64


def test_a_power_of_two_is_not_rounded_up() -> None:
    assert [block_size(1 << bits) - 64 for bits in (6, 10, 24)] == [1 << 6, 1 << 10, 1 << 24]


def test_the_last_freed_of_a_size_is_taken_first() -> None:
    space = Allocator()
    space.add(64, 4096)
    first, second = space.take(128), space.take(128)
    assert first is not None
    assert second is not None
    space.give(second, 128)
    space.give(first, 128)
    assert (space.take(128), space.take(128)) == (first, second)


def test_free_neighbours_merge_when_nothing_else_is_large_enough() -> None:
    space = Allocator()
    space.add(64, 64 * 100)
    offsets = [space.take(64) for _ in range(100)]
    assert space.take(64) is None
    random.Random(5).shuffle(offsets)
    for offset in offsets:
        assert offset is not None
        space.give(offset, 64)
    assert space.take(64 * 100) == 64


def test_new_space_merges_with_the_free_end() -> None:
    space = Allocator()
    space.add(0, 1024)
    assert space.take(512) == 0
    assert (space.free_before(1024), space.is_free(1024)) == (512, False)
    space.add(1024, 512)
    assert space.take(1024) == 512
