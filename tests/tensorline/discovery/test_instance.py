import contextlib
import dataclasses
import string

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorline.discovery import ServiceInstance
from tensorline.discovery.consul.entry import decode_entries, encode_registration
from tensorline.discovery.instance import JSON_LIMIT, check_instance, decode_instance, encode_instance, join_address
from tensorline.errors import ConfigError
from tests.tensorline.discovery.test_contract import LARGEST, ONE, TWO

printable = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=60)
host = st.one_of(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9.-]{0,30}", fullmatch=True), st.ip_addresses(v=6).map(str))
instances = st.builds(
    ServiceInstance,
    id=st.text(string.ascii_letters + string.digits + "._-", min_size=1, max_size=128),
    service=st.sampled_from(["", "preprocess", "model", "postprocess", "team.own-1"]),
    address=st.builds(join_address, host, st.integers(1, 65_535)).filter(
        lambda text: "0.0.0.0" not in text and text[:3] != "[::"
    ),
    local_address=st.sampled_from(["", "unix:/run/a b/ö.sock"]),
    nonce=printable,
    host=printable,
    models=st.lists(printable.filter(bool), unique=True, max_size=5).map(tuple),
    release=printable,
    metadata=st.dictionaries(
        st.text(string.ascii_letters + string.digits + "_-", min_size=1, max_size=100),
        printable,
        max_size=5,
    ),
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
NAMES = [each.name for each in dataclasses.fields(ServiceInstance)]


def as_consul_answers(instance: ServiceInstance, status: str = "passing") -> dict[str, object]:
    registration = encode_registration(instance)
    return {
        "Node": {"Node": "n1", "Address": "10.0.0.1"},
        "Service": {
            "ID": registration.id,
            "Address": registration.address,
            "Port": registration.port or 0,
            "Tags": registration.tags,
            "Meta": registration.meta,
        },
        "Checks": [{"Status": "passing"}, {"Status": status}],
    }


@given(instances)
@settings(deadline=None)
def test_json_gives_back_what_it_was_given(instance: ServiceInstance) -> None:
    assert decode_instance(encode_instance(instance)) == instance


@given(instances)
@settings(deadline=None)
def test_consul_gives_back_what_it_was_given_within_its_limits(instance: ServiceInstance) -> None:
    registration = encode_registration(instance)
    assert len(registration.meta) <= 64
    assert all(len(key) <= 128 and len(value.encode()) <= 512 for key, value in registration.meta.items())
    entries, bad = decode_entries([as_consul_answers(instance)])
    assert (entries[instance.id].instance, bad) == (instance, {})


def test_the_largest_instance_is_within_the_limits() -> None:
    assert len(encode_instance(LARGEST)) < JSON_LIMIT
    assert decode_instance(encode_instance(LARGEST)) == LARGEST
    assert len(encode_registration(LARGEST).meta) <= 64


@given(st.dictionaries(st.sampled_from([*NAMES, "new"]), json_values))
@settings(deadline=None)
def test_foreign_json_is_an_instance_or_a_config_error(fields: dict[str, object]) -> None:
    with contextlib.suppress(ConfigError):
        check_instance(decode_instance(orjson.dumps(fields)))


@given(
    st.lists(json_values | st.fixed_dictionaries({"Node": json_values, "Service": json_values, "Checks": json_values}))
)
def test_a_foreign_answer_is_entries_or_reasons(answer: list[object]) -> None:
    entries, bad = decode_entries(answer)
    assert len(entries) + len(bad) <= len(answer)


def test_fields_of_a_newer_release_are_passed_over() -> None:
    fields = orjson.loads(encode_instance(ONE)) | {"weight": 3}
    assert decode_instance(orjson.dumps(fields)) == ONE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": ""}, "id '' must match"),
        ({"id": "a/b"}, "id 'a/b' must match"),
        ({"id": "i" * 129}, "must match"),
        ({"service": "a b"}, "service 'a b' must match"),
        ({"address": "", "local_address": ""}, "needs an address or a local address"),
        ({"address": "host"}, "address 'host' must be host:port"),
        ({"address": "::1:80"}, "IPv6 in brackets"),
        ({"local_address": f"unix:/{'p' * 107}"}, "at most 107 bytes"),
        ({"local_address": "/run/a.sock"}, "must be unix:/path"),
        ({"nonce": "a\nb"}, r"nonce 'a\\nb' must be 0 to 512 bytes of printable text"),
        ({"host": "ö" * 257}, "must be 0 to 512 bytes"),
        ({"release": "\ud800"}, "printable text"),
        ({"models": ("",)}, "models '' must be 1 to 256 bytes"),
        ({"models": ("a/1", "a/1")}, "names a model twice"),
        ({"models": tuple(map(str, range(1025)))}, "1025 models, at most 1024"),
        ({"metadata": {"a b": ""}}, "metadata 'a b' keys must match"),
        ({"metadata": {"key": "v" * 513}}, "metadata key 'v+' must be 0 to 512 bytes"),
        ({"metadata": {str(number): "" for number in range(49)}}, "49 metadata pairs, at most 48"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_instance(dataclasses.replace(ONE, **change))  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("address", ["0.0.0.0:9001", "[::]:9001"])
def test_consul_is_not_given_an_address_that_nobody_can_dial(address: str) -> None:
    with pytest.raises(ConfigError, match="name one that others can dial"):
        encode_registration(dataclasses.replace(ONE, address=address))


def test_an_entry_made_by_hand_has_an_address_and_no_name() -> None:
    entry = {
        "Node": {"Node": "n1", "Address": "10.0.0.1"},
        "Service": {"ID": "by-hand", "Address": "", "Port": 9001, "Tags": None, "Meta": None},
        "Checks": [],
    }
    entries, _ = decode_entries([entry])
    (only,) = entries.values()
    assert only.instance == ServiceInstance(id="", service="", address="10.0.0.1:9001")


def test_an_entry_of_another_format_is_ignored_with_the_reason() -> None:
    entry = as_consul_answers(ONE)
    entry["Service"]["Meta"]["tensorline"] = "2"  # type: ignore[index]
    entries, bad = decode_entries([entry, as_consul_answers(TWO)])
    assert list(entries) == ["pre-1"]
    assert bad == {"n1/model-1": "tensorline '2' is of another release, this one reads '1'"}


@pytest.mark.parametrize("status", ["critical", "maintenance", "new"])
def test_any_check_that_does_not_pass_makes_it_unhealthy(status: str) -> None:
    entries, _ = decode_entries([as_consul_answers(ONE, status)])
    assert not entries["model-1"].is_healthy


@pytest.mark.parametrize("order", [1, -1])
def test_of_one_id_on_two_nodes_the_healthy_one_counts(order: int) -> None:
    entries, _ = decode_entries([as_consul_answers(ONE, "critical"), as_consul_answers(ONE)][::order])
    assert entries["model-1"].is_healthy
