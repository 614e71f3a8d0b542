"""Metadata and headers that become parameters of the request, as `--grpc-header-forward-pattern` chooses them.

Source: protocol.md §1, §13.5.
"""

import dataclasses
import re
from collections.abc import Iterable
from typing import Final

from tensorline.errors import ConfigError, InvalidTensorError
from tensorline.protocol.infer import InferRequest, ParameterValue, shown
from tensorline.protocol.parameters import RESERVED_KEYS, RESERVED_PREFIX

__all__ = ["NO_FORWARDING", "Forwarding"]


class Forwarding:
    """Args:
        pattern: Of whole names; empty: nothing is forwarded.
    Raises:
        ConfigError: it is no regular expression.
    """

    def __init__(self, pattern: str = "") -> None:
        try:
            self._pattern = re.compile(pattern) if pattern else None
        except re.error as error:
            raise ConfigError(f"header forward pattern '{pattern}' is no regular expression: {error}") from error

    @property
    def is_active(self) -> bool:
        return self._pattern is not None

    def apply(self, request: InferRequest, headers: Iterable[tuple[str, str | bytes]]) -> InferRequest:
        """The request with the matching headers among its custom parameters, before those of its own with their names.

        Binary metadata and the names of reserved parameters are left out: they are never a model's.

        Raises:
            InvalidTensorError: a matching name that begins with "triton_".
        """
        if self._pattern is None:
            return request
        forwarded: dict[str, ParameterValue] = {}
        for name, value in headers:
            if isinstance(value, bytes) or name in RESERVED_KEYS or not self._pattern.fullmatch(name):
                continue
            if name.lower().startswith(RESERVED_PREFIX):
                raise InvalidTensorError(
                    f"header '{shown(name)}' cannot be forwarded: parameter keys starting with '{RESERVED_PREFIX}' are "
                    "reserved"
                )
            forwarded[name] = value
        if not forwarded:
            return request
        return dataclasses.replace(request, parameters={**request.parameters, **forwarded})


NO_FORWARDING: Final = Forwarding()
