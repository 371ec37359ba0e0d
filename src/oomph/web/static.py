"""The page's static files, gzipped once, each with an ETag of its content."""

from __future__ import annotations

import gzip
import hashlib
from importlib import resources
from pathlib import Path

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response

from oomph.web.guard import policy_for
from oomph.web.replies import refuse, reply, takes_gzip

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
    ".md": "text/plain; charset=utf-8",
    ".webmanifest": "application/manifest+json",
}
COMPRESSED_ALREADY = (".png", ".woff2", ".ico")
INDEX = "index.html"


class Asset(msgspec.Struct, frozen=True):
    """One file, ready to send."""

    written: float
    plain: bytes
    packed: bytes | None
    tag: str
    headers: dict[str, str]


class Static:
    """The files in the package's static folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(str(resources.files("oomph.web"))) / "static"
        self._kept: dict[str, Asset] = {}

    def names(self) -> list[str]:
        """The path of every file, relative to the folder."""
        files = (path for path in self._folder.rglob("*") if path.is_file() and path.suffix in TYPES)
        return sorted(path.relative_to(self._folder).as_posix() for path in files)

    def serve(self, name: str, headers: Headers) -> Response:
        """The reply with the file of that name. The name is looked up in the list of files, never joined to a path."""
        asset = self._asset(name)
        if asset is None:
            return refuse(404, "path", "there is no such file", name)
        kept = {"etag": asset.tag, "cache-control": "no-cache", "vary": "accept-encoding", **asset.headers}
        media = TYPES[Path(name).suffix]
        if asset.tag in headers.get("if-none-match", ""):
            return reply(b"", 304, kept, media)
        if asset.packed is not None and takes_gzip(headers.get("accept-encoding", "")):
            return reply(asset.packed, 200, {**kept, "content-encoding": "gzip"}, media)
        return reply(asset.plain, 200, kept, media)

    def _asset(self, name: str) -> Asset | None:
        kept = self._kept.get(name)
        if kept is None and name not in self.names():
            return None
        path = self._folder / name
        try:
            written = path.stat().st_mtime
            if kept is None or kept.written != written:
                kept = self._kept[name] = _read(path, written)
        except OSError:
            self._kept.pop(name, None)
            return None
        return kept


def _read(path: Path, written: float) -> Asset:
    data = path.read_bytes()
    tag = f'"{hashlib.sha256(data).hexdigest()[:24]}"'
    packed = None if path.suffix in COMPRESSED_ALREADY else gzip.compress(data, 9, mtime=0)
    headers = {"content-security-policy": policy_for(data)} if path.suffix == ".html" else {}
    return Asset(written, data, packed, tag, headers)
