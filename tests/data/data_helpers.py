"""What the tests of this room share."""

from __future__ import annotations

import json
from pathlib import Path


def write_jsonl(path: Path, documents: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, key: text}) + "\n" for text in documents), encoding="utf-8")
    return path


def token_files(folder: Path) -> tuple[bytes, bytes]:
    return (folder / "train.bin").read_bytes(), (folder / "val.bin").read_bytes()
