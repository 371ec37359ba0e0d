"""`TrainConfig`, and reading one from every source people have."""

from oomph.config.keys import KEYS, Key, describe_keys
from oomph.config.load import (
    LoadedConfig,
    Override,
    Pasted,
    as_loaded,
    from_dict,
    is_model,
    load,
    stated_values,
    with_trainer,
)
from oomph.config.programs import GPT2_SHAPES, NEWEST_TORCH, PRESETS
from oomph.config.reading.documents import to_python, to_toml
from oomph.config.schema import COMPILED_LOSS_CHUNK, DEFAULT_LOSS_CHUNK, TrainConfig
from oomph.config.settle import SettlingDevice, follows, settle, usual_loss_chunk
from oomph.config.validate import validate

__all__ = [
    "COMPILED_LOSS_CHUNK",
    "DEFAULT_LOSS_CHUNK",
    "GPT2_SHAPES",
    "KEYS",
    "NEWEST_TORCH",
    "PRESETS",
    "Key",
    "LoadedConfig",
    "Override",
    "Pasted",
    "SettlingDevice",
    "TrainConfig",
    "as_loaded",
    "describe_keys",
    "follows",
    "from_dict",
    "is_model",
    "load",
    "settle",
    "stated_values",
    "to_python",
    "to_toml",
    "usual_loss_chunk",
    "validate",
    "with_trainer",
]
