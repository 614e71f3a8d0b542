"""Clients' shared memory: which regions there are, and their beginning and end."""

import asyncio

from gateway.regions import DISABLED
from tensorline.errors import NotFoundError, UnsupportedError
from tensorline.protocol.infer import shown
from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb
from tensorline.shm.region_table import RegionTable
from tensorline.shm.regions import RegionSpec

__all__ = ["SharedMemory"]


class SharedMemory:
    """Args:
        table: None: clients' shared memory is switched off.

    Source: protocol.md §7.1, errors.md §6.
    """

    def __init__(self, table: RegionTable | None) -> None:
        self._table = table

    async def SystemSharedMemoryStatus(
        self, request: pb.SystemSharedMemoryStatusRequest
    ) -> pb.SystemSharedMemoryStatusResponse:
        answer = pb.SystemSharedMemoryStatusResponse()
        if self._table is not None:
            for spec in await asyncio.to_thread(self._table.status, request.name):
                region = answer.regions[spec.name]
                region.name, region.key = spec.name, spec.key
                region.offset, region.byte_size = spec.offset, spec.byte_size
        return answer

    async def SystemSharedMemoryRegister(
        self, request: pb.SystemSharedMemoryRegisterRequest
    ) -> pb.SystemSharedMemoryRegisterResponse:
        spec = RegionSpec(request.name, request.key, request.offset, request.byte_size)
        await asyncio.to_thread(self._enabled().register, spec)
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        await asyncio.to_thread(self._enabled().unregister, request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def CudaSharedMemoryStatus(
        self, request: pb.CudaSharedMemoryStatusRequest
    ) -> pb.CudaSharedMemoryStatusResponse:
        if self._table is not None and request.name:
            raise NotFoundError(f"Unable to find cuda shared memory region: '{shown(request.name)}'")
        return pb.CudaSharedMemoryStatusResponse()

    async def CudaSharedMemoryRegister(
        self, request: pb.CudaSharedMemoryRegisterRequest
    ) -> pb.CudaSharedMemoryRegisterResponse:
        self._enabled()
        raise UnsupportedError(
            f"failed to register shared memory region: invalid args: CUDA shared memory region '{shown(request.name)}' "
            "cannot be used, this server has no GPU memory of clients; use system shared memory"
        )

    async def CudaSharedMemoryUnregister(
        self, request: pb.CudaSharedMemoryUnregisterRequest
    ) -> pb.CudaSharedMemoryUnregisterResponse:
        self._enabled()  # else nothing to do: there is none, and an unknown name is no error
        return pb.CudaSharedMemoryUnregisterResponse()

    def _enabled(self) -> RegionTable:
        if self._table is None:
            raise UnsupportedError(DISABLED)
        return self._table
