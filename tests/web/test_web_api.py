"""The API gives what the command line's --json gives, and says what is wrong in the same words."""

from __future__ import annotations

import base64
import json
import pickle
import re
from importlib.resources import files
from pathlib import Path

import httpx
import msgspec
import pytest

import oomph
from oomph import config as configs
from oomph.config import KEYS
from oomph.config.reading.hugging_face import known_models
from oomph.planning.plan import PROGRAMS, other_trainer
from oomph.report.plan import summarise
from oomph.web.answers import PARTS, answer, join_plans
from oomph.web.questions import PlanQuestion

CARD = "RTX 4070"
QUESTION = {"preset": "gpt2", "gpu": CARD, "set": {"batch_size": 8, "gradient_accumulation_steps": 64}}


def ask(client: httpx.Client, verb: str, **question: object) -> dict[str, object]:
    reply = client.post(f"/api/{verb}", json=question)
    assert reply.status_code == 200, reply.text
    return reply.json()


def problems(client: httpx.Client, verb: str, **question: object) -> list[dict[str, str]]:
    reply = client.post(f"/api/{verb}", json=question)
    assert reply.status_code == 400, reply.text
    return reply.json()["problems"]


def test_a_plan_is_that_of_the_python_api_for_both_trainers(client: httpx.Client) -> None:
    told = ask(client, "plan", **QUESTION)
    loaded = configs.load(["gpt2"], [("batch_size", "8", ""), ("gradient_accumulation_steps", "64", "")])
    asked = oomph.plan(loaded, CARD)
    other = oomph.plan(configs.with_trainer(loaded, "oomph"), CARD)
    for name, plan in (("plan", asked), ("other", other)):
        expected = json.loads(msgspec.json.encode(plan.to_dict()))
        del expected["config"]["sources"], told[name]["config"]["sources"]
        assert told[name] == expected


@pytest.mark.parametrize(
    "question",
    [
        QUESTION,
        {"gpu": "T4", "trainer": "oomph", "set": {"n_layer": 2, "compile": False}},
        {"gpu_mib": 8192, "set": {"n_layer": 2}},
    ],
)
def test_the_report_joined_from_both_parts_is_that_of_both_plans(question: dict[str, object]) -> None:
    body = json.dumps(question).encode()
    told = json.loads(join_plans(*(answer(part, body, ".") for part in PARTS)).plain())
    asked = msgspec.json.decode(body, type=PlanQuestion)
    loaded, device = asked.run()
    other = configs.with_trainer(loaded, other_trainer(loaded.config) or "")
    whole = summarise([oomph.plan(loaded, device), oomph.plan(other, device)], brief=True)
    expected = json.loads(msgspec.json.encode(whole))
    for pace in (*told["summary"]["paces"], *expected["paces"]):
        del pace["finish"]  # a time of the day
    assert told["summary"] == expected


def test_what_is_wrong_with_a_plan_is_told_by_both_parts_alike() -> None:
    body = b'{"gpu": "RTX 9999", "set": {"n_layer": 0}}'
    assert len({answer(part, body, ".").body for part in PARTS}) == 1


def test_the_timeline_is_fullest_at_the_peak_and_stays_small(client: httpx.Client) -> None:
    told = ask(client, "plan", **QUESTION)
    for plan, timeline in (("plan", "timeline"), ("other", "other_timeline")):
        found = told[timeline]
        allocated = round(told[plan]["memory"]["allocated_mib"] * 2**20)
        assert max(size for _, size in found["points"]) == found["peak"]["bytes"]
        assert found["peak"]["bytes"] == pytest.approx(
            allocated, rel=0.02
        )  # the allocator may keep the tail of a block
        assert [found["peak"]["index"], found["peak"]["bytes"]] in found["points"]
        assert len(found["points"]) == len(found["ops"]) <= 320 < found["length"]
        assert all(len(column) == len(found["points"]) for column in found["kinds"].values())
        stacked = [sum(sizes) for sizes in zip(*found["kinds"].values(), strict=True)]
        assert all(stack <= size for stack, (_, size) in zip(stacked, found["points"], strict=True))
        assert [phase["start"] for phase in found["phases"][1:]] == [phase["end"] for phase in found["phases"][:-1]]
        assert found["phases"][-1]["end"] == found["length"]


def test_the_peak_names_its_holders_layers_taken_together(client: httpx.Client) -> None:
    holders = ask(client, "plan", **QUESTION)["timeline"]["peak"]["holders"]
    assert holders[0]["name"].startswith("lm_head")
    assert any(".h.*." in holder["name"] and holder["count"] == 12 for holder in holders)


