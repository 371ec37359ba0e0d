"""docs/serve.md tells of every address, and its examples work."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx

from oomph.web.openapi import document

PAGE = Path("docs/serve.md").read_text()


def test_every_address_is_in_the_documentation() -> None:
    described = {(method.upper(), path) for path, methods in document()["paths"].items() for method in methods}
    assert set(re.findall(r"^\| `(GET|POST) (\S+)`", PAGE, re.MULTILINE)) == described


def test_every_field_of_a_question_is_in_the_documentation() -> None:
    schemas = document()["components"]["schemas"]
    for name in ("PlanQuestion", "FitQuestion", "ConfigQuestion", "ExplainQuestion", "CompareQuestion"):
        for field in schemas[name]["properties"]:
            assert f"`{field}`" in PAGE or f"`{field}`:" in PAGE, field


def test_the_examples_are_answered(client: httpx.Client) -> None:
    (question,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (body,) = re.findall(r"-d '(\{.*?\})'", PAGE)
    for example in (question, body):
        assert client.post("/api/plan", json=json.loads(example)).status_code == 200
