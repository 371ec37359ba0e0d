"""Pictures of the page for docs/serve.md: every tab, at 1280 and 390 pixels, light and dark.

    python docs/screenshots.py [--all]   # writes docs/images/*.png; --all: every combination, to be looked at

Needs Chromium, as the tests of the page do.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal, get_args

import msgspec
from playwright.sync_api import Browser, sync_playwright

import oomph

IMAGES = Path(__file__).parent / "images"
RUN = "preset=gpt2&gpu=RTX+4070&batch_size=16&gradient_accumulation_steps=32&max_iters=20000"
TABS = {  # address, and what is there when it is drawn
    "plan": (f"#plan?{RUN}", ".fixes li"),
    "fit": (f"#fit?{RUN}", ".options tbody tr"),
    "explain": ("#explain", ".finding"),
    "runs": ("#runs?run=gpt2-124m", ".plot canvas"),
}
SIZES = {1280: 860, 390: 844}
Scheme = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = get_args(Scheme)
IN_THE_DOCS: tuple[tuple[int, Scheme], ...] = ((1280, "light"), (390, "dark"))


def write_run(folder: Path) -> None:
    """A run that goes on, its figures drawn from a curve as real ones look."""
    folder.mkdir(parents=True)
    plan = oomph.plan("gpt2", gpu="RTX 4070", trainer="oomph", batch_size=16, gradient_accumulation_steps=32)
    (folder / "plan.json").write_bytes(msgspec.json.encode(plan.to_dict()))
    (folder / "config.toml").write_text("max_iters = 20000\n")
    drawn, lines = random.Random(1), []
    step_ms, tokens = plan.time.step_ms if plan.time else 1000.0, plan.data.tokens_per_step
    for step in range(0, 6000, 10):
        loss = 3.0 + 7.5 * math.exp(-step / 300) + 0.9 * math.exp(-step / 2500) + drawn.gauss(0, 0.03)
        took = step_ms * (1.03 + drawn.gauss(0, 0.004))
        figures = {"step": step, "tokens": (step + 1) * tokens, "loss": loss, "lr": 6e-4 * min(1, step / 700)}
        figures |= {"grad_norm": 0.4 + drawn.gauss(0, 0.05), "step_ms": took, "tokens_per_s": tokens / took * 1e3}
        figures |= {"mfu": 0.75 * step_ms / took, "memory_mib": plan.memory.allocated_mib * 1.004}
        lines.append(figures)
        if step % 500 == 0:
            lines.append({"step": step, "tokens": step * tokens, "train_loss": loss, "val_loss": loss + 0.04})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def shoot(browser: Browser, url: str, tab: str, width: int, scheme: Scheme, path: Path) -> None:
    """One picture of what is seen first."""
    address, drawn = TABS[tab]
    context = browser.new_context(
        viewport={"width": width, "height": SIZES[width]}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(f"{url}{address}")
    if tab == "explain":
        page.get_by_role("button", name="an example").click()
    page.locator(drawn).first.wait_for(timeout=120_000)
    page.wait_for_timeout(1000)  # charts are drawn in the next frames
    page.screenshot(path=path)
    context.close()


def main() -> int:
    """Take the pictures."""
    every = tuple((width, scheme) for width in SIZES for scheme in SCHEMES)
    wanted = every if "--all" in sys.argv else IN_THE_DOCS
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        write_run(Path(folder) / "out" / "gpt2-124m")
        command = [sys.executable, "-m", "oomph", "serve", "--json", "--no_browser", "--port", "0"]
        server = subprocess.Popen([*command, "--runs", f"{folder}/out"], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        url = json.loads("".join(iter(server.stdout.readline, "}\n")) + "}")["url"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        try:
            for tab in TABS:
                for width, scheme in wanted:
                    shoot(browser, url, tab, width, scheme, IMAGES / f"{tab}-{width}-{scheme}.png")
        finally:
            browser.close()
            server.terminate()
            server.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
