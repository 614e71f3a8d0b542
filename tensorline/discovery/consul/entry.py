"""A service instance as Consul holds it, and back.

Address and port are Consul's own fields. The service is a tag, so that Consul's DNS answers for it
(`preprocess.tensorline-stage.service.consul`), and so are the models, of which there may be more than metadata has room
for. The rest is metadata under its own name, the instance's own metadata behind "x-".
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tensorline.discovery.instance import check_instance, instance_of, join_address, split_address
from tensorline.discovery.registry import ServiceInstance
from tensorline.errors import ConfigError

__all__ = ["Entry", "Registration", "check_id", "decode_entries", "encode_registration"]

MARK = "tensorline"
MARK_VALUE = "1"
"""Raised when a change makes entries unreadable to older releases."""
TEXTS = ("service", "local_address", "nonce", "host", "release")
MODEL_TAG = "model="
METADATA = "x-"
ANY_ADDRESSES = frozenset({"0.0.0.0", "::"})  # noqa: S104 - refused, not bound
HEALTHY = frozenset({"passing", "warning"})


@dataclass(frozen=True, slots=True)
class Registration:
    """What is sent to the agent."""

    id: str
    address: str
    port: int | None
    tags: list[str]
    meta: dict[str, str]


@dataclass(frozen=True, slots=True)
class Entry:
    """One instance in the agent's answer."""

    instance: ServiceInstance
    is_healthy: bool


def check_id(instance_id: str) -> str:
    """Of the TTL check: the name that Consul would give it."""
    return f"service:{instance_id}"


def encode_registration(instance: ServiceInstance) -> Registration:
    """
    Raises:
        ConfigError: a field does not fit, or the address is one that Consul refuses.
    """
    check_instance(instance)
    host, port = split_address(instance.address) if instance.address else ("", None)
    if host in ANY_ADDRESSES:
        raise ConfigError(f"address {instance.address!r} cannot be registered: name one that others can dial")
    texts = {name: getattr(instance, name) for name in TEXTS}
    return Registration(
        id=instance.id,
        address=host,
        port=port,
        tags=[*filter(None, [instance.service]), *(MODEL_TAG + model for model in instance.models)],
        meta={
            MARK: MARK_VALUE,
            **{name: text for name, text in texts.items() if text},
            **{METADATA + key: value for key, value in instance.metadata.items()},
        },
    )


def decode_entries(answer: Iterable[object]) -> tuple[dict[str, Entry], dict[str, str]]:
    """The entries of a `/v1/health/service` answer, by a key that is unique in the cluster.

    Returns:
        The entries, and of those that cannot be used the reason, by the same kind of key.
    """
    entries: dict[str, Entry] = {}
    bad: dict[str, str] = {}
    for raw in answer:
        key = "?"
        try:
            node, service, checks = _part(raw, "Node"), _part(raw, "Service"), _checks(raw)
            key = f"{node.get('Node')}/{service.get('ID')}"
            instance = _decode(node, service)
        except ConfigError as err:
            bad[key] = str(err)
            continue
        entry = Entry(instance, is_healthy=all(check.get("Status") in HEALTHY for check in checks))
        # One id on two nodes: it went over to another agent, and the first has not noticed yet.
        key = instance.id or key
        if key not in entries or entry.is_healthy:
            entries[key] = entry
    return entries, bad


def _decode(node: Mapping[str, object], service: Mapping[str, object]) -> ServiceInstance:
    meta = service.get("Meta") or {}
    tags = service.get("Tags") or []
    if not isinstance(meta, dict) or not isinstance(tags, list):
        raise ConfigError("Meta or Tags have the wrong type")
    address = _address(node, service)
    if MARK not in meta:
        # Registered by somebody's own hand: who it is will be learned from its Hello.
        split_address(address)
        return ServiceInstance(id="", service="", address=address)
    if meta[MARK] != MARK_VALUE:
        raise ConfigError(f"{MARK} {meta[MARK]!r} is of another release, this one reads {MARK_VALUE!r}")
    return instance_of(
        {
            "id": service.get("ID"),
            "address": address,
            "models": [tag.removeprefix(MODEL_TAG) for tag in tags if str(tag).startswith(MODEL_TAG)],
            "metadata": {key.removeprefix(METADATA): value for key, value in meta.items() if key.startswith(METADATA)},
            **{name: meta.get(name, "") for name in TEXTS},
        }
    )


def _address(node: Mapping[str, object], service: Mapping[str, object]) -> str:
    port = service.get("Port") or 0
    if not isinstance(port, int):
        raise ConfigError("Port is not a number")
    # Without a service address Consul means that of the node.
    return join_address(str(service.get("Address") or node.get("Address") or ""), port) if port else ""


def _part(raw: object, name: str) -> Mapping[str, object]:
    part = raw.get(name) if isinstance(raw, dict) else None
    if not isinstance(part, dict):
        raise ConfigError(f"an entry without {name}")
    return part


def _checks(raw: object) -> list[Mapping[str, object]]:
    checks = raw.get("Checks") if isinstance(raw, dict) else None
    if not isinstance(checks, list) or not all(isinstance(check, dict) for check in checks):
        raise ConfigError("an entry without Checks")
    return checks
