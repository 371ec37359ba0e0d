"""`TrainConfig`, and reading one from every source people have."""

from oomph.config.keys import KEYS, Key, describe_keys
from oomph.config.load import LoadedConfig, Override, Pasted, as_loaded, from_dict, load, with_trainer
from oomph.config.presets import GPT2_SHAPES, PRESETS
from oomph.config.schema import COMPILED_LOSS_CHUNK, DEFAULT_LOSS_CHUNK, NEWEST_TORCH, TrainConfig
from oomph.config.settle import SettlingDevice, settle, usual_loss_chunk
from oomph.config.validate import validate
from oomph.config.write import to_python, to_toml

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
    "from_dict",
    "load",
    "settle",
    "to_python",
    "to_toml",
    "usual_loss_chunk",
    "validate",
    "with_trainer",
]
