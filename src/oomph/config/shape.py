"""The keys that say what a model is, and the sizes that follow from others if they are unset."""

from __future__ import annotations

from oomph.config.schema import TrainConfig

SHAPE = (  # keys that a model's weights fix
    "n_layer", "n_head", "n_embd", "block_size", "bias", "vocab_size", "tie_weights", "num_key_value_heads", "head_dim",
    "intermediate_size", "hidden_act", "position_embedding_type", "rope_theta", "norm_type", "rms_norm_eps",
    "use_qk_norm", "is_gated_act",
)  # fmt: skip
# Keys that say what the model is. A traced model decides them itself.
OF_THE_MODEL = (
    "init_from", "model_type", "n_layer", "n_head", "n_embd", "vocab_size", "dropout", "bias", "tie_weights",
    "num_key_value_heads", "head_dim", "intermediate_size", "hidden_act", "max_position_embeddings",
    "word_embed_proj_dim", "do_layer_norm_before", "use_parallel_residual", "attention_dropout", "num_experts",
    "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "sliding_window", "sliding_window_pattern",
    "window_pattern", "attn_logit_softcapping", "final_logit_softcapping", "partial_rotary_factor", "recipe",
    "position_embedding_type", "rope_theta", "norm_type", "rms_norm_eps", "use_qk_norm", "is_gated_act", "zero_init",
)  # fmt: skip
_GATED_MULTIPLE = 16  # the inner width of a gated MLP is rounded to it


def head_size(config: TrainConfig) -> int:
    """Elements in a head's query, key or value."""
    return config.head_dim or config.n_embd // config.n_head


def key_value_heads(config: TrainConfig) -> int:
    """Number of key heads, which is that of value heads."""
    return config.num_key_value_heads or config.n_head


def inner_size(config: TrainConfig) -> int:
    """Width inside the MLP: with a gate, two thirds of the usual, so that three matrices have the weights of two."""
    if config.intermediate_size is not None:
        return config.intermediate_size
    if not config.is_gated_act:
        return 4 * config.n_embd
    return max(1, round(8 * config.n_embd / (3 * _GATED_MULTIPLE))) * _GATED_MULTIPLE


def qkv_widths(config: TrainConfig) -> list[int]:
    """Columns of queries, of keys and of values in one product."""
    size, shared = head_size(config), key_value_heads(config)
    return [config.n_head * size, shared * size, shared * size]
