"""One look at a gateway: what it serves and whom it has heard of."""

from dataclasses import dataclass

from tensorline.cli.api import get_json, is_ready
from tensorline.cli.failure import CommandError

__all__ = ["Seen", "look", "short_reason"]


@dataclass(frozen=True, slots=True)
class Seen:
    is_live: bool = False
    is_ready: bool = False
    services: frozenset[str] | None = None
    """Those that it has heard of; None: it does not tell us."""
    models: tuple[str, ...] = ()
    unready: tuple[tuple[str, str], ...] = ()
    """Name of each model that is not, and why."""
    is_loading: bool = False
    """Some stage is loading a model."""


def look(url: str, token: str) -> Seen:
    """Never raises: a gateway that does not answer is not live."""
    try:
        ready = is_ready(url)  # first: what is asked after it is at least as new
    except CommandError:
        return Seen()
    try:
        instances = get_json(url, "/api/instances", token)
        models = get_json(url, "/api/models", token)
    except CommandError:  # beyond loopback it wants a token
        return Seen(True, ready)
    states = {str(model).rpartition(" ")[2] for entry in instances for model in entry.get("models", ())}
    states |= {str(entry["state"]) for entry in models}
    up = {str(entry["name"]) for entry in models if entry["state"] == "READY"}
    down = {(str(entry["name"]), short_reason(str(entry["name"]), str(entry.get("reason", "")))) for entry in models}
    return Seen(
        is_live=True,
        is_ready=ready,
        services=frozenset(str(entry.get("service", "")) for entry in instances),
        models=tuple(sorted(up)),
        unready=tuple(sorted((name, why) for name, why in down if name not in up)),
        is_loading="LOADING" in states,
    )


def short_reason(name: str, text: str) -> str:
    """Why a model is not ready, without what stands in front for a client that asked for the model."""
    what, separator, why = text.partition(": ")
    if what == "Request for unknown model" and separator:
        why = why.partition(": ")[2] or why
        return why.removeprefix(f"'{name}' ")
    return text
