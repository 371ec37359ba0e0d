"""Other sites' pages get nothing, a network address needs the token, and nothing is larger than it may be."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from web_helpers import Running, running

PLAN = {"preset": "gpt2", "gpu": "RTX 4070"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server that others could reach."""
    with running(tmp_path_factory.mktemp("guarded"), "--host", "0.0.0.0") as found:
        yield found


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "localhost.evil.example:80"])
def test_a_name_that_is_not_ours_is_refused(client: httpx.Client, host: str) -> None:
    assert client.get("/", headers={"host": host}).status_code == 403


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "[::1]", "LOCALHOST"])
def test_this_machines_own_names_are_ours(client: httpx.Client, server: Running, name: str) -> None:
    port = urlsplit(server.url).port
    assert client.get("/api/presets", headers={"host": f"{name}:{port}"}).status_code == 200


ORIGINS = ["http://evil.example", "null", "http://127.0.0.1:1", "https://127.0.0.1", "", "http://[", "http://a]b"]


@pytest.mark.parametrize("origin", ORIGINS)
def test_another_sites_page_is_refused(client: httpx.Client, origin: str) -> None:
    assert client.post("/api/plan", json=PLAN, headers={"origin": origin}).status_code == 403


def test_our_own_page_is_not(client: httpx.Client, server: Running) -> None:
    assert client.post("/api/plan", json=PLAN, headers={"origin": server.url}).status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_browser_that_says_another_page_asks_is_believed(client: httpx.Client, site: str) -> None:
    assert client.get("/api/runs", headers={"sec-fetch-site": site}).status_code == 403
    assert client.get("/", headers={"sec-fetch-site": site, "sec-fetch-mode": "no-cors"}).status_code == 403


def test_a_link_from_elsewhere_opens_the_page(client: httpx.Client) -> None:
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert client.get("/", headers=headers).status_code == 200


@pytest.mark.parametrize("media", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_form_cannot_ask(client: httpx.Client, media: str) -> None:
    reply = client.post("/api/plan", content=json.dumps(PLAN), headers={"content-type": media})
    assert reply.status_code == 415


def test_no_other_site_is_ever_allowed_to_read(client: httpx.Client) -> None:
    reply = client.options("/api/plan", headers={"access-control-request-method": "POST"})
    assert reply.status_code == 405 and "access-control-allow-origin" not in reply.headers


def test_every_reply_has_the_headers_that_keep_a_browser_safe(client: httpx.Client) -> None:
    for path in ("/", "/api/gpus", "/nowhere", "/static/nothing.js"):
        headers = client.get(path).headers
        assert "default-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff" and headers["x-frame-options"] == "DENY"


@pytest.mark.parametrize(("verb", "size_mib"), [("plan", 3), ("explain", 9)])
def test_a_body_beyond_the_limit_is_refused(client: httpx.Client, verb: str, size_mib: int) -> None:
    body = b'{"text": "' + b"x" * (size_mib * 2**20) + b'"}'
    headers = {"content-type": "application/json"}
    assert client.post(f"/api/{verb}", content=body, headers=headers).status_code == 413
    in_pieces = (body[at : at + 2**16] for at in range(0, len(body), 2**16))  # no Content-Length
    with suppress(httpx.WriteError):  # the server may hang up on us in the middle of it
        assert client.post(f"/api/{verb}", content=in_pieces, headers=headers).status_code == 413


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"nul", b'{"gpu": "\xff"}', b"[" * 100_000, b'{"set": {"n_layer": 1e999}}']
)
def test_what_is_not_a_question_is_a_400(client: httpx.Client, body: bytes) -> None:
    reply = client.post("/api/plan", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400 and reply.json()["problems"]


def test_an_address_that_is_none_and_a_wrong_method_are_told(client: httpx.Client) -> None:
    assert client.get("/api/nothing").status_code == 404
    reply = client.get("/api/plan")
    assert reply.status_code == 405 and reply.headers["allow"] == "POST" and reply.json()["problems"]


def test_without_the_token_nothing_is_shown(guarded: Running) -> None:
    for path in ("/", "/api/runs", "/static/js/main.js", "/openapi.json", "/?token=wrong"):
        assert httpx.get(guarded.url + path).status_code == 401


def test_the_address_with_the_token_leaves_a_cookie_that_opens_everything(guarded: Running) -> None:
    with httpx.Client(base_url=guarded.url) as client:
        reply = client.get("/", params={"token": guarded.token})
        cookie = reply.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert guarded.token not in reply.text and "location.replace" in reply.text
        assert client.get("/api/runs").status_code == 200


def test_a_program_may_send_the_token_as_a_header(guarded: Running) -> None:
    for scheme, status in (("Bearer ", 200), ("bearer ", 200), ("Basic ", 401), ("", 401)):
        headers = {"authorization": f"{scheme}{guarded.token}"}
        assert httpx.get(f"{guarded.url}/api/runs", headers=headers).status_code == status


def test_on_the_network_addresses_and_the_machines_name_are_ours_and_others_not(guarded: Running) -> None:
    headers = {"authorization": f"Bearer {guarded.token}"}
    for host, status in ((socket.gethostname(), 200), ("192.168.7.7", 200), ("evil.example", 403)):
        assert httpx.get(f"{guarded.url}/api/runs", headers={**headers, "host": host}).status_code == status


def test_no_path_leads_out_of_the_static_files(client: httpx.Client) -> None:
    for path in (
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static//etc/passwd",
        "/static/..%2fapp.py",
        "/static/",
    ):
        with socket.create_connection((client.base_url.host, client.base_url.port)) as raw:
            raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            assert raw.makefile("rb").readline().split()[1] == b"404"


def test_the_runs_folder_may_be_missing(tmp_path: Path) -> None:
    with running(tmp_path / "not yet") as found:
        assert found.client.get("/api/runs").json()["runs"] == []
