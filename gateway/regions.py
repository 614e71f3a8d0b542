"""What one request reads from and writes to its client's shared memory."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tensorline.errors import InternalError, InvalidTensorError, NotFoundError, TensorlineError, UnsupportedError
from tensorline.protocol.infer import InferRequest, RegionUse, shown
from tensorline.shm.region_table import OpenRegion, RegionTable
from tensorline.shm.regions import Window
from tensorline.tensor import Tensor

__all__ = ["DISABLED", "RequestRegions", "has_regions", "open_regions"]

DISABLED = "Client shared memory is disabled"


def has_regions(request: InferRequest) -> bool:
    return bool(request.regions) or any(output.region is not None for output in request.outputs)


@dataclass(slots=True)
class RequestRegions:
    """Made by `open_regions`; `close` it when nothing of the request is left that could touch them.

    Args:
        check: Told the bytes of each BYTES input once they are the gateway's own; raises InvalidTensorError.
    """

    table: RegionTable
    check: Callable[[Tensor, memoryview], None]
    inputs: dict[str, Window] = field(default_factory=dict)
    outputs: dict[str, Window] = field(default_factory=dict)
    used: Mapping[str, RegionUse] = field(default_factory=dict)
    """Of the outputs, as the client asked."""
    _taken: dict[str, OpenRegion] = field(default_factory=dict)

    @property
    def input_bytes(self) -> int:
        return sum(window.byte_size for window in self.inputs.values())

    def take(self, tensor: str, use: RegionUse) -> Window:
        try:
            taken = self._taken.get(use.region)
            if taken is None:
                taken = self._taken[use.region] = self.table.take(use.region)
            return taken.region.window(use.offset, use.byte_size)
        except (InvalidTensorError, NotFoundError) as error:
            raise type(error)(f"{error}; tensor '{shown(tensor)}' asked for it") from error

    def read(self, tensor: Tensor, target: memoryview) -> None:
        """The input's bytes into `target`, and a look at them. May block.

        Raises:
            InvalidTensorError: the client made its object shorter, or they are no elements of BYTES.
        """
        self.inputs[tensor.name].read_into(target)
        if tensor.datatype == "BYTES":
            self.check(tensor, target)

    def write(self, output: str, data: bytes | memoryview) -> None:
        """May block.

        Raises:
            InternalError: the client gave it too little room.
            InvalidTensorError, ResourceExhaustedError: as `Window.write_from`.
        """
        window = self.outputs[output]
        if len(data) > window.byte_size:
            raise InternalError(
                f"shared memory size specified with the request for output '{output}' ({window.byte_size} bytes) "
                f"should be at least {len(data)} bytes to hold the results"
            )
        if data:
            window.write_from(data)

    def close(self) -> None:
        while self._taken:
            self.table.give(self._taken.popitem()[1])


def open_regions(
    table: RegionTable | None, request: InferRequest, check: Callable[[Tensor, memoryview], None]
) -> RequestRegions:
    """Every region that the request names, in use from here on.

    Raises:
        UnsupportedError: clients' shared memory is switched off.
        NotFoundError: a region that nobody registered.
        InvalidTensorError: a tensor that is not within its region.
        ResourceExhaustedError: no descriptor is left.
    Source: protocol.md §5.5, §7.2.
    """
    if table is None:
        raise UnsupportedError(DISABLED)
    wanted = {output.name: output.region for output in request.outputs if output.region is not None}
    regions = RequestRegions(table, check, used=wanted)
    try:
        for name, use in request.regions.items():
            regions.inputs[name] = regions.take(name, use)
        for name, use in wanted.items():
            regions.outputs[name] = regions.take(name, use)
    except TensorlineError:
        regions.close()
        raise
    return regions
