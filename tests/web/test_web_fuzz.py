"""The API against its own description: whatever is asked, it answers as it says it does, and never with a 5xx."""

from __future__ import annotations

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from web_helpers import Running

from oomph.config import Key, describe_keys
from oomph.web.openapi import document
from oomph.web.questions import preset_names

ADDRESSES = {
    *("/api/presets", "/api/gpus", "/api/keys", "/api/machine", "/api/plan", "/api/report", "/api/fit", "/api/config"),
    *("/api/explain", "/api/compare", "/api/runs", "/api/runs/{name}", "/api/events"),
    *("/api/picture", "/api/moment", "/api/snapshot"),
}
EVENTS = "/api/events"  # has no end: its own tests look at it
HEAVY = ("/api/fit",)  # seconds each
FEW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def test_the_description_lists_every_address(client: httpx.Client) -> None:
    assert set(client.get("/openapi.json").json()["paths"]) == ADDRESSES


OPERATIONS = [
    found.ok() for found in schemathesis.openapi.from_dict(document()).exclude(path=EVENTS).get_all_operations()
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("operation", "mode"),
    [(each, mode) for each in OPERATIONS for mode in GenerationMode if each.body or mode is GenerationMode.POSITIVE],
    ids=lambda part: getattr(part, "label", None) or part.value,
)
def test_it_answers_as_it_says_whatever_is_asked(
    server: Running, operation: schemathesis.APIOperation, mode: GenerationMode
) -> None:
    """What the description allows, and what it forbids. A config may still be wrong in ways no schema tells."""

    @given(operation.as_strategy(generation_mode=mode))
    @settings(FEW, max_examples=10 if operation.path in HEAVY else 40)
    def ask(case: schemathesis.Case) -> None:
        case.call_and_validate(base_url=server.url, timeout=180, excluded_checks=[positive_data_acceptance])

    ask()


def value_of(key: Key) -> st.SearchStrategy[object]:
    """Any value that the key allows."""
    if key.choices:
        return st.sampled_from(key.choices)
    if key.kind is bool:
        return st.booleans()
    if key.kind is str:
        return st.text(max_size=20)
    if key.kind is float:
        return st.floats(0, 0.99)
    return st.integers(int(key.ge or 0), min(int(key.le or 10**6), 10**12))


NAMES = [name for names in preset_names().values() for name in names]
SETTINGS = st.fixed_dictionaries({}, optional={key.name: value_of(key) for key in describe_keys()})


@pytest.mark.slow
@given(st.sampled_from(NAMES), st.sampled_from(("RTX 4070", "A100 SXM4 80GB", "T4", "RX 7900 XTX", "M2 Max")), SETTINGS)
@FEW
def test_any_setting_that_the_keys_allow_is_planned_or_refused(
    server: Running, preset: str, gpu: str, values: dict[str, object]
) -> None:
    question = {"preset": preset, "gpu": gpu, "set": values}
    for verb in ("plan", "config"):
        reply = server.client.post(f"/api/{verb}", json=question)
        assert reply.status_code in (200, 400), reply.text
        assert ("problems" in reply.json()) == (reply.status_code == 400)
