"""TRL's own SFTTrainer, run for a check: its loop, its loss and its collator, on tokens of ours."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from oomph.checking.launch import StepDone
from oomph.checking.programs import StepTimer, attention, half, trainers_adafactor
from oomph.config import TrainConfig
from oomph.training.feed import Feed
from oomph.training.optimizer import torch_optimizer

_trl: Any = import_module("trl")  # its names and those of datasets have no types
_datasets: Any = import_module("datasets")


class SftSteps:
    """A run of SFTTrainer: each of its micro-steps and optimizer steps is timed."""

    def __init__(self, config: TrainConfig, model: nn.Module, feed: Feed) -> None:
        self.config, self.model, self.feed, self.timer = config, model, feed, StepTimer(feed.device)
        self.optimizer: Any = torch_optimizer(model, config)
        if config.optimizer == "adafactor":
            self.optimizer = trainers_adafactor(self.optimizer, config)

    def run(self, count: int, done: Callable[[StepDone], None]) -> None:
        """Train for `count` optimizer steps, each reported when it is done."""
        from transformers import TrainerCallback

        timer, losses = self.timer, list[Tensor]()

        class Marks(TrainerCallback):
            def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
                timer.start()

            def on_step_end(self, *args: Any, **_kwargs: Any) -> None:
                state = args[1]
                done(timer.stepped(state.global_step - 1, losses.pop().item()))

        with tempfile.TemporaryDirectory() as folder, attention(self.config):
            trainer = _trl.SFTTrainer(
                model=self.model,
                args=self._arguments(folder, count),
                train_dataset=self._samples(count),
                processing_class=_tokenizer(self.config.vocab_size),
                optimizers=(self.optimizer, None),
                callbacks=[Marks()],
            )
            training_step = trainer.training_step

            def timed(*args: Any, **kwargs: Any) -> Any:
                losses[:] = [training_step(*args, **kwargs)]
                timer.mark()
                return losses[0]

            trainer.training_step = timed
            trainer.train()

    def _arguments(self, folder: str, steps: int) -> Any:
        """SFTConfig's, all but what only logs or saves as in the plan."""
        config, kind = self.config, half(self.config)
        return _trl.SFTConfig(
            folder,
            per_device_train_batch_size=config.batch_size,
            gradient_accumulation_steps=config.gradient_accumulation_steps,
            gradient_checkpointing=config.checkpoint_layers > 0,
            max_length=config.block_size,
            max_steps=steps,
            max_grad_norm=config.grad_clip,
            learning_rate=config.learning_rate,
            bf16=kind is torch.bfloat16,
            fp16=kind is torch.float16,
            torch_compile=config.compile,
            use_cpu=self.feed.device.type == "cpu",
            dataloader_pin_memory=self.feed.device.type != "cpu",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=config.seed % 2**32,
        )

    def _samples(self, steps: int) -> Any:
        """As many rows of tokens as the steps read."""
        batches = steps * self.config.gradient_accumulation_steps
        rows = [row for index in range(batches) for row in self.feed.batch(index, self.config.batch_size)[0].tolist()]
        return _datasets.Dataset.from_dict({"input_ids": rows})


def _tokenizer(words: int) -> Any:
    """A tokenizer with a vocabulary of that size: SFTTrainer asks it for the padding token alone."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast
    known = Tokenizer(WordLevel({f"w{index}": index for index in range(words)}, unk_token="w0"))
    return fast(tokenizer_object=known, eos_token="w0", pad_token="w0")
