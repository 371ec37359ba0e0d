"""The page in the dark, from right to left, on a phone, by keyboard, for a screen reader, and on the first load."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from browser_helpers import TOO_LARGE, OpenPage, overflow, slider, verdict
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.slow
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True}
TABS = ["#plan", "#fit", "#explain", "#runs?run=a", "#runs?run=a&run=b"]
DONE = ".verdict, .options tbody tr, .paste, .plot canvas"


def lightness(page: Page) -> int:
    """Of the page's ground, from 0 to 255."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return int(colour.removeprefix("rgb(").split(",")[0])


def test_it_is_light_or_dark_as_the_system_is_and_remembers_a_choice(open_page: OpenPage) -> None:
    assert lightness(open_page("#explain")) > 200
    page = open_page("#explain", color_scheme="dark")
    assert lightness(page) < 60
    page.get_by_role("button", name="Dark").click()
    assert lightness(page) > 200
    page.reload()
    expect(page.get_by_role("button", name="Dark")).to_have_attribute("aria-pressed", "false")
    assert lightness(page) > 200


def test_in_a_language_from_right_to_left_everything_changes_sides(open_page: OpenPage) -> None:
    page, turned = open_page(TOO_LARGE), open_page(TOO_LARGE, locale="ar")
    for each in (page, turned):
        expect(verdict(each, "nanogpt")).to_be_visible()
    for name in (".brand", ".inputs", ".segment"):
        before, after = (each.locator(name).first.bounding_box() for each in (page, turned))
        assert before and after
        assert after["x"] + after["width"] == pytest.approx(1280 - before["x"], abs=2), name
    assert overflow(turned) == 0
    chart = turned.locator(".timeline svg").evaluate("node => getComputedStyle(node).direction")
    assert chart == "ltr"  # time runs as the figures are written
    slider(turned, "batch_size").press("ArrowRight")  # it grows to the left
    expect(verdict(turned, "nanogpt").locator(".word")).to_have_text("✓fits")


@pytest.mark.parametrize("hash_", TABS)
@pytest.mark.parametrize("locale", ["en", "he"])
def test_nothing_is_wider_than_a_phone(open_page: OpenPage, hash_: str, locale: str) -> None:
    page = open_page(hash_, locale=locale, **PHONE)
    page.locator(DONE).first.wait_for(timeout=60_000)
    assert overflow(page) == 0


def test_on_a_phone_the_verdict_stays_in_sight_below_the_knobs(open_page: OpenPage) -> None:
    page = open_page(TOO_LARGE, **PHONE)
    expect(verdict(page, "nanogpt")).to_contain_text("does not fit")
    slider(page, "loss_chunk").scroll_into_view_if_needed()
    expect(page.locator(".pocket .no")).to_be_in_viewport()


def test_the_keyboard_alone_reaches_everything(open_page: OpenPage) -> None:
    page = open_page(TOO_LARGE)
    expect(verdict(page, "nanogpt")).to_be_visible()
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("""() => {
            const at = document.activeElement;
            return at.closest("[data-key]")?.dataset.key ?? at.closest(".verdict, .timeline")?.className.split(" ")[0]
                ?? at.getAttribute("aria-label") ?? at.textContent.trim();
        }""")
        )
    wanted = {"to the content", "Plan", "Runs", "Dark", "batch_size", "n_embd", "dtype", "compile", "loss_chunk"}
    assert wanted | {"verdict", "timeline", "copy"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(open_page: OpenPage, scheme: str) -> None:
    """The rules of axe-core: names, roles, contrast, landmarks, headings."""
    found = {}
    page = open_page("#plan", color_scheme=scheme, reduced_motion="reduce")
    for hash_ in (TOO_LARGE, *TABS[1:]):
        page.goto(f"{page.url.partition('#')[0]}{hash_}")
        if hash_ == "#explain":
            page.get_by_role("button", name="an example").click()
            page.locator(".finding").first.wait_for()
        page.locator(DONE).first.wait_for(timeout=60_000)
        expect(page.locator("[aria-busy=true]")).to_have_count(0, timeout=60_000)
        found[hash_] = [
            (rule["id"], [node["target"] for node in rule["nodes"]]) for rule in Axe().run(page).response["violations"]
        ]
    assert {hash_: rules for hash_, rules in found.items() if rules} == {}


def test_the_first_load_is_small(open_page: OpenPage) -> None:
    page = open_page()
    expect(verdict(page, "nanogpt")).to_be_visible()
    sizes = page.evaluate("""() => performance.getEntries().filter(each => each.transferSize)
        .map(each => [each.name, each.transferSize])""")
    assert len(sizes) > 10
    assert sum(size for _, size in sizes) < 300_000
