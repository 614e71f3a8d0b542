"""A process that registers one instance and waits to be killed: `announcer.py URL ID [fork]`.

With `fork` it leaves a child behind that does nothing, as a model's own code may.
"""

import asyncio
import os
import sys
import time

from tensorline.discovery import ServiceInstance, open_registry


async def main(url: str, instance_id: str, *, fork: bool) -> None:
    async with open_registry(url) as registry:
        await registry.register(ServiceInstance(id=instance_id, service="model", address="127.0.0.1:9100"))
        child = 0
        if fork:
            child = os.fork()
            if child == 0:
                os.close(1)  # the reader of our output waits for its end
                time.sleep(60)  # noqa: ASYNC251 - the child has no loop
                os._exit(0)
        print(f"announced {child}", flush=True)
        await asyncio.Event().wait()


asyncio.run(main(sys.argv[1], sys.argv[2], fork="fork" in sys.argv[3:]))
