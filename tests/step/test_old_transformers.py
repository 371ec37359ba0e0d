"""Traces with other versions of transformers than the one installed: each version's own program, as it really runs.

A version is installed once, with pip, into a folder below the user's cache, and its models run in a process of their
own. Without an index to install from the tests fail.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FAMILIES = ("llama", "mistral", "qwen2", "gpt2")
# transformers, what it wants of the packages whose versions it checks, the families it has, and what a card runs
# attention with, eager and compiled: 4.57 makes a mask wherever no cache of keys and values is asked for.
VERSIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, str]]] = {
    "4.50.3": (("tokenizers<0.22", "huggingface_hub<1.0"), FAMILIES, ("flash", "flash")),
    "4.57.6": (("tokenizers<0.23", "huggingface_hub<1.0"), (*FAMILIES, "qwen3"), ("efficient", "efficient")),
    "5.5.4": (("tokenizers<0.23", "huggingface_hub<2.0"), (*FAMILIES, "qwen3"), ("flash", "efficient")),
}


def installed(version: str) -> Path:
    """The folder of that transformers, installed now where it is not there yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "oomph" / "tests"
    folder = cache / f"transformers-{version}-{sys.implementation.cache_tag}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    with tempfile.TemporaryDirectory(dir=cache) as unfinished:
        made = Path(unfinished) / "packages"
        wanted = [f"transformers=={version}", *VERSIONS[version][0]]
        done = subprocess.run([*pip, "--target", str(made), *wanted], capture_output=True, text=True)
        assert done.returncode == 0, f"pip could not install {wanted}: {done.stderr}"
        made.replace(folder)
    return folder


@pytest.fixture(scope="module", params=VERSIONS)
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What tests/step/old_transformers.py says of a version's models."""
    version = str(request.param)
    paths = os.pathsep.join(map(str, (installed(version), ROOT / "src", HERE)))
    command = [sys.executable, str(HERE / "old_transformers.py"), *VERSIONS[version][1]]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr[-2000:]
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert facts["version"] == version
    return facts


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_older_transformers_is_traced_as_it_really_runs(found: dict[str, Any]) -> None:
    for family, facts in found["families"].items():
        for precision in ("float32", "autocast"):
            traced, profiled = facts[precision]
            assert traced == pytest.approx(profiled, rel=1e-4), (family, precision)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_older_transformers_is_traced_as_compiled(found: dict[str, Any]) -> None:
    for family, facts in found["families"].items():
        assert facts["trace gradients"] == facts["compiled gradients"] == facts["parameters"], family


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_attention_of_a_version_is_its_own(found: dict[str, Any]) -> None:
    kernels = VERSIONS[found["version"]][2]
    for make, kernel in zip(("trace", "compiled"), kernels, strict=True):
        named = found["families"]["llama"][make]
        assert named == [f"scaled_dot_product_{kernel}_attention{side}" for side in ("", "_backward")]
