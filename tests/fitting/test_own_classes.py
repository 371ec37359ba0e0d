"""Programs with model classes of their own are fitted like any other."""

from __future__ import annotations

import pytest

from oomph.fitting.fit import fit
from oomph.report.fit import document
from oomph.report.markdown import to_markdown


@pytest.mark.parametrize("trainer", [pytest.param("torchtune", marks=pytest.mark.slow), "litgpt"])
def test_a_quantized_base_is_proposed_where_lora_does_not_fit(trainer: str) -> None:
    found = fit("Llama-3.2-3B", gpu="GTX 1060 6GB", trainer=trainer, method="lora", block_size=256)
    assert found.options[0].fits and found.options[0].plan.config.method == "qlora"
    assert "QLoRA" in to_markdown(document(found))
