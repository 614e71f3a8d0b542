"""Run in a mount namespace of its own: fills a tmpfs of 16 MiB through an arena that may take 64."""

import sys
from pathlib import Path

from tensorline.errors import ResourceExhaustedError
from tensorline.shm import Arena, ArenaReader, Block, open_directory, sweep


def main() -> None:
    directory = open_directory(Path(sys.argv[1]))
    blocks: list[Block] = []
    with Arena(directory, 64 << 20, first_segment_bytes=4 << 20) as arena:
        refusal = ""
        while not refusal:
            try:
                blocks.append(arena.allocate((1 << 20) - 5))
                blocks[-1].view[:] = bytes([len(blocks)]) * blocks[-1].byte_size
            except ResourceExhaustedError as err:
                refusal = str(err)
        assert str(arena.limit) in refusal, refusal
        assert "/" not in refusal, refusal
        assert len(blocks) >= 12, len(blocks)  # it did not give up where only doubling was impossible
        reader = ArenaReader(directory)
        for number, block in enumerate(blocks, 1):
            assert reader.view(block.handle) == bytes([number]) * block.byte_size
        blocks.pop().release()
        arena.allocate_blocking(1 << 20, 0).release()
        try:
            Arena(directory, 8 << 20)
        except ResourceExhaustedError:
            pass
        else:
            raise AssertionError("there was room for a second arena")
        names = {entry.name for entry in directory.path.iterdir()}
        assert names == {"nonce", f"{arena.id.hex()}.arena"}, names
        assert sweep(directory) == []
    print("alive")


if __name__ == "__main__":
    main()