def test_the_summary_has_a_verdict_and_a_bar_for_each_trainer(client: httpx.Client) -> None:
    summary = ask(client, "plan", **QUESTION)["summary"]
    assert [verdict["program"] for verdict in summary["verdicts"]] == ["nanoGPT", "oomph train"]
    assert all(sum(size for _, size in bar["parts"]) == pytest.approx(bar["total_mib"]) for bar in summary["bars"])


def test_the_report_is_the_markdown_of_the_command_line(client: httpx.Client) -> None:
    text = ask(client, "report", **QUESTION)["markdown"]
    assert text.startswith("## GPT") and "only the loss" in text


def test_a_pasted_config_is_read_with_its_own_lines(client: httpx.Client) -> None:
    config = "batch_size = 4\nn_layer = 6\nn_head = 6\nn_embd = 96 * 4\n"
    told = ask(client, "plan", config=config, filename="C:\\mine\\run.py", gpu=CARD)["plan"]["config"]
    assert (told["batch_size"], told["n_embd"]) == (4, 384)
    assert told["sources"]["n_embd"] == "run.py:4"


def test_a_pasted_toml_is_for_our_trainer(client: httpx.Client) -> None:
    told = ask(client, "plan", config="n_layer = 4\ncompile = true\n", gpu=CARD)["plan"]["config"]
    assert (told["n_layer"], told["trainer"]) == (4, "oomph")


