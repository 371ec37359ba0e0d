"""TRL's SFTTrainer: its plan is what real steps of it allocate on a CPU, and its fused head is the trace of TRL's."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from described_models import config_of, described
from hf_models import Hf, changes, peak
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from transformers.modeling_outputs import CausalLMOutput

from oomph.config import from_dict
from oomph.planning.plan import plan
from oomph.step.build import build
from oomph.step.tensor.libraries import trl_head

pytestmark = pytest.mark.filterwarnings("ignore")
LORA = {"r": 4, "target_modules": "all-linear"}
LLAMA = {
    "trainer": "trl", "model_type": "llama", "n_layer": 2, "n_head": 8, "n_embd": 512, "vocab_size": 128256,
    "intermediate_size": 1376, "batch_size": 4, "block_size": 1024, "dtype": "bfloat16",
}  # fmt: skip


def allocations(model: Hf, folder: Path, bf16: bool) -> list[int]:
    """Bytes allocated (+) and freed (-) in the second step of a real SFTTrainer."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(WordLevel({f"w{index}": index for index in range(model.vocab)}, unk_token="w0"))
    arguments = SFTConfig(
        str(folder), per_device_train_batch_size=model.batch, max_steps=2, use_cpu=True, bf16=bf16, report_to=[],
        gradient_checkpointing=model.checkpoint, max_length=model.tokens, save_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=model.build(),  # type: ignore[arg-type]
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": [[1] * model.tokens] * (2 * model.batch)}),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w2", pad_token="w0"),
    )
    step = trainer.training_step

    def marked(*args: Any, **kwargs: Any) -> Tensor:
        with record_function("step"):
            pass
        return step(*args, **kwargs)

    trainer.training_step = marked  # type: ignore[method-assign]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        trainer.train()
    steps: list[list[int]] = [[]]
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):  # type: ignore[union-attr]
        if event.name() == "step":
            steps.append([])
        elif event.name() == "[memory]":
            steps[-1].append(event.nbytes())
    return steps[2]


@pytest.mark.slow
@pytest.mark.parametrize("lora", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("batch", [1, 3])
# Not autocast with checkpointing: there a product in bfloat16 is at the peak, and oneDNN's take memory of their own.
@pytest.mark.parametrize(("precision", "checkpoint"), [("float32", False), ("float32", True), ("autocast", False)])
def test_a_real_step_allocates_what_is_planned(
    precision: str, checkpoint: bool, batch: int, lora: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    from trl.kernels import chunked_logprob
    from trl.trainer import utils

    for module, name, value in (  # several tiles of a small model
        (chunked_logprob, "TOKEN_CHUNK_SIZE", 40),
        (utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", 128),
        (trl_head, "TILE_TOKENS", 40),
        (trl_head, "TILE_WORDS", 128),
    ):
        monkeypatch.setattr(module, name, value)
    model = Hf("llama", kv_heads=2, width=128, vocab=300, checkpoint=checkpoint, batch=batch, lora=lora)
    config = config_of(model, precision, trainer="trl")
    planned = build(config, cuda=False, threads=torch.get_num_threads())
    seen = allocations(model, tmp_path, bf16=precision == "autocast")
    assert peak(changes(planned)) == pytest.approx(peak([seen]), rel=3e-4)  # the rest: a few numbers beside the tensors


class Kernel:
    """A Triton kernel that works in place: it allocates nothing."""

    def __getitem__(self, grid: object) -> Any:
        return lambda *_args, **_kwargs: None


class FusedHead(Hf):
    """A model that ends in TRL's own function; rows are picked by numbers, as nonzero finds them."""

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        from trl.kernels.chunked_logprob import ChunkedLogProbFunction

        made: Any = super().build(dtype)

        def forward(input_ids: Tensor, labels: Tensor) -> CausalLMOutput:
            hidden = made.model(input_ids=input_ids, use_cache=False)[0][:, :-1]
            mask = labels[:, 1:] != -100
            places = torch.zeros(mask.numel(), 2, dtype=torch.long, device=labels.device)
            picked = hidden[places[:, 0], places[:, 1]]
            targets = torch.zeros(mask.numel(), dtype=torch.long, device=labels.device)
            del places
            outputs = ("log_probs", "entropy", "is_top1")
            weight, words = made.lm_head.weight, trl_head.TILE_WORDS
            found = ChunkedLogProbFunction.apply(picked, weight, None, targets, 1.0, words, None, 1.0, outputs)
            found = (x.new_zeros(mask.shape).masked_scatter(mask, x) for x in found if x is not None)
            log_probs, _entropy, _is_top1 = found
            del picked, targets, hidden
            return CausalLMOutput(loss=(-log_probs).sum() / 2)

        made.forward = forward
        return made  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_on_a_gpu_the_fused_head_is_the_trace(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chunked = pytest.importorskip("trl.kernels.chunked_logprob")
    for name, value in (("TOKEN_CHUNK_SIZE", 40), ("_forward_kernel", Kernel()), ("_backward_kernel", Kernel())):
        monkeypatch.setattr(chunked, name, value)
    monkeypatch.setattr(chunked, "triton", SimpleNamespace(cdiv=max), raising=False)
    monkeypatch.setattr(chunked, "_use_triton", lambda _device: True)
    monkeypatch.setattr(chunked, "_addmm_fp32", lambda acc, _a, _b: acc.add_(0))
    monkeypatch.setattr(trl_head, "TILE_TOKENS", 40)
    monkeypatch.setattr(trl_head, "TILE_WORDS", 128)
    model = FusedHead("llama", kv_heads=2, vocab=300, tie=False)
    ours = described(config_of(model, precision, trainer="trl"))
    assert peak(changes(ours)) == peak(changes(model.traced(precision=precision)))


def test_sfttrainer_checkpoints_and_has_no_logits_unless_told() -> None:
    found = plan(from_dict(LLAMA), "RTX 4090")
    assert (found.config.checkpoint_layers, found.config.fused_loss, found.config.use_cache) == (2, "trl", False)
    assert found.program == "TRL's SFTTrainer"


def test_before_the_fused_head_metrics_hold_all_logits() -> None:
    now, before, trainer = (
        plan(from_dict(LLAMA | more), "RTX 4090").memory.allocated_mib
        for more in ({}, {"trl_version": "1.0"}, {"trainer": "hf", "checkpoint_layers": 2})
    )
    logits = 4 * 1024 * 128256 * 4 / 2**20
    assert before - now > 2 * logits
    assert before > trainer


def test_adapters_on_a_quantized_model_are_bfloat16_and_nothing_is_upcast() -> None:
    config = plan(from_dict(LLAMA | {"method": "qlora"}), "RTX 4090").config
    assert (config.adapter_dtype, config.upcast, config.base_dtype) == ("bfloat16", "off", "float32")
    before = plan(from_dict(LLAMA | {"method": "qlora", "trl_version": "0.24"}), "RTX 4090").config
    assert (before.adapter_dtype, before.upcast) == ("bfloat16", "norms")
