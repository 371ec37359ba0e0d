"""What a report is about: which model, how it is trained, and on what."""

from __future__ import annotations

from oomph.config import TrainConfig
from oomph.config.lengths import mean_length, padded_length
from oomph.planning.plan import Plan
from oomph.report import document as doc
from oomph.step.build import keys_read
from oomph.units import count, counted, memory_size

ARCHITECTURES = {  # as their makers write them
    "gpt2": "GPT", "llama": "Llama", "mistral": "Mistral", "mixtral": "Mixtral", "qwen2": "Qwen2", "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE", "olmo2": "OLMo2", "phi3": "Phi-3", "gemma2": "Gemma 2", "gemma3_text": "Gemma 3",
    "gpt_neox": "GPT-NeoX", "opt": "OPT", "qwen": "Qwen", "nanochat": "nanochat",
}  # fmt: skip
DEEPSPEEDS = {f"zero{stage}": f"DeepSpeed's ZeRO-{stage}" for stage in (1, 2, 3)}
OFFLOADS = {
    "off": "",
    "optimizer": ", the optimizer's state on the host",
    "all": ", parameters and the optimizer's state on the host",
}
SHARINGS = {"ddp": "DDP", "zero1": "ZeRO-1", "fsdp": "FSDP2", "hsdp": "HSDP", "fsdp1": "FSDP1"}
LINKS = {  # by the beginning of their names; the rest is a generation or Gbit/s
    "nvlink": "NVLink {}", "bridge": "an NVLink bridge", "pcie": "PCIe {}", "host": "PCIe {} through the host",
    "ib": "InfiniBand {}", "eth": "Ethernet {}",
}  # fmt: skip
FUSED_LOSSES = {"liger": "Liger's", "cce": "cut cross-entropy as", "trl": "TRL's fused", "unsloth": "Unsloth's fused"}
PACKINGS = {"padding_free": "without padding", "packed": "packed rows"}
ATTENTIONS = {"flash2": "FlashAttention 2", "eager": "eager attention"}
METHOD_NAMES = {"lora": "LoRA", "dora": "DoRA", "qlora": "QLoRA"}


def heading(plan: Plan) -> doc.Title:
    """Which model, how it is trained, and on what."""
    memory = plan.memory
    room = "" if memory.capacity_mib is None else f", {memory_size(memory.capacity_mib)} for a process"
    return doc.Title(_title(plan), (_setting(plan), f"{plan.cards}{room}"))


def _title(plan: Plan) -> str:
    config = plan.config
    if plan.traced:
        frozen = f", {count(plan.model.params_frozen)} of them frozen" if plan.model.params_frozen else ""
        called = f"called with {counted(config.block_size, 'token')} a sequence"
        return f"{plan.program}, {count(plan.model.params)} parameters{frozen}, {called}"
    name, size = ARCHITECTURES[config.model_type], count(plan.model.params_nanogpt)
    shape = f"{counted(config.n_layer, 'layer')} × {config.n_embd}, {counted(config.n_head, 'head')}"
    return f"{name}, {size} parameters: {shape}, block {config.block_size}, vocab {config.vocab_size:,}"


def _method(plan: Plan) -> str:
    """ "QLoRA of rank 16 on q_proj, v_proj over nf4: 7.67 M trained" """
    config, model = plan.config, plan.model
    targets = ", ".join(part.strip() for part in (config.lora_targets or "").split(","))
    base = f" over {config.quantization}" if config.quantization != "off" else ""
    trained = count(model.params - model.params_frozen)
    return f"{METHOD_NAMES[config.method]} of rank {config.lora_rank} on {targets}{base}: {trained} trained"


def _samples(config: TrainConfig) -> str:
    """ "412 tokens a sample in the mean, padded to 812" """
    mean, padded = mean_length(config), padded_length(config)
    return f"{mean:,} tokens a sample in the mean" + (f", padded to {padded:,}" if padded > mean else "")


def _setting(plan: Plan) -> str:
    config = plan.config
    devices = f" on {config.world_size} devices" if config.world_size > 1 else ""
    extras = [f"first {counted(config.checkpoint_layers, 'block')} checkpointed"] if config.checkpoint_layers else []
    drops = config.dropout and not plan.traced and "dropout" in keys_read(config)
    extras += [f"dropout {config.dropout:g}"] if drops else []
    extras += [PACKINGS[config.packing]] if config.packing in PACKINGS else []
    extras += [_samples(config)] if mean_length(config) < config.block_size else []
    extras += [ATTENTIONS[config.attention]] if config.attention in ATTENTIONS else []
    extras += ["Liger's kernels"] if config.liger_kernel else []
    extras += ["fms-acceleration's kernels"] if config.fast_kernels else []
    extras += [f"{FUSED_LOSSES[config.fused_loss]} loss"] if config.fused_loss in FUSED_LOSSES else []
    extras += [_method(plan)] if config.method != "full" else []
    how = "compiled" if config.compile else "eager"
    return ", ".join(
        [
            f"{counted(config.batch_size, 'sequence')} × "
            f"{counted(config.gradient_accumulation_steps, 'micro-step')}{devices} = "
            f"{counted(plan.data.tokens_per_step, 'token')} a step",
            f"{config.dtype}{'' if config.autocast or config.dtype == 'float32' else ' throughout'}",
            f"{config.optimizer} ({config.optimizer_loop})",
            f"{how} with torch {config.torch_version}",
            *([_sharing(config)] if config.world_size > 1 else []),
            *extras,
        ]
    )


def _sharing(config: TrainConfig) -> str:
    """How the devices share the work, and what connects them."""
    reshards = config.reshard_after_forward
    shared = SHARINGS.get(config.parallel or "", "") if config.deepspeed == "off" else DEEPSPEEDS[config.deepspeed]
    how = shared + (f" (reshard_after_forward {reshards})" if reshards else "")
    split = config.tensor_parallel_degree
    how += f", layers split among {split}" if split > 1 else ""
    how += OFFLOADS[config.cpu_offload]
    between = f" and {_link(config.network)} between {config.nodes} machines" if config.nodes > 1 else ""
    return how + (f" over {_link(config.link)}{between}" if config.link else "")


def _link(name: str | None) -> str:
    """ "nvlink4" as people write it: "NVLink 4"; other names stay as they are."""
    kind = next((kind for kind in LINKS if name is not None and name.startswith(kind)), None)
    return f"{name}" if name is None or kind is None else LINKS[kind].format(name.removeprefix(kind)).rstrip()
