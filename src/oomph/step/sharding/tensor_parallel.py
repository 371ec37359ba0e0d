"""The config of one of the ranks that split each layer of torchtitan's model among them.

parallelize_llama.py's apply_tp: heads, the MLP's inner width and the vocabulary are split; norms and what is between
attention and MLP have a part of each sequence. FSDP then shares that part of the model among the other ranks.
"""

from __future__ import annotations

import msgspec

from oomph.config.schema import TrainConfig
from oomph.step.models.common import head_dim

SPLIT = ("n_head", "num_key_value_heads", "intermediate_size", "vocab_size")  # along these


def part(config: TrainConfig) -> TrainConfig:
    """What one of them runs: a settled config of narrower layers, on the ranks that share the batch."""
    degree = config.tensor_parallel_degree
    if degree == 1 or config.world_size == 1:
        return config
    whole = {key: getattr(config, key) for key in SPLIT}
    whole["num_key_value_heads"] = config.num_key_value_heads or config.n_head
    narrow = {key: value // degree for key, value in whole.items()}
    ranks = config.world_size // degree
    alone = {"dtype": "float32", "parallel": "none"} if ranks == 1 else {}  # mixed precision is FSDP's
    return msgspec.structs.replace(config, head_dim=head_dim(config), world_size=ranks, **narrow, **alone)
