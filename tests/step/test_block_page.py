"""docs/block.md, the worked example of what a block keeps, is what the description says today."""

from __future__ import annotations

import block  # docs/block.py
import pytest


def test_the_page_has_todays_tables() -> None:
    page = block.PAGE.read_text(encoding="utf-8")
    assert block.refreshed(page) == page


@pytest.mark.parametrize("compiled", [False, True])
def test_what_the_tables_keep_is_what_one_more_block_keeps(compiled: bool) -> None:
    deeper, usual = (
        block.forward_of(block.config(compile=compiled, n_layer=layers))[1] for layers in (4, block.SHAPE["n_layer"])
    )
    one_block = sum(buffer.bytes for buffer in usual if buffer.block == block.BLOCK)
    assert sum(b.bytes for b in deeper) - sum(b.bytes for b in usual) == one_block > 0
