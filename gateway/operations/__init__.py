"""Every call besides inference, once for all front ends: a protobuf message in, a protobuf message out.

A *group* is an object whose public coroutine methods are named as RPCs of inference.GRPCInferenceService. It raises a
TensorlineError for whatever its caller should be told; a front end gives that the form of its protocol.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from google.protobuf.message import Message

from tensorline.protocol.stubs.inference import grpc_service_pb2 as pb

__all__ = ["Operation", "Operations"]

Operation = Callable[[Any], Awaitable[Message]]


class Operations:
    """The groups' methods by the name of their RPC.

    Raises:
        ValueError: two groups have the same one.
    """

    def __init__(self, *groups: object) -> None:
        found: dict[str, Operation] = {}
        for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods:
            behaviours = [getattr(group, method.name) for group in groups if hasattr(group, method.name)]
            if len(behaviours) > 1:
                raise ValueError(f"{method.name} is in more than one group")
            if behaviours:
                found[method.name] = behaviours[0]
        self.by_name: Mapping[str, Operation] = found

    def __getitem__(self, name: str) -> Operation:
        """
        Raises:
            KeyError: this gateway does not have it.
        """
        return self.by_name[name]
