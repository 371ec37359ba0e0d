"""The API's OpenAPI 3.1 description, generated from the types of questions and answers."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, get_type_hints

import msgspec
from msgspec import Meta

from oomph import __version__
from oomph.config import describe_keys
from oomph.devices import Device
from oomph.errors import Problem
from oomph.fitting.result import Fit
from oomph.planning.plan import Plan
from oomph.predict.memory import Footprint
from oomph.report.plan import Summary
from oomph.runs.findings import Finding
from oomph.web.answers import BinaryFile, MarkdownReport, Preset, TextFile, ThisMachine
from oomph.web.questions import (
    CompareQuestion,
    ConfigQuestion,
    ExplainQuestion,
    FitQuestion,
    MomentQuestion,
    PlanQuestion,
)
from oomph.web.runs import RunDetails, RunList
from oomph.web.timeline import Moment, StepTimeline

Schema = dict[str, Any]
REF = "#/components/schemas/{name}"
ERRORS = {
    400: "the question is wrong: every problem with it",
    401: "the token is missing, which a server on an address of the network demands",
    403: "asked under a name or from a page that is not this server's",
    404: "there is no such run",
    408: "the question did not arrive in time",
    413: "the question is too large",
    415: "the question is not JSON",
    429: "too many streams are open",
    500: "oomph failed, which is its own fault",
    503: "too many questions are waiting",
}


def _json_of(struct: type[msgspec.Struct], *left_out: str, **changed: Any) -> type[msgspec.Struct]:
    """The type of a struct's documented JSON, with some fields dropped, changed or added."""
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)} | changed
    return msgspec.defstruct(struct.__name__, [(name, of) for name, of in fields.items() if name not in left_out])


PLAN = _json_of(Plan, "loaded", "steps", config=dict, device=dict, memory=_json_of(Footprint, "peak"))
FIT = _json_of(Fit, "loaded", "hours_limit", "seeks_a_model", "proposed", now=PLAN, options=list[dict[str, Any]])
ONLY_OF_TWO = "where nanoGPT or oomph train is asked for; absent under any other program"
PLANS = msgspec.defstruct(
    "Plans",
    [
        ("plan", PLAN),
        ("other", Annotated[PLAN | None, Meta(description=f"the other trainer's, {ONLY_OF_TWO}")]),
        ("timeline", StepTimeline),
        ("other_timeline", Annotated[StepTimeline | None, Meta(description=f"the other trainer's, {ONLY_OF_TWO}")]),
        ("summary", Summary),
        ("keys", Annotated[list[str], Meta(description="the config keys that matter under the plan's program")]),
        ("read_as", Annotated[str | None, Meta(description="the format of a pasted config, in words")]),
    ],
)
EXPLANATION = msgspec.defstruct(
    "Explanation",
    [
        ("run", dict),
        ("plan", PLAN | None),
        ("findings", list[Finding]),
        ("fixes", list[dict[str, Any]]),
        ("report", str),
    ],
)
_PROBLEM = msgspec.defstruct(
    "Problem",
    [(name, of, *((None,) if name in Problem._field_defaults else ())) for name, of in get_type_hints(Problem).items()],
)
PROBLEMS = msgspec.defstruct("Problems", [("problems", list[_PROBLEM])])  # type: ignore[valid-type]


class Operation(NamedTuple):
    """What one address does: a POST if it takes a question."""

    summary: str
    answer: Any
    question: type[msgspec.Struct] | None = None


OPERATIONS = {
    "/api/presets": Operation("The presets.", list[Preset]),
    "/api/gpus": Operation("The cards oomph knows, as `oomph gpus --json`.", list[Device]),
    "/api/keys": Operation("Every config key, enough for a form field.", list[dict[str, Any]]),
    "/api/machine": Operation("This machine.", ThisMachine),
    "/api/plan": Operation("What a run needs, and the memory over a step.", PLANS, PlanQuestion),
    "/api/report": Operation("The plan's report as Markdown.", MarkdownReport, PlanQuestion),
    "/api/picture": Operation("The plan's memory as an SVG, as `oomph plan --svg`.", TextFile, PlanQuestion),
    "/api/moment": Operation("What is alive at one operation of the step.", Moment, MomentQuestion),
    "/api/snapshot": Operation("The step as a PyTorch memory snapshot.", BinaryFile, PlanQuestion),
    "/api/fit": Operation("The settings that fit, ranked, as `oomph fit --json`.", FIT, FitQuestion),
    "/api/config": Operation("The config with changes, as a file.", TextFile, ConfigQuestion),
    "/api/explain": Operation("What happened in a run, as `oomph explain --json`.", EXPLANATION, ExplainQuestion),
    "/api/compare": Operation("Runs compared, as `oomph compare --json`.", dict[str, Any], CompareQuestion),
    "/api/runs": Operation("The runs in the runs folder.", RunList),
    "/api/runs/{name}": Operation("One run.", RunDetails),
}


