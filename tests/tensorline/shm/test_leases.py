import random

from tensorline.shm import Arena, Leases


def test_a_lease_takes_over_the_blocks_reference(arena: Arena) -> None:
    leases = Leases(arena)
    block = arena.allocate(100)
    leases.grant("stream", block, 10.0)
    assert (len(leases), arena.leases) == (1, 1)
    assert leases.release("stream", block.offset, block.generation)
    assert (len(leases), arena.leases) == (0, 0)


def test_only_its_holder_ends_a_lease_and_only_once(arena: Arena) -> None:
    leases = Leases(arena)
    block = arena.allocate(100)
    leases.grant("a", block, 10.0)
    assert not leases.release("b", block.offset, block.generation)
    assert not leases.release("a", block.offset, block.generation + 1)
    assert leases.release("a", block.offset, block.generation)
    assert not leases.release("a", block.offset, block.generation)
    assert arena.leases == 0


def test_requests_hold_rows_of_one_block(arena: Arena) -> None:
    leases = Leases(arena)
    block = arena.allocate(100)
    arena.retain(block.offset, block.generation, 2)
    leases.grant("a", block, 30.0)
    leases.grant("a", block, 10.0)
    leases.grant("b", block, 20.0)
    assert leases.release("a", block.offset, block.generation)
    assert leases.expire(10.0) == 0  # whichever released, the later end stands
    assert leases.release_all("b") == 1
    assert arena.leases == 1
    assert leases.expire(30.0) == 1
    assert (len(leases), arena.leases) == (0, 0)


def test_a_broken_stream_gives_all_back_and_no_other_does(arena: Arena) -> None:
    leases = Leases(arena)
    for number in range(10):
        leases.grant("broken" if number % 2 else "whole", arena.allocate(100), 10.0)
    assert leases.release_all("broken") == 5
    assert leases.release_all("broken") == 0
    assert (len(leases), arena.leases) == (5, 5)


def test_leases_expire_at_their_time(arena: Arena) -> None:
    leases = Leases(arena)
    for end in (3.0, 1.0, 2.0):
        leases.grant("stream", arena.allocate(100), end)
    assert [leases.expire(now) for now in (0.9, 1.0, 1.5, 5.0, 9.0)] == [0, 1, 0, 2, 0]
    assert arena.leases == 0


def test_a_block_released_and_used_again_does_not_expire_early(arena: Arena) -> None:
    leases = Leases(arena)
    first = arena.allocate(100)
    leases.grant("stream", first, 5.0)
    leases.release("stream", first.offset, first.generation)
    second = arena.allocate(100)
    assert second.offset == first.offset
    leases.grant("stream", second, 50.0)
    assert leases.expire(10.0) == 0
    assert arena.leases == 1


def test_ended_leases_do_not_pile_up(arena: Arena) -> None:
    leases = Leases(arena)
    kept = arena.allocate(100)
    leases.grant("stream", kept, 60.0)
    for number in range(20_000):
        block = arena.allocate(100)
        leases.grant(number % 3, block, 60.0 + number)
        leases.release(number % 3, block.offset, block.generation)
    assert len(leases._ends) <= 2048
    assert len(leases._held) == 1
    assert leases.expire(60.0) == 1


def test_every_lease_ends_once_whatever_happens(arena: Arena) -> None:
    leases, chance = Leases(arena), random.Random(3)
    granted: list[tuple[int, int, int, float]] = []
    ended = 0
    for now in range(300):
        for _ in range(chance.randrange(4)):
            block, holder, end = arena.allocate(100), chance.randrange(4), now + chance.random() * 20
            leases.grant(holder, block, end)
            granted.append((holder, block.offset, block.generation, end))
        if chance.random() < 0.5:
            holder, offset, generation, _ = chance.choice(granted) if granted else (0, 0, 0, 0.0)
            ended += leases.release(holder, offset, generation)
        if chance.random() < 0.02:
            ended += leases.release_all(chance.randrange(4))
        ended += leases.expire(now)
        assert len(leases) == arena.leases == len(granted) - ended
    ended += leases.expire(1000.0)
    assert ended == len(granted)
    assert arena.leased_bytes == 0
