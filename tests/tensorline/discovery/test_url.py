import contextlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorline.discovery import ConsulUrl, DiscoveryUrl, DnsUrl, FileUrl, StaticUrl, parse_discovery_url
from tensorline.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("file:///run/tensorline/registry", FileUrl(Path("/run/tensorline/registry"))),
        ("file:///with%20space", FileUrl(Path("/with space"))),
        ("consul://127.0.0.1:8500", ConsulUrl("127.0.0.1", 8500)),
        ("consul://[::1]:8500", ConsulUrl("::1", 8500)),
        (
            "consul://agent:8500?service=team-a&token_file=/run/token&dc=west&ttl_s=5&wait_s=60",
            ConsulUrl("agent", 8500, "team-a", Path("/run/token"), "west", 5.0, 60.0),
        ),
        ("static://a:1,b:2", StaticUrl(("a:1", "b:2"))),
        ("static://unix:/run/a.sock,[::1]:8001", StaticUrl(("unix:/run/a.sock", "[::1]:8001"))),
        ("dns://stages.mesh.svc:8001", DnsUrl("stages.mesh.svc", 8001)),
        ("dns://stages:8001?interval_s=0.5", DnsUrl("stages", 8001, 0.5)),
    ],
)
def test_the_four_forms(text: str, parsed: DiscoveryUrl) -> None:
    assert parse_discovery_url(text) == parsed


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "'' is no kind"),
        ("/run/registry", "'/run/registry' is no kind"),
        ("etcd://a:1", "'etcd' is no kind"),
        ("file://run/registry", "absolute path"),
        ("file:///run/a%00b", "absolute path"),
        ("file:///run/registry?poll_s=1", "absolute path"),
        ("consul://agent", "must be host:port"),
        ("consul://agent:70000", "must be host:port"),
        ("consul://agent:8500/v1", "nothing else"),
        ("consul://agent:8500?wait_s=601", "wait_s: must be 0.1 to 600 seconds"),
        ("consul://agent:8500?ttl_s=nan", "ttl_s: must be"),
        ("consul://agent:8500?ttl_s=10&ttl_s=20", "'ttl_s' is unknown or given twice"),
        ("consul://agent:8500?service=a.b", "letters, digits and dashes"),
        ("static://", "a target is empty"),
        ("static://a:1,,b:2", "a target is empty"),
        ("static://a:1,unix:relative", "must be unix:/path"),
        ("static://a:0", "must be host:port"),
        ("dns://name", "must be host:port"),
        ("dns://name:1?interval_s=0", "interval_s: must be"),
    ],
)
def test_anything_else_is_refused_with_what_came_and_the_forms(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_discovery_url(text)
    message = str(caught.value)
    assert repr(text.split("?")[0]) in message
    assert reason in message
    for form in ("file:///directory", "consul://host:port", "static://host:port", "dns://name:port"):
        assert form in message


@pytest.mark.parametrize(
    "text",
    ["consul://me:hunter2@agent:8500", "consul://agent:8500?token=hunter2", "consul://agent:8500?hunter2=1&hunter2"],
)
def test_a_secret_put_into_the_url_is_not_repeated(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_discovery_url(text)
    assert "hunter2" not in str(caught.value).replace("option 'hunter2'", "")


@given(st.one_of(st.text(), st.tuples(st.sampled_from(["file", "consul", "static", "dns"]), st.text()).map("://".join)))
@settings(deadline=None)
def test_any_text_is_parsed_or_a_config_error(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse_discovery_url(text)
