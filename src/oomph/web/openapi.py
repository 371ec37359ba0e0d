"""The API's own description (OpenAPI 3.1), made from the types that decode questions and make up answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from oomph import __version__
from oomph.config import TrainConfig, describe_keys
from oomph.devices import Device
from oomph.planner import Compute, Data, Model, Time
from oomph.predict.cost import Energy
from oomph.predict.footprint import Footprint
from oomph.report.summary import Summary
from oomph.runs.findings import Finding
from oomph.web.metrics import COLUMNS
from oomph.web.questions import CompareQuestion, ConfigQuestion, ExplainQuestion, FitQuestion, PlanQuestion

Schema = dict[str, Any]
REF = "#/components/schemas/{name}"
QUESTIONS = (PlanQuestion, FitQuestion, ConfigQuestion, ExplainQuestion, CompareQuestion)
ANSWERS = (TrainConfig, Device, Model, Time, Compute, Data, Energy, Summary, Finding)

ERRORS = {
    400: "the question is wrong: every problem with it",
    401: "the token is missing, which a server on an address of the network demands",
    403: "asked under a name or from a page that is not this server's",
    404: "there is no such run",
    408: "the question did not arrive in time",
    413: "the question is too large",
    415: "the question is not JSON",
    500: "oomph failed, which is its own fault",
    429: "too many streams are open",
    503: "too many questions are waiting",
}


def document() -> Schema:
    """The whole description."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "oomph serve",
            "version": __version__,
            "description": "The API behind the page. Answers are those of the verbs' --json; MiB is 2**20 bytes.",
        },
        "paths": {
            "/api/presets": _get("The presets.", _list(_object(name=_text(), config=_any_object()))),
            "/api/gpus": _get("The cards oomph knows, as `oomph gpus --json`.", _list(_ref("Device"))),
            "/api/keys": _get("Every config key, enough for a form field.", _list(_any_object())),
            "/api/machine": _get("This machine.", _machine()),
            "/api/plan": _post(
                "What a run needs under both trainers, and the memory over a step.", "PlanQuestion", _plan_answer()
            ),
            "/api/report": _post("The plan's report as Markdown.", "PlanQuestion", _object(markdown=_text())),
            "/api/fit": _post("The settings that fit, ranked, as `oomph fit --json`.", "FitQuestion", _ref("Fit")),
            "/api/config": _post(
                "The config with changes, as a file.", "ConfigQuestion", _object(name=_text(), text=_text())
            ),
            "/api/explain": _post(
                "What happened in a run, as `oomph explain --json`.", "ExplainQuestion", _explain_answer()
            ),
            "/api/compare": _post(
                "Runs held against each other, as `oomph compare --json`.", "CompareQuestion", _any_object()
            ),
            "/api/runs": _get("The runs in the runs folder.", _object(folder=_text(), runs=_list(_any_object()))),
            "/api/runs/{name}": _get("One run.", _ref("Run"), errors=(404,), parameters=[_name()]),
            "/api/runs/{name}/events": _stream(),
        },
        "components": {"schemas": _components()},
    }


def _components() -> dict[str, Schema]:
    _, found = msgspec.json.schema_components((*QUESTIONS, *ANSWERS), ref_template=REF)
    for name in (answer.__name__ for answer in ANSWERS):
        _leave_out_what_is_not_known(found[name])
    found["Settings"] = _settings()
    for name in ("PlanQuestion", "FitQuestion", "ConfigQuestion", "ExplainQuestion"):
        for field in {"set", "changes"} & found[name]["properties"].keys():
            found[name]["properties"][field] = _ref("Settings")
    fields = {name: {"type": "number"} for name in Footprint.__struct_fields__ if name.endswith("_mib")}
    found["Memory"] = {
        "type": "object",
        "properties": fields | {"fits": {"type": "boolean"}, "retries": {"type": "integer"}, "peak_at": _text()},
        "required": ["total_mib", "allocated_mib", "reserved_mib", "low_mib", "high_mib", "peak_at", "breakdown"],
    }
    found["Memory"]["properties"]["breakdown"] = _list(_object(name=_text(), mib=_number()))
    found["Plan"] = _object(
        ("time", "energy"),
        config={"allOf": [_any_object()], "description": "every key as settled, and sources: where each came from"},
        device=_any_object(),
        model=_ref("Model"),
        memory=_ref("Memory"),
        time=_ref("Time"),
        compute=_ref("Compute"),
        data=_ref("Data"),
        energy=_ref("Energy"),
        notes=_list(_text()),
    )
    found["Fit"] = _object(
        ("best", "safest"),
        verdict=_text(),
        now=_ref("Plan"),
        options=_list(_any_object()),
        best=_whole(),
        safest=_whole(),
        evaluated=_whole(),
        why=_list(_text()),
    )
    found["Run"] = _run()
    found["Timeline"] = _timeline()
    found["Problems"] = _object(
        problems=_list(
            _object(
                ("found", "allowed", "nearest"),
                where=_text(),
                what=_text(),
                found=_text(),
                allowed=_text(),
                nearest=_text(),
            )
        )
    )
    return found


