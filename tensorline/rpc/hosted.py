"""What a stage tells of the models that it hosts."""

from dataclasses import dataclass
from typing import Final

__all__ = ["LOADING", "READY", "UNAVAILABLE", "UNLOADED", "UNLOADING", "HostedModel"]

READY: Final = "READY"
LOADING: Final = "LOADING"
UNLOADING: Final = "UNLOADING"
UNAVAILABLE: Final = "UNAVAILABLE"
UNLOADED: Final = "unloaded"
"""The reason of a version that is UNAVAILABLE because somebody wanted it so."""


@dataclass(frozen=True, slots=True)
class HostedModel:
    """A model version as its stage describes it."""

    name: str
    version: str
    state: str
    reason: str
    config: bytes
    load: int = 0
    """Another number after each load, within the stage's process; 0: not loaded."""
    load_ns: int = 0
    """How long that took."""
    override: str = ""
    """Digest of the configuration and files that a client gave in place of the repository's; "" for those."""
