"""Trace and log settings through every published client."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.compat.clients import Client
from tests.compat.server import Server

TRACE_KEYS = {"trace_level", "trace_rate", "trace_count", "trace_mode"}
LOG_KEYS = {"log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format"}


def plain(client: Client, settings: dict[str, Any]) -> dict[str, Any]:
    """Settings alike for all clients: texts for one value, lists of texts for levels."""
    found = settings.get("settings", {}) if client.is_grpc else settings
    values = {key: each.get("value", []) if client.is_grpc else each for key, each in found.items()}
    return {
        key: value[0] if isinstance(value, list) and key != "trace_level" and len(value) == 1 else value
        for key, value in values.items()
    }


def plain_log(client: Client, settings: dict[str, Any]) -> dict[str, Any]:
    if not client.is_grpc:
        return settings
    return {key: next(iter(each.values()), "") for key, each in settings["settings"].items()}


@asynccontextmanager
async def traced(client: Client, model: str | None = None) -> AsyncIterator[None]:
    """Settings go back to those of the start."""
    try:
        yield
    finally:
        await client.update_trace_settings(model, dict.fromkeys(("trace_level", "trace_rate", "trace_count")))


async def test_trace_settings_are_told_whole(client: Client) -> None:
    settings = plain(client, await client.get_trace_settings())
    assert set(settings) >= TRACE_KEYS
    assert isinstance(settings["trace_level"], list)
    assert int(settings["trace_count"]) >= -1


async def test_trace_settings_of_all_and_of_one_model(client: Client) -> None:
    async with traced(client), traced(client, "simple"):
        changed = await client.update_trace_settings(settings={"trace_rate": "7", "trace_level": ["TIMESTAMPS"]})
        assert plain(client, changed)["trace_rate"] == "7"
        assert plain(client, changed)["trace_level"] == ["TIMESTAMPS"]
        assert plain(client, await client.get_trace_settings("simple"))["trace_rate"] == "7"  # follows
        changed = await client.update_trace_settings("simple", {"trace_rate": "9", "trace_count": "5"})
        assert plain(client, changed)["trace_rate"] == "9"
        assert plain(client, changed)["trace_count"] == "5"
        assert plain(client, await client.get_trace_settings())["trace_rate"] == "7"
        assert plain(client, await client.get_trace_settings("line_FP32"))["trace_rate"] == "7"
        cleared = await client.update_trace_settings("simple", {"trace_rate": None})
        assert plain(client, cleared)["trace_rate"] == "7"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"trace_level": ["OFF", "TIMESTAMPS"]}, "Expect only one trace level 'OFF' is specified"),
        ({"trace_rate": "many"}, "Unable to parse 'trace_rate', got: many"),
        ({"trace_count": "-2"}, "Expecting value >= -1"),
        ({"trace_rate": "99999999999999999999"}, "Unable to parse 'trace_rate', value is out of range"),
    ],
)
async def test_trace_settings_that_cannot_be(client: Client, settings: dict[str, Any], words: str) -> None:
    """None of a call's settings is taken when one is bad."""
    before = plain(client, await client.get_trace_settings())
    with client.refused("INVALID_ARGUMENT", words):
        await client.update_trace_settings(settings={"trace_rate": "77", **settings})
    assert plain(client, await client.get_trace_settings()) == before


async def test_a_file_cannot_be_chosen_by_a_client(client: Client) -> None:
    words = "file location can not be updated through network protocol"
    with client.refused("UNIMPLEMENTED", words):
        await client.update_trace_settings(settings={"trace_file": "/tmp/x"})
    with client.refused("UNIMPLEMENTED", words):
        await client.update_log_settings({"log_file": "/tmp/x"})


async def test_trace_settings_of_no_model(client: Client) -> None:
    with client.refused("INVALID_ARGUMENT", "Request for unknown model : nobody"):
        await client.get_trace_settings("nobody")


async def test_log_settings(client: Client) -> None:
    before = plain_log(client, await client.get_log_settings())
    assert set(before) >= LOG_KEYS
    try:
        changed = await client.update_log_settings({"log_verbose_level": 1, "log_info": False, "log_format": "ISO8601"})
        now = plain_log(client, changed)
        assert (now["log_verbose_level"], now["log_info"], now["log_format"]) == (1, False, "ISO8601")
        assert plain_log(client, await client.get_log_settings()) == now
    finally:
        names = ("log_verbose_level", "log_info", "log_format")
        await client.update_log_settings({name: before[name] for name in names})


async def test_log_settings_that_cannot_be(client: Client, server: Server) -> None:
    code = server.either(ours="INVALID_ARGUMENT", triton="INVALID_ARGUMENT" if client.is_grpc else "UNAVAILABLE")
    with client.refused(code, "log_format, got: short"):
        await client.update_log_settings({"log_format": "short"})