def _settings() -> Schema:
    """Config keys: a value of the key's kind, or text as the command line takes it."""
    kinds = {int: "integer", float: "number", str: "string"}
    fields = {}
    for key in describe_keys():
        limits = {"minimum": key.ge, "maximum": key.le, "exclusiveMaximum": key.lt, "enum": list(key.choices) or None}
        kind: Schema = {"enum": [True, False, 0, 1]} if key.kind is bool else {"type": kinds[key.kind]}
        plain = kind | {name: limit for name, limit in limits.items() if limit is not None}
        unsaid = [{"type": "null"}] if key.optional else []
        fields[key.name] = {"description": key.description, "anyOf": [plain, _text(), *unsaid]}
    return {
        "type": "object",
        "description": "config keys and their values, over the config's own",
        "properties": fields,
        "additionalProperties": False,
    }


def _leave_out_what_is_not_known(schema: Schema) -> None:
    """An answer leaves out a figure that is not known, and may gain others in a later version."""
    fields = schema.get("properties", {})
    schema["required"] = [
        name for name in schema.get("required", ()) if {"type": "null"} not in fields[name].get("anyOf", ())
    ]
    schema.pop("additionalProperties", None)


def _timeline() -> Schema:
    point = {"type": "array", "prefixItems": [_whole(), _whole()], "minItems": 2, "maxItems": 2}
    return _object(
        points=_list(point) | {"description": "[operation, bytes allocated while it runs]; of close ones the fullest"},
        ops=_list(_text()) | {"description": "the operation at each point"},
        kinds={"type": "object", "additionalProperties": _list(_whole()), "description": "bytes by kind of buffer"},
        peak=_object(
            index=_whole(),
            bytes=_whole(),
            op=_text(),
            at=_text(),
            holders=_list(_object(name=_text(), mib=_number(), count=_whole())),
        ),
        phases=_list(_object(name=_text(), start=_whole(), end=_whole())),
        length=_whole(),
    )


def _plan_answer() -> Schema:
    return _object(
        plan=_ref("Plan"),
        other=_ref("Plan"),
        timeline=_ref("Timeline"),
        other_timeline=_ref("Timeline"),
        summary=_ref("Summary"),
    )


def _explain_answer() -> Schema:
    return _object(
        ("plan",),
        run=_any_object(),
        plan=_ref("Plan"),
        findings=_list(_ref("Finding")),
        fixes=_list(_any_object()),
        report=_text() | {"description": "Markdown"},
    )


def _run() -> Schema:
    column = _list(_or_null(_number()))
    metrics = _object(
        columns=_object(**dict.fromkeys(COLUMNS, column)),
        evals=_list(_any_object()),
        events=_list(_any_object()),
        count=_whole(),
        steps=_or_null(_whole()),
    )
    return _object(
        name=_text(),
        config=_or_null(_any_object()),
        plan=_or_null(_any_object()),
        result=_or_null(_any_object()),
        state={"enum": ["planned", "running", "finished", "stopped"]},
        updated=_number(),
        steps=_or_null(_whole()),
        flops_per_token=_or_null(_number()),
        metrics=metrics,
        hours=_number(),
        offset=_whole(),
    )


def _machine() -> Schema:
    measuring = {"type": "boolean", "description": "whether its CPU is being measured: ask again in a few seconds"}
    return _object(version=_text(), gpu=_ref("Device"), folder=_text(), measuring=measuring)


def _get(summary: str, answer: Schema, errors: Sequence[int] = (), parameters: Sequence[Schema] = ()) -> Schema:
    operation = {"summary": summary, "responses": {"200": _json(answer), **_refusals((401, 403, 500, 503, *errors))}}
    return {"get": operation | ({"parameters": list(parameters)} if parameters else {})}


def _post(summary: str, question: str, answer: Schema) -> Schema:
    body = {"required": True, "content": {"application/json": {"schema": _ref(question)}}}
    errors = (400, 401, 403, 404, 408, 413, 415, 500, 503)
    return {"post": {"summary": summary, "requestBody": body, "responses": {"200": _json(answer), **_refusals(errors)}}}


def _stream() -> Schema:
    start = {
        "name": "from",
        "in": "query",
        "description": "bytes of metrics.jsonl read already: a run's `offset`. Last-Event-ID goes before it",
        "schema": {"type": "integer", "minimum": 0, "maximum": 10**15 - 1},
    }
    events = {
        "description": "events: metrics (of new lines alone), state, reset (the file began anew: fetch the run again)",
        "content": {"text/event-stream": {"schema": _text()}},
    }
    return {
        "get": {
            "summary": "A run's figures as they come.",
            "parameters": [_name(), start],
            "responses": {"200": events, **_refusals((400, 401, 403, 404, 429))},
        }
    }


def _refusals(codes: Sequence[int]) -> dict[str, Schema]:
    return {str(code): _json(_ref("Problems"), ERRORS[code]) for code in codes}


def _json(schema: Schema, description: str = "the answer") -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _name() -> Schema:
    return {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _ref(name: str) -> Schema:
    return {"$ref": REF.format(name=name)}


def _object(may_lack: Sequence[str] = (), /, **fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": [name for name in fields if name not in may_lack]}


def _any_object() -> Schema:
    return {"type": "object"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _text() -> Schema:
    return {"type": "string"}


def _number() -> Schema:
    return {"type": "number"}


def _whole() -> Schema:
    return {"type": "integer"}
