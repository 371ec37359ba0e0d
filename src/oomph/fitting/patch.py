"""The two lines that keep nanoGPT's training step from returning its logits, and why they are safe."""

from __future__ import annotations

# nanoGPT's model.py: the line of `forward` after which the lines go, and the lines.
AFTER = "loss = F.cross_entropy("
LINES = (
    "            if self.training:",
    "                logits = None  # the training loop reads the loss alone",
)
PATCH = f"""\
model.py, in GPT.forward, right after the line that begins "{AFTER}":

{chr(10).join(LINES)}
"""
WHY_SAFE = (
    "train.py's loop takes `logits, loss = model(X, Y)` and never looks at the logits; evaluation and sampling run in "
    "eval mode and get them as before. Loss and gradients are the same numbers. What goes is the memory: compiled, "
    "returned logits may not be overwritten by their own gradient, and the backward is handed a tensor of zeros of "
    "their size besides."
)
