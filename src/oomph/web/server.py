"""Running the server: its socket, a token if other machines can reach it, a clean shutdown."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from oomph.errors import InputError, Problem
from oomph.web.app import Web

DEFAULT_PORT = 8642
MAX_CONNECTIONS = 512  # open at once; more are refused
HEADER_SECONDS = 10.0  # for a request's headers to arrive; uvicorn's own limits apply only after a first response
LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})


class Address(msgspec.Struct, frozen=True):
    """The page's address."""

    host: str
    port: int
    token: str | None

    @property
    def url(self) -> str:
        """The URL to open in a browser on this machine."""
        host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(self.host, self.host)
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{self.port}/" + (f"?token={self.token}" if self.token else "")


class _Server(uvicorn.Server):
    """uvicorn's server, which also closes open event streams on shutdown."""

    def __init__(self, config: uvicorn.Config, web: Web, on_start: Callable[[], None]) -> None:
        super().__init__(config)
        self._web, self._on_start = web, on_start

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._web.closing.set()
        super().handle_exit(sig, frame)


class DeadlineProtocol(H11Protocol):
    """uvicorn's HTTP protocol; connections without a request after `HEADER_SECONDS` are closed."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lift_deadline()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        """Whether a complete request has arrived and is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _set_deadline(self) -> None:
        if self._is_answering:
            self._lift_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._close)

    def _lift_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self._deadline = None
        if not self._is_answering and not self.transport.is_closing():
            self.transport.close()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int | None) -> socket.socket:
    """A socket on that port; without one, on the default, or any free one if that is taken. Raises `InputError`."""
    try:
        return _bind(host, DEFAULT_PORT if port is None else port)
    except OSError as error:
        if port is None and error.errno == errno.EADDRINUSE:
            return _bind(host, 0)
        is_host = port is None or isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        where = f"--host {host}" if is_host else f"--port {port}"
        allowed = "another --port, or none to have a free one chosen" if error.errno == errno.EADDRINUSE else None
        raise InputError(Problem(where, "cannot be listened at", error.strerror or str(error), allowed)) from None


def _bind(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    found = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError:
        found.close()
        raise
    return found


def serve(host: str, port: int | None, runs_folder: Path, on_start: Callable[[Address], None]) -> None:
    """Serve until interrupted. `on_start` is called with the address."""
    listening = listen(host, port)
    alone = is_loopback(host)
    address = Address(host, listening.getsockname()[1], None if alone else secrets.token_urlsafe(24))
    asyncio.run(_run(listening, address, runs_folder, on_start))


async def _run(
    listening: socket.socket, address: Address, runs_folder: Path, on_start: Callable[[Address], None]
) -> None:
    web = Web(runs_folder, workers=max(2, min(4, os.cpu_count() or 2)))
    hosts = LOOPBACK_NAMES | {address.host.lower()} if address.token is None else None
    config = uvicorn.Config(
        web.application(hosts, address.token),
        http=DeadlineProtocol,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=3,
        timeout_keep_alive=30,
        ws="none",
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
    )
    with listening:
        await _Server(config, web, lambda: on_start(address)).serve([listening])
