"""A real browser on a real server. Whatever a test does, no script may fail and no request may leave this machine."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from browser_helpers import OpenPage
from playwright.sync_api import Browser, Page, expect, sync_playwright
from web_helpers import Running

expect.set_options(timeout=20_000)  # of a busy machine; what is there at once passes at once
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium without a window."""
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.fail("these tests drive Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Browser, server: Running) -> Iterator[OpenPage]:
    """Open the page at a hash, in a browser that looks as asked: `open_page("#plan", color_scheme="dark")`."""
    failures: list[str] = []
    contexts = []

    def open_at(hash_: str = "", url: str = server.url, search: str = "", **looks: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **looks})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: failures.append(f"script: {error}"))
        page.on("console", lambda said: failures.append(f"console: {said.text}") if said.type == "error" else None)
        page.on("request", lambda sent: None if _is_local(sent.url, url) else failures.append(f"left: {sent.url}"))
        page.goto(f"{url}/{search}{hash_}")
        return page

    yield open_at
    for context in contexts:
        context.close()
    # The browser itself notes each answer of 400: a question with a mistake in it is no failure of the page.
    assert [each for each in failures if "status of 4" not in each] == []


def _is_local(address: str, url: str) -> bool:
    return address.startswith((f"{url}/", "blob:", "data:"))
