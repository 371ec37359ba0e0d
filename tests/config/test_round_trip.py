"""A config written as text and read back is the same config."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from oomph.config import Key, TrainConfig, describe_keys, from_dict, load, to_python, to_toml
from oomph.config.programs import MIXTURES, OWN_CLASSES, READ_BY, TRANSFORMERS

texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)


def values_of(key: Key) -> st.SearchStrategy[Any]:
    if key.name == "device":
        return st.sampled_from(["cuda", "cuda:1", "cpu", "mps"])
    if key.name == "torch_version":
        return st.sampled_from(["2.4", "2.13.0"])
    if key.name == "transformers_version":
        return st.sampled_from(["4.50", "5.22.2"])
    if key.name == "trl_version":
        return st.sampled_from(["0.24", "1.16.0"])
    if key.name == "bitsandbytes_version":
        return st.sampled_from(["0.42", "0.45.2"])
    if key.name == "window_pattern":
        return st.sampled_from(["L", "SSSL"])
    if key.name == "reshard_after_forward":
        return st.sampled_from(["true", "false", "4"])
    if key.choices:
        return st.sampled_from(key.choices)
    if key.kind is bool:
        return st.booleans()
    if key.kind is str:
        return texts
    if key.kind is float:
        most = key.le or key.lt or 1e6
        return st.floats(key.gt or key.ge or 0, most, exclude_min=key.gt is not None, exclude_max=True)
    return st.integers(int(key.ge or 0), int(key.le or 0))


def fitting_together(drawn: dict[str, Any]) -> dict[str, Any]:
    """What a program and its model leave no choice of."""
    model, trainer = drawn.get("model_type", "gpt2"), drawn.get("trainer", "nanogpt")
    ours = {
        "use_cache": None,
        "padding": False,
        "packing": "off",
        "zero_grad": "after_step",
        "method": "full",
        "quantization": None,
        "fused_loss": "off",
        "liger_kernel": False,
        "fast_kernels": False,
    }  # what loops around transformers' models alone have
    parts = {"position_embedding_type": "absolute", "norm_type": "layernorm", "use_qk_norm": False}
    parts |= {"is_gated_act": False}  # what oomph train's GPT alone has
    if trainer not in ("nanogpt", "oomph"):
        ours |= parts
    if "nanochat" in (model, trainer):
        return {"model_type": "nanochat", "trainer": "nanochat", "loss_chunk": None, **ours}
    if trainer in OWN_CLASSES:
        eager = {"compile": False, "autocast": False, "dtype": "bfloat16", "attention": "flash"}
        return {"model_type": OWN_CLASSES[trainer][0], "loss_chunk": None, **eager, **ours}
    attention = {"attention": "flash"} if drawn.get("attention") in ("eager", "flash2", "flash3") else {}
    if model != "gpt2" or trainer in TRANSFORMERS:
        program = trainer if trainer in TRANSFORMERS and trainer != "unsloth" else "hf"
        eager = {"compile": False} if program == "torch" else {"zero_grad": "after_step"}
        full = drawn.get("method") in (None, "full", "dora") or model in MIXTURES
        base = {"method": "full", "quantization": None} if full else {"quantization": "nf4", "compile": False}
        base |= {"compile": False} if model in MIXTURES else {}
        unread = {key: None for key, families in READ_BY.items() if model not in families}
        shape = {"max_position_embeddings": None, "block_size": 512, "loss_chunk": None}
        shape |= {"fused_loss": "off", "liger_kernel": False, "fast_kernels": False, "packing": "off"}
        return {"trainer": program, "eval_only": False, **parts, **shape, **attention, **eager, **base, **unread}
    shape = {"intermediate_size": None, "head_dim": None, "hidden_act": "gelu", "position_embedding_type": "absolute"}
    return {**shape, **attention, **ours}


@st.composite
def configs(draw: st.DrawFn) -> TrainConfig:
    known = [key for key in describe_keys() if key.name not in ("recipe", "lengths")]  # which stand for others
    drawn = {key.name: draw(values_of(key)) for key in draw(st.sets(st.sampled_from(known), max_size=12))}
    heads = draw(st.integers(1, 64))
    drawn |= {"n_head": heads, "n_embd": heads * draw(st.integers(1, 128)), "n_layer": draw(st.integers(1, 100))}
    drawn |= fitting_together(drawn)
    if str(drawn.get("optimizer")).startswith("paged") and drawn.get("trainer") not in TRANSFORMERS:
        del drawn["optimizer"]
    experts = draw(st.integers(1, 64)) if drawn.get("model_type") in MIXTURES else None
    drawn |= {"num_experts": experts, "num_experts_per_tok": experts and draw(st.integers(1, experts))}
    numbered = (*TRANSFORMERS, "nanochat")  # those have a number where none is said
    own = [None] if drawn.get("trainer") not in numbered else []
    alone = (
        drawn.get("model_type", "gpt2") in ("gpt2", "gpt_neox", "opt", "qwen") and drawn.get("trainer") in TRANSFORMERS
    )
    drawn["num_key_value_heads"] = draw(st.sampled_from([heads] if alone else [*own, 1, heads]))
    layers = drawn["n_layer"]
    all_or_none = drawn.get("trainer") in TRANSFORMERS
    drawn["checkpoint_layers"] = draw(st.sampled_from([0, layers]) if all_or_none else st.integers(0, layers))
    if drawn.get("trainer") in OWN_CLASSES:
        drawn["checkpoint_layers"] = 0
    drawn["world_size"] = 1 if drawn.get("trainer") in OWN_CLASSES else draw(st.integers(1, 8))
    drawn["gradient_accumulation_steps"] = drawn["world_size"] * draw(st.integers(1, 64))
    drawn |= {
        "nodes": 1,
        "shard_size": None,
        "tensor_parallel_degree": 1,
        "deepspeed": "off",
        "cpu_offload": "off",
        "modules_to_save": None,
    }
    if drawn.get("model_type") == "qwen":
        drawn |= {"compile": False, "tie_weights": False}
    drawn["init_from"] = "scratch"
    drawn["dataset"] = "a dataset that is nowhere"
    if drawn.get("loss_chunk"):
        drawn["return_logits"] = False
    return from_dict(drawn).config


def reread(name: str, text: str) -> TrainConfig:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_text(text, encoding="utf-8")
        return load([file]).config


@given(configs())
def test_toml_is_read_back_as_it_was(config: TrainConfig) -> None:
    assert reread("run.toml", to_toml(config)) == config


@given(configs())
def test_python_is_read_back_as_it_was(config: TrainConfig) -> None:
    assert reread("run.py", to_python(config)) == config


@given(configs())
def test_python_means_to_python_what_it_means_to_us(config: TrainConfig) -> None:
    names: dict[str, Any] = {}
    exec(to_python(config), names)
    assert all(names.get(key.name) == getattr(config, key.name) for key in describe_keys())
