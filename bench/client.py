"""A closed-loop load client that costs as little as Python can: one request, serialized once, sent over and over.

Run as a process of its own: `python -m bench.client <target> <in flight> <seconds>` with the request on standard input;
prints one JSON line.
"""

import asyncio
import json
import sys
import time

import uvloop
from grpc import aio

METHOD = "/inference.GRPCInferenceService/ModelInfer"


async def load(target: str, in_flight: int, seconds: float, request: bytes, warm_up_s: float) -> dict[str, float]:
    """Answers a second, and latency percentiles in ms, with `in_flight` requests open at all times."""
    async with aio.insecure_channel(
        target,
        options=[("grpc.max_receive_message_length", 1 << 30), ("grpc.max_send_message_length", 1 << 30)],
    ) as channel:
        call: aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
            METHOD
        )  # bytes in, bytes out: nothing is decoded here
        latencies: list[float] = []
        begin = time.perf_counter() + warm_up_s
        end = begin + seconds

        async def one_after_another() -> None:
            while (now := time.perf_counter()) < end:
                await call(request, timeout=60)
                if now >= begin:
                    latencies.append(time.perf_counter() - now)

        await asyncio.gather(*(one_after_another() for _ in range(in_flight)))
        elapsed = time.perf_counter() - begin
    latencies.sort()
    count = len(latencies)
    return {
        "rate": count / elapsed,
        "p50_ms": latencies[count // 2] * 1e3,
        "p99_ms": latencies[min(count - 1, count * 99 // 100)] * 1e3,
        "count": count,
    }


if __name__ == "__main__":
    result = uvloop.run(load(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.stdin.buffer.read(), warm_up_s=1.0))
    print(json.dumps(result))
