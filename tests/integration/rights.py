"""Which key opens which route."""

from __future__ import annotations

from typing import Any

import requests

from tests.integration.conftest import Server

KEYS = (None, "user", "admin", "other")
NORMAL: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/v1/completions", {"model": "demo", "prompt": "a b c", "allowed_token_ids": [5, 6]}),
    ("POST", "/generate", {"text": "a b c", "sampling_params": {"max_new_tokens": 0}}),
    ("GET", "/v1/models", None),
    ("GET", "/server_info", None),
)
OF_ADMINISTRATORS: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/flush_cache", None),
    ("POST", "/abort_request", {"rid": "nobody's"}),
)


def assert_rights(server: Server, *, normal: set[str | None], of_administrators: set[str | None]) -> None:
    """Each key opens these and no others; health and metrics are open."""
    for routes, expected in ((NORMAL, normal), (OF_ADMINISTRATORS, of_administrators)):
        for method, path, body in routes:
            opens = set()
            for key in KEYS:
                headers = {} if key is None else {"Authorization": f"Bearer {key}"}
                reply = requests.request(method, server.url + path, json=body, headers=headers, timeout=60)
                assert reply.status_code < 500, (path, reply.text)
                if reply.status_code not in (401, 403):
                    opens.add(key)
            assert opens == expected, path
    for path in ("/health", "/metrics"):
        assert requests.get(server.url + path, timeout=60).status_code == 200
