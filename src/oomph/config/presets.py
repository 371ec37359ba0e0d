"""The four GPT-2 sizes: as presets to train from scratch, and as `init_from`, which loads OpenAI's weights."""

from __future__ import annotations

from oomph.config.layer import Layer
from oomph.config.values import Said
from oomph.errors import Problem

# Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2, with the heads of the released
# models; nanoGPT's GPT.from_pretrained has the same.
GPT2_SHAPES: dict[str, dict[str, int]] = {
    "gpt2": {"n_layer": 12, "n_head": 12, "n_embd": 768},
    "gpt2-medium": {"n_layer": 24, "n_head": 16, "n_embd": 1024},
    "gpt2-large": {"n_layer": 36, "n_head": 20, "n_embd": 1280},
    "gpt2-xl": {"n_layer": 48, "n_head": 25, "n_embd": 1600},
}
GPT2_VOCABULARY = 50257
GPT2_BLOCK = 1024
PRESETS = tuple(GPT2_SHAPES)


def preset(name: str) -> Layer:
    """nanoGPT's training of that size from scratch: only the shape differs from the defaults."""
    return Layer(values={key: Said(value, f"preset {name}") for key, value in GPT2_SHAPES[name].items()})


def apply_init_from(values: dict[str, Said]) -> tuple[list[str], list[Problem]]:
    """Puts the shape that `init_from = 'gpt2…'` loads over whatever `values` say, as nanoGPT does, but not silently."""
    notes: list[str] = []
    chosen = values["init_from"].value
    if chosen == "resume":
        notes.append("init_from = 'resume': the model's shape is the checkpoint's; name its ckpt.pt to have it read")
    if not isinstance(chosen, str) or chosen not in GPT2_SHAPES:
        return notes, []
    source = f"init_from = {chosen!r}"
    for key, value in {**GPT2_SHAPES[chosen], "bias": True, "vocab_size": GPT2_VOCABULARY}.items():
        said = values[key]
        if said.firm and said.value != value and said.where != source:
            notes.append(f"{said.where}: {key} = {said.value} is overruled by {source}, which has {value}")
        values[key] = Said(value, source)
    block = values["block_size"]
    if isinstance(block.value, int) and block.value > GPT2_BLOCK:
        allowed = f"at most {GPT2_BLOCK}, which is what {chosen} was trained with"
        return notes, [Problem(block.where, f"block_size is too long for {source}", str(block.value), allowed)]
    return notes, []
