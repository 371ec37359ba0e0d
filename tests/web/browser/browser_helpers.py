"""Words that tests of the page share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Locator, Page

OpenPage = Callable[..., Page]
EXAMPLES = Path(__file__).parents[3] / "examples"
TOO_LARGE = "#plan?preset=gpt2&gpu=RTX+4070&batch_size=16&gradient_accumulation_steps=32"  # nanoGPT does not fit


def verdict(page: Page, program: str) -> Locator:
    """What the page says of a program: "nanogpt" or "oomph"."""
    return page.locator(f".verdict[data-program={program}]")


def slider(page: Page, key: str) -> Locator:
    """The slider of a config key."""
    return page.locator(f".knob[data-key={key}] input[type=range]")


def exact(page: Page, key: str) -> Locator:
    """The field beside it."""
    return page.locator(f".knob[data-key={key}] .exact")


def overflow(page: Page) -> int:
    """Pixels by which the page is wider than its window."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))