def test_a_pasted_config_is_never_run(client: httpx.Client, tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    config = f"open({str(trace)!r}, 'w').write('x')\n__import__('os').system('touch {trace}')\nbatch_size = 4\n"
    assert ask(client, "plan", config=config, gpu=CARD)["plan"]["config"]["batch_size"] == 4
    assert not trace.exists()


def test_a_config_from_a_stranger_does_not_look_around_on_the_disk(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(bytes(2000))
    body = msgspec.json.encode({"gpu": CARD, "set": {"dataset": str(tmp_path), "n_layer": 1}})
    told = answer(PARTS[0], body, ".")
    assert told.status == 200 and "dataset_tokens" not in json.loads(told.plain())["plan"]["data"]


def test_a_plain_dataset_below_the_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data" / "mine").mkdir(parents=True)
    (tmp_path / "data" / "mine" / "train.bin").write_bytes(bytes(2000))
    monkeypatch.chdir(tmp_path)
    body = msgspec.json.encode({"gpu": CARD, "set": {"dataset": "mine", "n_layer": 1}})
    assert json.loads(answer(PARTS[0], body, ".").plain())["plan"]["data"]["dataset_tokens"] == 1000


def test_every_problem_comes_at_once_each_with_its_place(client: httpx.Client) -> None:
    found = problems(client, "plan", config="n_layer = 0\n", filename="r.py", set={"dtype": "bf16"}, gpu="RTX 4071")
    assert [problem["where"] for problem in found[:2]] == ["r.py:1", "set.dtype"]
    assert found[1]["nearest"] == "bfloat16" and len(found) == 3 and "4070" in found[2]["nearest"]


@pytest.mark.parametrize(
    ("question", "where"),
    [
        ({"set": {"batch_sise": 1}}, "set.batch_sise"),
        ({"preset": "../../etc/passwd"}, "preset"),
        ({"preset": "examples/tiny_python.toml"}, "preset"),
        ({"preset": "nanochat-d0"}, "preset"),
        ({"gpu": " "}, "gpu"),
        ({"config": "n_layer = 1\0"}, "config"),
        ({"colour": 1}, "colour"),
        ({"step_ms": 0}, "step_ms"),
        ({"step_ms": 5e-324}, "step_ms"),
        ({"set": {"wandb_project": False}}, "set.wandb_project"),
        ({"set": {"dataset": None}}, "set.dataset"),
        ({"set": {"batch_size": True}}, "set.batch_size"),
        ({"reserve_mib": "much"}, "reserve_mib"),
        ({"currency": "EUR"}, "currency"),
    ],
)
def test_what_is_wrong_is_named(client: httpx.Client, question: dict[str, object], where: str) -> None:
    assert problems(client, "plan", **({"gpu": CARD} | question))[0]["where"] == where


@pytest.mark.parametrize(
    ("question", "words"),
    [
        ({"reserve_mib": None}, {"where": "reserve_mib", "found": "null", "allowed": "a number"}),
        ({"config": "x" * (2**18 + 1)}, {"where": "config", "what": "is too long"}),
        ({"set": {"n_layer": [1]}}, {"where": "set", "found": "a list"}),
        ({"step_ms": -1}, {"where": "step_ms", "what": "is out of range"}),
    ],
)
def test_a_question_of_another_form_is_told_in_plain_words(
    client: httpx.Client, question: dict[str, object], words: dict[str, str]
) -> None:
    (told,) = problems(client, "plan", **({"gpu": CARD} | question))
    assert words.items() <= told.items() and "`" not in str(told)


def test_an_editors_mark_before_a_pasted_config_is_passed_over(client: httpx.Client) -> None:
    told = ask(client, "plan", config="\ufeffn_layer = 3\n", filename="run.py", gpu=CARD)
    assert told["plan"]["config"]["n_layer"] == 3


def test_a_card_may_be_given_by_numbers(client: httpx.Client) -> None:
    told = ask(client, "plan", gpu="mine", gpu_mib=16000, gpu_tflops=50, gpu_gbs=500, gpu_watts=200)["plan"]
    assert told["device"]["memory_mib"] == 16000 and told["time"]["step_ms"] > 0


def test_a_fit_is_that_of_the_python_api(client: httpx.Client) -> None:
    small = {"n_layer": 2, "n_head": 2, "n_embd": 128, "batch_size": 4, "gradient_accumulation_steps": 2}
    told = ask(client, "fit", gpu=CARD, set=small)
    expected = oomph.fit(small, CARD)
    assert told["verdict"] == expected.verdict
    assert [option["changes"] for option in told["options"]] == [option.changes for option in expected.options]


def test_tokens_may_be_written_as_people_write_them(client: httpx.Client) -> None:
    small = {"n_layer": 1, "n_head": 2, "n_embd": 64, "block_size": 64, "batch_size": 2, "vocab_size": 256}
    small |= {"gradient_accumulation_steps": 1}
    assert ask(client, "fit", gpu=CARD, set=small, tokens="1.5M") == ask(
        client, "fit", gpu=CARD, set=small, tokens=1.5e6
    )
    (told,) = problems(client, "fit", gpu=CARD, set=small, tokens="many")
    assert (told["where"], told["found"]) == ("tokens", "'many'")


def test_an_option_taken_over_changes_only_its_lines_of_the_pasted_config(client: httpx.Client) -> None:
    config = "# mine\nbatch_size = 16  # too many\nn_layer = 2\n"
    told = ask(client, "config", config=config, filename="run.py", gpu=CARD, changes={"batch_size": 8})
    assert told == {"name": "run.py", "text": "# mine\nbatch_size = 8   # too many\nn_layer = 2\n"}


@pytest.mark.parametrize("kind", ["py", "toml"])
def test_a_preset_with_changes_is_written_as_a_file_that_reads_back(client: httpx.Client, kind: str) -> None:
    changes = {"batch_size": 3, "trainer": "oomph", "loss_chunk": 1024}
    told = ask(client, "config", preset="gpt2-medium", gpu=CARD, changes=changes, format=kind)
    assert told["name"] == f"gpt2-medium.{kind}"
    read = configs.load([configs.Pasted(told["name"], told["text"])]).config
    assert (read.n_layer, read.batch_size, read.trainer, read.loss_chunk) == (24, 3, "oomph", 1024)


def test_a_pasted_error_message_is_explained(client: httpx.Client) -> None:
    text = Path("examples/out_of_memory.log").read_text()
    told = ask(client, "explain", text=text, fixes=False)
    assert any(finding["severity"] == "error" for finding in told["findings"])
    assert told["report"].startswith("## ") and told["fixes"] == []


def test_what_is_given_beside_a_log_counts(client: httpx.Client) -> None:
    told = ask(client, "explain", text="iter 1: loss 5.0, time 100.00ms", config="n_layer = 3\n", set={"n_head": 3})
    settings = told["run"]["config"]
    assert (settings["n_layer"]["value"], settings["n_head"]["value"]) == (3, 3)
    assert settings["n_head"]["how"] == "given"


def test_a_models_config_beside_an_error_message_is_planned(client: httpx.Client) -> None:
    shape = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    text = Path("examples/out_of_memory.log").read_text().splitlines()[-1]
    batch = {"batch_size": 4, "block_size": 512}
    told = ask(client, "explain", text=text, config=json.dumps(shape), set=batch, gpu=CARD, fixes=False)
    assert (told["plan"]["config"]["trainer"], told["plan"]["config"]["model_type"]) == ("hf", "llama")


def test_runs_are_compared_by_name(client: httpx.Client) -> None:
    told = ask(client, "compare", runs=["a", "b"], gpu=CARD)
    assert told["runs"] == ["a", "b"] and told["metrics"]["steps"]["values"] == [30, 20]


def test_comparing_a_run_that_is_not_there_is_a_404(client: httpx.Client) -> None:
    reply = client.post("/api/compare", json={"runs": ["a", "bb"]})
    assert reply.status_code == 404 and reply.json()["problems"][0]["nearest"] == "b"


def test_the_tables_have_every_preset_card_and_key(client: httpx.Client) -> None:
    presets = {preset["name"]: preset for preset in client.get("/api/presets").json()}
    assert {"gpt2-xl": "GPT-2", "Qwen/Qwen3-0.6B": "Hugging Face", "nanochat-d20": "nanochat"}.items() <= {
        name: preset["group"] for name, preset in presets.items()
    }.items()
    assert {*configs.PRESETS, *known_models()} < presets.keys()
    assert presets["Qwen/Qwen3-0.6B"]["config"]["num_key_value_heads"] == 8
    assert any(card["name"] == "GeForce RTX 4070" for card in client.get("/api/gpus").json())
    keys = client.get("/api/keys").json()
    assert tuple(key["name"] for key in keys) == KEYS and all(key["help"] and key["allowed"] for key in keys)


def test_this_machine_is_told(client: httpx.Client) -> None:
    told = client.get("/api/machine").json()
    assert told["version"] == oomph.__version__ and told["gpu"]["kind"] in ("cuda", "cpu", "rocm", "mps")


@pytest.mark.slow
def test_an_absurd_run_is_answered_or_refused_but_never_hangs(client: httpx.Client) -> None:
    reply = client.post("/api/plan", json={"gpu": CARD, "set": {"n_layer": 1000, "batch_size": 1_000_000}})
    assert reply.status_code in (200, 400)


# --- models that neither nanoGPT nor oomph train trains ---------------------------------------------------------

QWEN = {"preset": "Qwen/Qwen3-0.6B", "gpu": CARD, "set": {"batch_size": 4, "block_size": 512}}
LLAMA = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 512, "vocab_size": 1000}
PASTED = {"config": json.dumps(LLAMA), "gpu": CARD}


@pytest.mark.parametrize(
    ("preset", "trainer"),
    [("Qwen/Qwen3-0.6B", "hf"), ("nanochat-d4", "nanochat"), ("opt-125m", "torch")],
)
def test_a_program_with_no_other_beside_it_is_planned_alone(client: httpx.Client, preset: str, trainer: str) -> None:
    told = ask(client, "plan", preset=preset, gpu=CARD, trainer=trainer)
    expected = oomph.plan(configs.load([preset], [("trainer", trainer, "")]), CARD).to_dict()
    del expected["config"]["sources"], told["plan"]["config"]["sources"]
    assert told["plan"] == json.loads(msgspec.json.encode(expected))
    assert {"other", "other_timeline", "read_as"}.isdisjoint(told)
    assert len(told["summary"]["verdicts"]) == len(told["summary"]["bars"]) == 1
    question = json.dumps({"preset": preset, "gpu": CARD, "trainer": trainer}).encode()
    assert answer(PARTS[1], question, ".").body == b"null"  # nothing more is computed


@pytest.mark.parametrize("filename", [None, "config.json", "run.py", "model.txt"])
def test_a_pasted_hugging_face_config_is_known_by_its_content(client: httpx.Client, filename: str | None) -> None:
    told = ask(client, "plan", **PASTED, filename=filename)
    config = told["plan"]["config"]
    assert (config["trainer"], config["model_type"], config["n_layer"]) == ("hf", "llama", 3)
    assert "Hugging Face" in told["read_as"] and "other" not in told


@pytest.mark.parametrize(
    ("config", "words"), [('{"n_layer": 3}', "JSON"), ("n_layer = 3\nbias = true", "TOML"), ("n_layer = 3", "nanoGPT")]
)
def test_what_a_pasted_config_was_read_as_is_told(client: httpx.Client, config: str, words: str) -> None:
    told = ask(client, "plan", config=config, gpu=CARD)
    assert words in told["read_as"] and told["plan"]["config"]["n_layer"] == 3 and "other" in told


@pytest.mark.parametrize("content", [{"model_type": "mamba"}, {"architectures": ["LlamaForCausalLM"]}, [LLAMA]])
def test_a_config_json_that_cannot_be_read_names_itself(client: httpx.Client, content: object) -> None:
    (told,) = problems(client, "plan", config=json.dumps(content), filename="config.json", gpu=CARD)
    assert told["where"] == "config.json" and told["allowed"]


def test_the_keys_of_a_plan_are_those_of_its_program_and_model(client: httpx.Client) -> None:
    qwen, gpt2 = (set(ask(client, "plan", **question)["keys"]) for question in (QWEN, QUESTION))
    assert {"num_key_value_heads", "head_dim", "batch_size", "max_iters", "use_cache"} <= qwen
    assert {"loss_chunk", "wandb_log", "eval_interval", "min_lr", "num_experts_per_tok"}.isdisjoint(qwen)
    assert {"loss_chunk", "wandb_log", "eval_interval", "min_lr"} <= gpt2
    assert {"sliding_window", "use_cache", "num_experts"}.isdisjoint(gpt2)


@pytest.mark.parametrize("question", [QWEN, PASTED])
def test_the_report_of_one_program_is_told(client: httpx.Client, question: dict[str, object]) -> None:
    text = ask(client, "report", **question)["markdown"]
    assert "transformers' Trainer" in text and "oomph train" not in text


def test_a_fit_of_a_hugging_face_model_is_that_of_the_python_api(client: httpx.Client) -> None:
    told = ask(client, "fit", **PASTED)
    expected = oomph.fit(configs.load([configs.Pasted("config.json", PASTED["config"])]), CARD)
    assert told["verdict"] == expected.verdict and {option["trainer"] for option in told["options"]} == {"hf"}


def test_every_option_laid_over_the_config_plans_to_what_it_promised(client: httpx.Client) -> None:
    stated = {**LLAMA, "num_key_value_heads": 8, "intermediate_size": 1024}  # both as they would follow
    question = {"config": json.dumps(stated), "gpu_mib": 700, "gpu": "small"}
    options = ask(client, "fit", **question)["options"]
    assert any("num_key_value_heads" in option["changes"] for option in options)
    for option in options:
        told = ask(client, "plan", **question, set=option["changes"])
        assert told["plan"]["memory"]["total_mib"] == option["total_mib"], option["name"]


@pytest.mark.parametrize(("question", "name"), [(QWEN, "Qwen3-0.6B.py"), (PASTED | {"filename": "run.py"}, "run.py")])
def test_a_hugging_face_model_with_changes_is_written_as_a_file_that_plans_to_the_same(
    client: httpx.Client, question: dict[str, object], name: str
) -> None:
    changes = {"compile": True, "batch_size": 2}
    told = ask(client, "config", **question, changes=changes)
    assert told["name"] == name
    loaded = msgspec.json.decode(json.dumps(question), type=PlanQuestion).loaded(changes)
    written = oomph.plan(configs.load([configs.Pasted(name, told["text"])]), CARD)
    assert written.memory.total_mib == oomph.plan(loaded, CARD).memory.total_mib


def test_the_name_of_a_model_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = tmp_path / "Qwen" / "Qwen3-0.6B", tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "1"
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    told = json.loads(answer(PARTS[0], json.dumps(QWEN).encode(), ".").plain())
    assert told["plan"]["config"]["model_type"] == "qwen3"


def test_what_is_alive_at_the_peaks_operation_is_what_the_peak_holds(client: httpx.Client) -> None:
    question = {"gpu": CARD, "set": {"n_layer": 2}}
    peak = ask(client, "plan", **question)["timeline"]["peak"]
    found = ask(client, "moment", **question, at=peak["index"])
    assert (found["holders"], found["bytes"]) == (peak["holders"], peak["bytes"])
    assert client.post("/api/moment", json={**question, "at": 10**8}).status_code == 400


def test_a_plan_may_be_had_as_a_picture_and_as_a_snapshot(client: httpx.Client) -> None:
    question = {"gpu": CARD, "set": {"n_layer": 1}}
    assert ask(client, "picture", **question)["text"].startswith("<svg")
    content = pickle.loads(base64.b64decode(ask(client, "snapshot", **question)["content"]))
    assert content["device_traces"] and content["segments"]
    refused = client.post("/api/snapshot", json={"set": {"device": "cpu", "n_layer": 1}})
    assert refused.status_code == 400


def test_the_page_names_every_program_that_the_planner_does() -> None:
    text = (files("oomph.web") / "static/js/parts.js").read_text()
    named = dict(
        re.findall(r'^  (\w+): "([^"]+)",$', text.partition("PROGRAMS = {")[2].partition("};")[0], re.MULTILINE)
    )
    assert named == PROGRAMS
