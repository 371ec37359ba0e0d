"""Access control: requests from our own page, or with the token. Pages of other sites are refused.

Another site's page can make the browser send requests here. They are recognised by `Host` (DNS rebinding to
127.0.0.1), `Origin` and `Sec-Fetch-Site`; and the browser lets such a page read no answer.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import re
import secrets
import socket
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oomph.web.replies import refuse, reply

HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
OWN_SITE = ("same-origin", "none")  # Sec-Fetch-Site of our own page, and of an address typed by hand


# Not a redirect: after a link from another site, the browser would not send the new cookie with it.
GO_ON = b"""<!doctype html><meta charset="utf-8"><title>oomph</title>
<script>location.replace("/" + location.hash)</script><noscript><a href="/">oomph</a></noscript>"""
HTML = "text/html; charset=utf-8"
_INLINE = re.compile(rb"<script(?![^>]*\bsrc=)[^>]*>(.*?)</script>", re.DOTALL)


class Guard:
    """The outermost middleware: refuses requests with a reason, and adds security headers to every reply."""

    def __init__(self, app: ASGIApp, *, hosts: frozenset[str] | None, token: str | None) -> None:
        """`hosts` are the names the server answers to; None for any address of this machine."""
        self.app, self.hosts, self.token = app, hosts, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("content-security-policy", POLICY)
                headers.setdefault("cache-control", "no-store")
            await send(message)

        refusal = self._refusal(scope) or self._login(scope)
        await (refusal or self.app)(scope, receive, send_safely)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if not self._is_ours(host):
            return refuse(403, "Host", "this server does not answer to that name", host)
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return refuse(403, "Origin", "another site's page may not ask here", origin)
        site = headers.get("sec-fetch-site", "none")
        # A link on another site may open the page, but nothing else.
        if site not in OWN_SITE and not (scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"):
            return refuse(403, "Sec-Fetch-Site", "another site's page may not ask here", site)
        return None

    def _is_ours(self, host: str) -> bool:
        name = _without_port(host)
        return name in self.hosts if self.hosts is not None else _is_address(name) or name in own_names()

    def _login(self, scope: Scope) -> Response | None:
        """Refuse requests without the token, if there is one. Opening the address that contains it sets a cookie."""
        if self.token is None:
            return None
        headers = Headers(scope=scope)
        query = parse_qs(scope["query_string"].decode("latin-1"))
        given = query.pop("token", [""])[0]
        name = cookie_name(scope)
        if given and scope["path"] == "/" and secrets.compare_digest(given.encode(), self.token.encode()):
            cookie = f"{name}={self.token}; Path=/; HttpOnly; SameSite=Strict"
            return reply(
                GO_ON, headers={"set-cookie": cookie, "content-security-policy": policy_for(GO_ON)}, media=HTML
            )
        told = [_cookie(headers.get("cookie", ""), name), _bearer(headers.get("authorization", ""))]
        if any(secrets.compare_digest(each.encode(), self.token.encode()) for each in told):
            return None
        return refuse(401, "token", "needed here", allowed="the address that oomph serve printed, with its ?token=")


def policy_for(page: bytes) -> str:
    """The Content-Security-Policy of one of our pages. Inline scripts (an import map cannot be a file) pass by hash."""
    hashes = [base64.b64encode(hashlib.sha256(text).digest()).decode() for text in _INLINE.findall(page)]
    return f"{POLICY}; script-src 'self'" + "".join(f" 'sha256-{each}'" for each in hashes)


def cookie_name(scope: Scope) -> str:
    """The cookie's name. It contains the port, because all ports of a host share their cookies."""
    server = scope.get("server")
    return f"oomph_{server[1] if server else 0}"


def _cookie(text: str, name: str) -> str:
    try:
        found = SimpleCookie(text).get(name)
    except CookieError:
        return ""
    return found.value if found is not None else ""


def _bearer(text: str) -> str:
    """The token in an Authorization header; the scheme is case-insensitive (RFC 9110)."""
    scheme, _, token = text.partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _without_port(host: str) -> str:
    """The name in a Host header: ::1 for "[::1]:80"."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0].lower() if host.count(":") == 1 else host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def own_names() -> frozenset[str]:
    """This machine's host names."""
    name = socket.gethostname().lower()
    return frozenset({"localhost", name, name.partition(".")[0], f"{name.partition('.')[0]}.local"})
