"""Another process of the mesh: reads tensors by their handles, writes each into its own arena, says where."""

import json
import sys
from pathlib import Path
from typing import Any

from tensorline.shm import Arena, ArenaReader, open_directory, write_array
from tensorline.tensor import Handle, Tensor


def to_json(tensor: Tensor) -> dict[str, Any]:
    handle = tensor.handle
    return {
        "name": tensor.name,
        "datatype": tensor.datatype,
        "shape": tensor.shape,
        "data": None if tensor.data is None else bytes(tensor.data).hex(),
        "handle": handle and [handle.arena.hex(), handle.block, handle.offset, handle.length, handle.generation],
    }


def from_json(fields: dict[str, Any]) -> Tensor:
    data, handle = fields["data"], fields["handle"]
    return Tensor(
        fields["name"],
        fields["datatype"],
        tuple(fields["shape"]),
        None if data is None else bytes.fromhex(data),
        handle and Handle(bytes.fromhex(handle[0]), *handle[1:]),
    )


def main() -> None:
    directory = open_directory(Path(sys.argv[1]))
    reader = ArenaReader(directory)
    with Arena(directory, 16 << 20) as arena:
        for line in sys.stdin:
            tensor = from_json(json.loads(line))
            written, _ = write_array(arena, tensor.name, reader.array(tensor), inline_limit=0)
            if tensor.handle is not None:
                reader.check(tensor.handle)
            print(json.dumps(to_json(written)), flush=True)


if __name__ == "__main__":
    main()
