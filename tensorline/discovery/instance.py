"""What a service instance may hold, and its JSON form.

The limits are those of the narrowest registry (Consul: 64 metadata pairs, keys of 128 and values of 512 bytes), so that
what one registry takes every registry takes.
"""

import re
from collections.abc import Mapping

import orjson

from tensorline.discovery.registry import ServiceInstance
from tensorline.errors import ConfigError

__all__ = [
    "INSTANCE_ID",
    "JSON_LIMIT",
    "check_instance",
    "check_local_address",
    "decode_instance",
    "encode_instance",
    "instance_of",
    "join_address",
    "split_address",
]

INSTANCE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
SERVICE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}(?:%[A-Za-z0-9._-]{1,16})?\]):([0-9]{1,5})")
METADATA_KEY = re.compile(r"[A-Za-z0-9_-]{1,100}")

TEXT_LIMIT = 512
"""Bytes of one text field."""
MODELS_LIMIT = 1024
MODEL_LIMIT = 256
"""Bytes of one "name/version"."""
METADATA_LIMIT = 48
"""Pairs; the rest of Consul's 64 is ours."""
UNIX_PATH_LIMIT = 107
"""Bytes of `sockaddr_un.sun_path`, less its end."""
JSON_LIMIT = 1 << 20
"""Bytes; all limits above at their worst, every character escaped, stay below it."""


def check_instance(instance: ServiceInstance) -> None:
    """
    Raises:
        ConfigError: with the field, what came and what is wanted.
    """
    if not INSTANCE_ID.fullmatch(instance.id):
        raise _wrong("id", instance.id, f"must match {INSTANCE_ID.pattern}")
    if instance.service and not SERVICE.fullmatch(instance.service):
        raise _wrong("service", instance.service, f"must match {SERVICE.pattern}")
    if not instance.address and not instance.local_address:
        raise ConfigError("a service instance needs an address or a local address")
    if instance.address:
        split_address(instance.address)
    if instance.local_address:
        check_local_address(instance.local_address)
    for name, text in (("nonce", instance.nonce), ("host", instance.host), ("release", instance.release)):
        _check_text(name, text, TEXT_LIMIT)
    if len(instance.models) > MODELS_LIMIT:
        raise ConfigError(
            f"a service instance has {len(instance.models)} models, at most {MODELS_LIMIT} can be registered"
        )
    for model in instance.models:
        _check_text("models", model, MODEL_LIMIT, least=1)
    if len(set(instance.models)) != len(instance.models):
        raise ConfigError("a service instance names a model twice")
    if len(instance.metadata) > METADATA_LIMIT:
        raise ConfigError(f"a service instance has {len(instance.metadata)} metadata pairs, at most {METADATA_LIMIT}")
    for key, value in instance.metadata.items():
        if not METADATA_KEY.fullmatch(key):
            raise _wrong("metadata", key, f"keys must match {METADATA_KEY.pattern}")
        _check_text(f"metadata {key}", value, TEXT_LIMIT)


def split_address(address: str) -> tuple[str, int]:
    """Host (an IPv6 one without its brackets) and port of a "host:port".

    Raises:
        ConfigError: not one that can be dialled.
    """
    found = ADDRESS.fullmatch(address)
    if not found or not 0 < int(found[1]) < 65_536:
        raise _wrong("address", address, "must be host:port with a port of 1 to 65535, IPv6 in brackets")
    return address[: found.start(1) - 1].strip("[]"), int(found[1])


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_local_address(address: str) -> None:
    """
    Raises:
        ConfigError: not a "unix:/path" that fits a socket address.
    """
    path = address.removeprefix("unix:")
    if path == address or not path.startswith("/") or not path.isprintable() or len(path.encode()) > UNIX_PATH_LIMIT:
        raise _wrong("local address", address, f"must be unix:/path of at most {UNIX_PATH_LIMIT} bytes")


def encode_instance(instance: ServiceInstance) -> bytes:
    """The JSON form of a checked instance."""
    return orjson.dumps(
        {
            "id": instance.id,
            "service": instance.service,
            "address": instance.address,
            "local_address": instance.local_address,
            "nonce": instance.nonce,
            "host": instance.host,
            "models": instance.models,
            "release": instance.release,
            "metadata": dict(instance.metadata),
        },
        option=orjson.OPT_INDENT_2,
    )


def decode_instance(raw: bytes) -> ServiceInstance:
    """
    Raises:
        ConfigError: not the JSON form of an instance that `check_instance` takes.
    """
    try:
        fields = orjson.loads(raw)
    except orjson.JSONDecodeError as err:
        raise ConfigError(f"a service instance is not JSON: {err}") from None
    if not isinstance(fields, dict):
        raise ConfigError("a service instance is not a JSON object")
    return instance_of(fields)


def instance_of(fields: Mapping[str, object]) -> ServiceInstance:
    """An instance from untrusted fields. Unknown ones are passed over: a neighbouring release may have written more.

    Raises:
        ConfigError: a field is missing, of another type, or not what `check_instance` takes.
    """
    texts: dict[str, str] = {}
    for name in ("id", "service", "address", "local_address", "nonce", "host", "release"):
        value = fields.get(name, "")
        if not isinstance(value, str):
            raise _wrong(name, value, "must be a string")
        texts[name] = value
    models = fields.get("models", [])
    if not isinstance(models, list) or not all(isinstance(model, str) for model in models):
        raise _wrong("models", models, "must be a list of strings")
    metadata = fields.get("metadata", {})
    if not isinstance(metadata, dict) or not all(isinstance(part, str) for pair in metadata.items() for part in pair):
        raise _wrong("metadata", metadata, "must be an object of strings")
    instance = ServiceInstance(**texts, models=tuple(models), metadata=metadata)
    check_instance(instance)
    return instance


def _check_text(name: str, text: str, most: int, *, least: int = 0) -> None:
    # isprintable first: it refuses lone surrogates, which encode() would raise on.
    if not text.isprintable() or not least <= len(text.encode()) <= most:
        raise _wrong(name, text, f"must be {least} to {most} bytes of printable text")


def _wrong(name: str, value: object, wanted: str) -> ConfigError:
    return ConfigError(f"{name} {str(value)[:200]!r} {wanted}")
