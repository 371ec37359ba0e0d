"""A trace overrides PyTorch's operators for the whole process: nothing of that may stay."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, warnings, torch
from torch import nn
from torch.nn import functional as F

class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.project, self.drop = nn.LayerNorm(32), nn.Linear(32, 96), nn.Dropout(0.0)

    def forward(self, x):
        q, k, v = self.project(self.norm(x)).view(2, 16, 4, 24).transpose(1, 2).split(8, -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.cross_entropy(self.drop(y).reshape(-1, 32), torch.zeros(32, dtype=torch.long))

if sys.argv[1] == "eager":
    from oomph.step.trace.eager.program import trace as traced
elif sys.argv[1] == "compiled":
    from oomph.step.trace.inductor.program import compiled as traced
if sys.argv[1] != "none":
    for dtype in ("bfloat16", "float32"):
        traced(Attentive, [torch.zeros(2, 16, 32)], dtype=dtype)
torch.manual_seed(0)
model, x = Attentive(), torch.randn(2, 16, 32)
network = torch.compile(model)
with warnings.catch_warnings():
    warnings.filterwarnings("error", message=".*autograd kernel was not registered.*")
    for half in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = network(x)
            loss.backward()
            print(loss.item(), model.project.weight.grad.double().abs().sum().item())
from torch._inductor.utils import get_gpu_type
from torch._inductor.runtime.hints import DeviceProperties
print(torch.cuda.is_available(), get_gpu_type.cache_info().currsize, DeviceProperties.create.cache_info().currsize)
"""


def printed(traced: str, kept: Path) -> str:
    """What the program prints, with a compile cache of its own: a warm one leaves out what is looked for."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(kept / traced)}
    command = [sys.executable, "-c", PROGRAM, traced]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_torch_compile_computes_the_same_after_a_trace(tmp_path: Path) -> None:
    assert printed("none", tmp_path) == printed("eager", tmp_path) == printed("compiled", tmp_path)
