"""Training programs, a file each: their loops, with what their variables hold."""

from __future__ import annotations

from collections.abc import Sequence

from oomph.config.schema import TrainConfig
from oomph.step.programs.hugging_face import PlainLoop, TrainerLoop
from oomph.step.programs.litgpt import LitgptLoop
from oomph.step.programs.nanochat import NanochatLoop
from oomph.step.programs.nanogpt import Loop
from oomph.step.programs.torchtitan import TitanLoop
from oomph.step.programs.torchtune import TorchtuneLoop
from oomph.step.programs.trl import SftLoop
from oomph.step.programs.unsloth import UnslothLoop

_LOOPS: dict[str, type[Loop]] = {
    "hf": TrainerLoop, "trl": SftLoop, "unsloth": UnslothLoop, "torch": PlainLoop, "nanochat": NanochatLoop,
    "torchtune": TorchtuneLoop, "litgpt": LitgptLoop, "torchtitan": TitanLoop,
}  # fmt: skip


def loop(config: TrainConfig, cuda: bool, threads: int, layers: Sequence[int]) -> Loop:
    """The training loop of a config's program, with only these blocks of its model."""
    return _LOOPS.get(config.trainer, Loop)(config, cuda, threads, layers)
