"""The card picker and the picture of a fit, in a real browser."""

from __future__ import annotations

import re

import pytest
from browser_helpers import OpenPage, exact, verdict
from playwright.sync_api import expect

import oomph

pytestmark = pytest.mark.slow


def test_a_card_is_found_by_name_and_memory_and_chosen_by_keyboard(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&gpu=RTX+4070")
    picker = page.get_by_role("combobox", name="Card")
    picker.click()
    options = page.get_by_role("listbox", name="Cards").get_by_role("option")
    expect(options.first).to_be_visible()
    picker.fill("3090 24")
    expect(options).to_contain_text(["GeForce RTX 3090", "GeForce RTX 3090 Ti"])
    picker.press("ArrowDown")
    expect(options.first).to_have_attribute("aria-selected", "true")
    picker.press("Enter")
    expect(picker).to_have_value("GeForce RTX 3090")
    expect(options).to_have_count(0)
    expected = oomph.plan("gpt2", "RTX 3090").memory.capacity_mib
    expect(page.locator(".results")).to_contain_text(f"{expected:,.0f}")


def test_escape_leaves_the_card_and_a_click_takes_another(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&gpu=RTX+4070&n_layer=2")
    picker = page.get_by_role("combobox", name="Card")
    picker.fill("A100")
    picker.press("Escape")
    expect(picker).to_have_value("RTX 4070")
    picker.fill("A100")
    page.get_by_role("option", name="A100 PCIe 40GB").click()
    expect(picker).to_have_value("A100 PCIe 40GB")
    expect(page).to_have_url(re.compile("A100"))
    page.go_back()
    expect(picker).to_have_value("RTX 4070")


def test_a_card_has_own_numbers(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&gpu=RTX+4070&n_layer=2")
    expect(verdict(page, "nanogpt").locator(".word")).to_have_text("✓fits")
    page.get_by_text("By its own numbers").click()
    exact(page, "gpu_mib").fill("2000")
    exact(page, "gpu_mib").press("Enter")
    expect(verdict(page, "nanogpt")).to_contain_text("does not fit")


def test_the_picture_of_a_fit_has_a_legend_of_what_it_shows(open_page: OpenPage) -> None:
    page = open_page("#fit?preset=gpt2&gpu=RTX+4070&n_layer=2&n_head=2&n_embd=128&batch_size=2")
    legend = page.get_by_role("list", name="What the dots are")
    expect(legend.get_by_role("listitem")).not_to_have_count(0, timeout=120_000)
    kinds = {"same", "nearly", "different"} & {
        kind
        for dot in page.locator(".scatter > svg .dot:not(.no)").all()
        for kind in (dot.get_attribute("class") or "").split()
    }
    told = {kind for dot in legend.locator(".dot").all() for kind in (dot.get_attribute("class") or "").split()}
    assert kinds and kinds <= told