def document() -> Schema:
    """The OpenAPI document."""
    questions = [operation.question for operation in OPERATIONS.values() if operation.question]
    answers = [PROBLEMS, *(operation.answer for operation in OPERATIONS.values())]
    _, taken = msgspec.json.schema_components(questions, ref_template=REF)
    (problems, *schemas), given = msgspec.json.schema_components(answers, ref_template=REF)
    for schema in given.values():
        _drop_unknown(schema)
    for schema in taken.values():
        for field in {"set", "changes"} & schema["properties"].keys():
            schema["properties"][field] = _ref("Settings")
    paths = {
        path: _operation(path, operation, schema, problems)
        for (path, operation), schema in zip(OPERATIONS.items(), schemas, strict=True)
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "oomph serve",
            "version": __version__,
            "description": "The API behind the page. Answers are those of the verbs' --json; MiB is 2**20 bytes.",
        },
        "paths": paths | {"/api/events": _events(problems)},
        "components": {"schemas": given | taken | {"Settings": _settings()}},
    }


def _operation(path: str, operation: Operation, answer: Schema, problems: Schema) -> Schema:
    codes = [401, 403, 500, 503]
    found: Schema = {"summary": operation.summary}
    if "{name}" in path:
        codes.append(404)
        found["parameters"] = [_name()]
    if operation.question is not None:
        codes += [400, 404, 408, 413, 415]
        schema = _ref(operation.question.__name__)
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    found["responses"] = {"200": _json("the answer", answer), **_refusals(codes, problems)}
    return {"get" if operation.question is None else "post": found}


def _events(problems: Schema) -> Schema:
    many = {"type": "array", "items": {"type": "string"}}
    parameters = [
        {"name": "run", "in": "query", "required": True, "description": "names from /api/runs", "schema": many},
        {
            "name": "from",
            "in": "query",
            "description": "the `position` of each run, in the same order; absent: the beginning",
            "schema": many,
        },
    ]
    events = {
        "description": "events: metrics (of new lines only), state, reset (the file was begun again: fetch the run); "
        "the data has `run`, which of those asked for, and `data`. An event's id is every run's position, and "
        "Last-Event-ID goes before `from`",
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    }
    return {
        "get": {
            "summary": "The figures of runs as they come, in one stream.",
            "parameters": parameters,
            "responses": {"200": events, **_refusals([400, 401, 403, 404, 429], problems)},
        }
    }


def _settings() -> Schema:
    """The schema of config keys: a value of the key's type, or text as on the command line."""
    types = {int: "integer", float: "number", str: "string"}
    fields = {}
    for key in describe_keys():
        limits: Schema = {"minimum": key.ge, "exclusiveMinimum": key.gt, "maximum": key.le, "exclusiveMaximum": key.lt}
        limits["enum"] = list(key.choices) or None
        plain: Schema = {"enum": [True, False, 0, 1]} if key.kind is bool else {"type": types[key.kind]}
        plain |= {name: limit for name, limit in limits.items() if limit is not None}
        null = [{"type": "null"}] if key.optional else []
        fields[key.name] = {"description": key.description, "anyOf": [plain, {"type": "string"}, *null]}
    return {
        "type": "object",
        "description": "config keys and their values, over the config's own",
        "properties": fields,
        "additionalProperties": False,
    }


def _drop_unknown(schema: Schema) -> None:
    """Make fields that may be null optional: answers leave out what is unknown."""
    fields = schema.get("properties", {})
    required = schema.get("required", ())
    schema["required"] = [name for name in required if {"type": "null"} not in fields[name].get("anyOf", ())]


def _refusals(codes: list[int], problems: Schema) -> dict[str, Schema]:
    return {str(code): _json(ERRORS[code], problems) for code in codes}


def _json(description: str, schema: Schema) -> Schema:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _name() -> Schema:
    return {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _ref(name: str) -> Schema:
    return {"$ref": REF.format(name=name)}
