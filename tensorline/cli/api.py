"""The gateway's HTTP API, as far as the command asks it: JSON over a plain connection, bounded in time."""

import http.client
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from tensorline.cli.failure import CommandError, UsageError

__all__ = ["get_json", "is_ready", "read_token", "wait_trace"]

TIMEOUT_S = 5.0
TRACE_S = 3.0
BODY_LIMIT = 64 << 20


def get_json(url: str, path: str, token: str = "", **query: object) -> Any:
    """What `GET url/path?query` answers. Query values that are None are left out.

    Args:
        token: The operators'; "" where none is needed.
    Raises:
        CommandError: nobody answers, or the answer is an error: with the server's own sentence.
    """
    status, body = _get(url, _with_query(path, query), token, TIMEOUT_S)
    if status == 403:
        raise CommandError(
            f"the gateway at {url} refuses the operators' token of --token-file"
            if token
            else f"the gateway at {url} tells this to its operators alone: --token-file FILE names their token"
        )
    try:
        answer = json.loads(body)
    except ValueError:
        raise CommandError(
            f"{url}{path} answered with status {status} and no JSON: is it a Tensorline gateway?"
        ) from None
    if status != 200:
        told = answer.get("error") if isinstance(answer, dict) else None
        raise CommandError(str(told or f"{url}{path} answered with status {status}"))
    return answer


def wait_trace(url: str, trace_id: str, token: str = "", timeout_s: float = TRACE_S) -> Any:
    """The requests of a trace that has just ended: they are written down after the answer has left.

    Raises:
        CommandError: as `get_json`; or nothing of this trace has come within `timeout_s`.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            return get_json(url, "/api/traces", token, which=trace_id)
        except CommandError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def is_ready(url: str, timeout_s: float = TIMEOUT_S, model: str = "") -> bool:
    """Every model would be served now; or only `model`, when one is named.

    Raises:
        CommandError: nobody answers.
    """
    path = f"/v2/models/{quote(model, safe='')}/ready" if model else "/v2/health/ready"
    return _get(url, path, "", timeout_s)[0] == 200


def read_token(file: Path | None, flag: str = "--token-file") -> str:
    """
    Args:
        flag: That named the file.
    Raises:
        CommandError: there is a file, but it cannot be read.
    """
    if file is None:
        return ""
    try:
        return file.read_text().strip()
    except (OSError, ValueError) as error:
        raise CommandError(f"{flag} {file}: {getattr(error, 'strerror', None) or error}") from None


def _with_query(path: str, query: dict[str, object]) -> str:
    pairs = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in query.items() if value is not None)
    return f"{path}?{pairs}" if pairs else path


def _get(url: str, path: str, token: str, timeout_s: float) -> tuple[int, bytes]:
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(f"--url {url!r} is no HTTP address: http://HOST:PORT is wanted, as http://localhost:8000")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    connection = kind(host, port, timeout=timeout_s)
    try:
        connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read(BODY_LIMIT)
    except TimeoutError:
        raise CommandError(f"the gateway at {url} did not answer within {timeout_s:g} s") from None
    except http.client.HTTPException:  # its text would be what came, and that may be anything
        raise CommandError(
            f"what answers at {url} does not speak HTTP; the gateway's HTTP port is 8000 unless it was moved"
        ) from None
    except OSError as error:
        why = getattr(error, "reason", None) or error.strerror or type(error).__name__
        raise CommandError(f"no gateway answers at {url} ({why}); is the mesh up?") from None
    finally:
        connection.close()
