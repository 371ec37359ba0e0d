"""Replies, and reading a request's body within its limits."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

BODY_SECONDS = 30.0  # a body that trickles in more slowly is not waited for


def reply(
    body: bytes, status: int = 200, headers: Mapping[str, str] | None = None, media: str = "application/json"
) -> Response:
    """A reply of bytes that are ready."""
    return Response(body, status, {"content-type": media, **(headers or {})})


def takes_gzip(accepted: str) -> bool:
    """Whether an Accept-Encoding header allows gzip: named, and not with a weight of nothing."""
    for part in accepted.split(","):
        name, _, weight = part.replace(" ", "").lower().partition(";q=")
        if name == "gzip":
            return weight.strip("0.") != "" or not weight
    return False


class TooLargeError(Exception):
    """The body is larger than what is taken."""


class TooSlowError(Exception):
    """The body did not come in time, or not whole."""


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The whole body. Raises `TooLargeError` before reading more than that, or `TooSlowError`."""
    declared = request.headers.get("content-length", "0")
    if declared.isdigit() and int(declared) > most_bytes:
        raise TooLargeError
    parts, size = [], 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                size += len(part)
                if size > most_bytes:
                    raise TooLargeError
                parts.append(part)
    except (TimeoutError, ClientDisconnect):
        raise TooSlowError from None
    return b"".join(parts)
