"""Replies, refusals, and reading a request body within limits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from oomph.errors import Problem
from oomph.web.answers import problems_json

BODY_SECONDS = 30.0  # within which the whole body must arrive


def reply(
    body: bytes, status: int = 200, headers: Mapping[str, str] | None = None, media: str = "application/json"
) -> Response:
    """A reply with this body."""
    return Response(body, status, {"content-type": media, **(headers or {})})


def refuse(status: int, where: str, what: str, found: str | None = None, allowed: str | None = None) -> Response:
    """A refusal, in the form of all errors."""
    return reply(problems_json([Problem(where, what, found[:200] if found else None, allowed)]), status)


def takes_gzip(accepted: str) -> bool:
    """Whether an Accept-Encoding header accepts gzip with q > 0."""
    for part in accepted.split(","):
        name, _, weight = part.replace(" ", "").lower().partition(";q=")
        if name == "gzip":
            return weight.strip("0.") != "" or not weight
    return False


class TooLargeError(Exception):
    """The body is larger than its limit."""


class TooSlowError(Exception):
    """The body did not arrive in time, or was cut off."""


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body. Raises `TooLargeError` before reading more than `max_bytes`, or `TooSlowError`."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > max_bytes:
        raise TooLargeError
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise TooLargeError
                parts.append(part)
    except (TimeoutError, ClientDisconnect):
        raise TooSlowError from None
    return b"".join(parts)
