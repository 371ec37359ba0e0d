"""The planner, fit and explain as a person uses them: every figure on the page is the library's own."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from browser_helpers import EXAMPLES, TOO_LARGE, OpenPage, exact, slider, verdict
from playwright.sync_api import Page, expect

import oomph
from oomph import config as configs

pytestmark = pytest.mark.slow
LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_hidden_layers": 4}
LLAMA |= {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024, "vocab_size": 32000}


def llama() -> oomph.Plan:
    """The plan of that model."""
    return oomph.plan(configs.load([configs.Pasted("config.json", json.dumps(LLAMA))]), "RTX 4070")


def needed(trainer: str = "nanogpt", card: str = "RTX 4070", **keys: object) -> str:
    """The figure of a plan's memory as the page writes it."""
    return f"{oomph.plan({**keys, 'trainer': trainer}, card).memory.total_mib:,.0f}"


def drop(page: Page, name: str, text: str) -> None:
    """Let a file fall on the page."""
    page.evaluate(
        """([name, text]) => {
            const carried = new DataTransfer();
            carried.items.add(new File([text], name));
            window.dispatchEvent(new DragEvent("drop", {dataTransfer: carried, bubbles: true, cancelable: true}));
        }""",
        [name, text],
    )


def test_the_first_sight_is_a_plan_of_both_programs(open_page: OpenPage) -> None:
    page = open_page()
    expect(verdict(page, "nanogpt")).to_contain_text(needed())
    expect(verdict(page, "oomph")).to_contain_text(needed("oomph"))
    expect(page.locator(".bar-row")).to_have_count(2)
    expect(page.locator(".timeline .peak")).to_contain_text("backward: loss")
    expect(page).to_have_title("Plan · oomph")


def test_a_slider_turns_a_run_that_does_not_fit_into_one_that_does(open_page: OpenPage) -> None:
    page = open_page(TOO_LARGE)
    expect(verdict(page, "nanogpt")).to_contain_text("does not fit")
    slider(page, "batch_size").press("ArrowLeft")  # the batch is kept: 8 × 64 for 16 × 32
    expect(verdict(page, "nanogpt").locator(".word")).to_have_text("✓fits")
    expect(verdict(page, "nanogpt")).to_contain_text(needed(batch_size=8, gradient_accumulation_steps=64))
    expect(exact(page, "batch_size")).to_have_value("8")
    expect(exact(page, "gradient_accumulation_steps")).to_have_value("64")


DRAG = """async () => {
    const slider = document.querySelector(".knob[data-key=batch_size] input[type=range]");
    const figure = document.querySelector(".verdict[data-program=nanogpt] .need b");
    const seen = [];
    const look = () => seen.push(Number(figure.textContent.replaceAll(",", "")));
    new MutationObserver(look).observe(figure, {characterData: true, childList: true, subtree: true});
    for (let at = 0; at <= Number(slider.max); at += 1) {
        slider.value = at;
        slider.dispatchEvent(new Event("input", {bubbles: true}));
        await new Promise((done) => setTimeout(done, 5));
    }
    await new Promise((done) => setTimeout(done, 3000));
    return seen;
}"""


def test_a_slider_in_motion_draws_no_answer_over_a_newer_one_and_ends_at_its_own(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&gpu=RTX+4070&n_layer=2")
    expect(verdict(page, "nanogpt")).to_contain_text(needed(n_layer=2))
    page.get_by_label("keep the batch").uncheck()
    aborted: list[str] = []
    page.on("requestfailed", lambda request: aborted.append(request.url))
    seen = page.evaluate(DRAG)
    assert seen == sorted(seen) and len(set(seen)) == len(seen)  # more sequences, more memory
    assert f"{seen[-1]:,}" == needed(n_layer=2, batch_size=128)
    assert aborted and all(url.endswith("/api/plan") for url in aborted)


def test_a_typed_number_is_taken_exactly_and_can_be_taken_back(open_page: OpenPage) -> None:
    page = open_page(TOO_LARGE)
    expect(verdict(page, "nanogpt")).to_contain_text("does not fit")
    page.get_by_label("keep the batch").uncheck()
    exact(page, "batch_size").fill("7")
    exact(page, "batch_size").press("Enter")
    expect(verdict(page, "nanogpt")).to_contain_text(needed(batch_size=7, gradient_accumulation_steps=32))
    page.get_by_role("button", name="Micro-batch: back to the config's value").click()
    expect(verdict(page, "nanogpt")).to_contain_text(needed(batch_size=12, gradient_accumulation_steps=32))


def test_knobs_show_what_the_chosen_program_does(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&device=cpu&n_layer=2")  # on a CPU nanoGPT compiles, and oomph train does not
    compiles = page.locator(".knob[data-key=compile] input")
    expect(compiles).to_be_checked()
    verdict(page, "oomph").click()
    expect(compiles).not_to_be_checked()


def test_width_moves_in_whole_heads(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&gpu=RTX+4070")
    expect(verdict(page, "nanogpt")).to_contain_text(needed())
    slider(page, "n_embd").press("ArrowRight")
    expect(exact(page, "n_head").first).to_have_value("13")
    expect(verdict(page, "nanogpt")).to_contain_text(needed(n_embd=832, n_head=13))


def test_what_only_oomph_train_does_changes_its_plan_alone(open_page: OpenPage) -> None:
    page = open_page(TOO_LARGE)
    expect(verdict(page, "oomph")).to_contain_text("fits")
    slider(page, "checkpoint_layers").press("End")
    keys = {"batch_size": 16, "gradient_accumulation_steps": 32}
    expect(verdict(page, "oomph")).to_contain_text(needed("oomph", **keys, checkpoint_layers=12))
    expect(verdict(page, "nanogpt")).to_contain_text(needed(**keys))


def test_what_is_wrong_is_said_where_it_is_and_the_last_plan_stays(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&gpu=RTX+4070")
    expect(verdict(page, "nanogpt")).to_contain_text(needed())
    exact(page, "n_layer").fill("-3")
    exact(page, "n_layer").press("Enter")
    expect(page.locator(".knob[data-key=n_layer] .problem")).to_contain_text("-3")
    expect(verdict(page, "nanogpt")).to_contain_text(needed())
    expect(page.locator(".results.stale")).to_have_count(1)


@pytest.mark.parametrize("wrong", ["batchsize=8", "gpu_mib=abc", "reserve_mib=x", "eval_iters=x"])
def test_what_a_link_says_wrongly_is_told_even_where_no_knob_is_in_sight(open_page: OpenPage, wrong: str) -> None:
    page = open_page(f"#plan?preset=gpt2&gpu=RTX+4070&{wrong}")
    expect(page.locator("section[aria-label=Config] .problem")).to_contain_text(wrong.partition("=")[0])


def test_a_key_that_is_none_is_mended_by_a_click(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&gpu=RTX+4070&batchsize=8")
    page.locator("section[aria-label=Config] .problem").get_by_role("button", name="batch_size").click()
    expect(verdict(page, "nanogpt")).to_contain_text(needed(batch_size=8))


def test_a_text_stays_a_text_whatever_it_looks_like(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&gpu=RTX+4070&n_layer=2&dataset=007")
    expect(verdict(page, "nanogpt")).to_contain_text(needed(n_layer=2))
    page.get_by_text("Every other key").click()
    expect(exact(page, "dataset")).to_have_value("007")
    exact(page, "dataset").fill("2024")
    exact(page, "dataset").press("Enter")
    page.wait_for_url(re.compile("dataset=2024"))
    expect(page.locator(".command code")).to_contain_text("--dataset=2024")
    expect(page.locator(".problem, .results.stale")).to_have_count(0)


def test_the_command_below_a_fit_is_the_question_that_was_asked(open_page: OpenPage) -> None:
    page = open_page("#fit?preset=gpt2&gpu=RTX+4070&batch_size=1&gradient_accumulation_steps=2&step_ms=100")
    said = page.locator(".fit .command code")
    keys = "--batch_size=1 --gradient_accumulation_steps=2"
    expect(said).to_have_text(f'oomph fit gpt2 --gpu "RTX 4070" {keys}', timeout=120_000)
    page.get_by_label("the largest model").check()
    expect(said).to_have_text(f'oomph fit gpt2 --gpu "RTX 4070" --largest {keys}', timeout=120_000)
    page.get_by_label("from a budget").check()
    page.get_by_role("textbox", name="Tokens").fill("36.8M")
    page.get_by_role("textbox", name="Tokens").press("Enter")
    expect(said).to_have_text('oomph fit --gpu "RTX 4070" --hours 24 --tokens 36.8M', timeout=90_000)
    expect(page.locator(".fit .problem")).to_have_count(0)


def test_an_unknown_card_offers_the_nearest(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&gpu=RTX+4079")
    page.locator("section[aria-label=Card] .problem button").click()
    expect(verdict(page, "nanogpt")).to_contain_text("MiB")
    expect(page.get_by_role("combobox", name="Card")).not_to_have_value("RTX 4079")


def test_a_dropped_config_is_planned(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&gpu=RTX+4070")
    expect(verdict(page, "nanogpt")).to_contain_text(needed())
    config = (EXAMPLES / "fineweb_40m.py").read_text()
    drop(page, "fineweb_40m.py", config)
    expected = oomph.plan(EXAMPLES / "fineweb_40m.py", "RTX 4070")
    expect(verdict(page, "nanogpt")).to_contain_text(f"{expected.memory.total_mib:,.0f}")
    expect(page.locator(".results")).to_contain_text("2.85")  # passes over its data


def test_a_pasted_config_is_data_and_its_mistake_has_a_line(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&gpu=RTX+4070")
    expect(verdict(page, "nanogpt")).to_contain_text(needed())
    page.get_by_role("button", name="paste or edit").click()
    page.get_by_label("Config text").fill("n_layer = 6\nn_head = '<img src=x onerror=alert(1)>'\n")
    expect(page.locator("section[aria-label=Config] .problem")).to_contain_text("<img src=x onerror=alert(1)>")
    expect(page.locator("section[aria-label=Config] .problem")).to_contain_text(":2")
    page.get_by_label("Config text").fill("n_layer = 6\n")
    expect(verdict(page, "nanogpt")).to_contain_text(needed(n_layer=6))


def test_a_pasted_llama_has_one_verdict_and_gpt2_two_again(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&gpu=RTX+4070")
    expect(page.locator(".verdict")).to_have_count(2)
    page.get_by_role("button", name="paste or edit").click()
    page.get_by_label("Config text").fill(json.dumps(LLAMA))
    expect(verdict(page, "hf")).to_contain_text(f"{llama().memory.total_mib:,.0f}")
    for each in (".verdict", ".bar-row", ".pocket span", ".parts thead .number"):
        expect(page.locator(each)).to_have_count(1)
    expect(page.locator(".timeline .outline")).to_have_count(0)
    expect(page.locator(".read-as")).to_contain_text("Hugging Face config.json: Llama")
    page.get_by_role("combobox", name="Config").select_option("gpt2")
    expect(verdict(page, "nanogpt")).to_contain_text(needed())
    expect(verdict(page, "oomph")).to_contain_text(needed("oomph"))
    for each in (".verdict", ".bar-row", ".parts thead .number"):
        expect(page.locator(each)).to_have_count(2)
    expect(page.locator(".read-as")).to_have_count(0)


def test_a_config_that_cannot_be_read_leaves_no_verdict(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&gpu=RTX+4070")
    expect(page.locator(".verdict")).to_have_count(2)
    drop(page, "config.json", json.dumps({**LLAMA, "model_type": "mamba"}))
    expect(page.locator("section[aria-label=Config] .problem")).to_contain_text("mamba")
    expect(page.locator(".verdict")).to_have_count(0)
    drop(page, "config.json", json.dumps(LLAMA))
    expect(verdict(page, "hf")).to_contain_text(f"{llama().memory.total_mib:,.0f}")
    drop(page, "large.json", " " * 2_000_000)
    expect(page.locator("section[aria-label=Config] .problem")).to_contain_text("large.json")
    expect(page.locator(".verdict")).to_have_count(0)


def test_the_knobs_of_a_model_are_its_own(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&gpu=RTX+4070")
    expect(verdict(page, "nanogpt")).to_contain_text(needed())
    expect(page.locator(".knob[data-key=num_key_value_heads]")).to_have_count(0)
    page.get_by_role("combobox", name="Config").select_option("Qwen/Qwen3-0.6B")
    expect(exact(page, "num_key_value_heads")).to_have_value("8")
    expect(exact(page, "head_dim")).to_have_value("128")
    expect(page.locator(".knob[data-key=loss_chunk]")).to_have_count(0)
    slider(page, "checkpoint_layers").press("ArrowRight")  # all of them, as in transformers
    expected = oomph.plan(configs.load(["Qwen/Qwen3-0.6B"], [("checkpoint_layers", "28", "")]), "RTX 4070")
    expect(verdict(page, "hf")).to_contain_text(f"{expected.memory.total_mib:,.0f}")
    page.get_by_text("Every other key").click()
    expect(page.locator(".all .knob[data-key=partial_rotary_factor]")).to_have_count(1)
    expect(page.locator(".all .knob[data-key=wandb_log]")).to_have_count(0)
    page.wait_for_url(re.compile("preset=Qwen%2FQwen3-0.6B"))


def test_a_plan_is_a_link(open_page: OpenPage) -> None:
    page = open_page(TOO_LARGE)
    expect(verdict(page, "nanogpt")).to_contain_text("does not fit")
    page.get_by_role("button", name="paste or edit").click()
    page.get_by_label("Config text").fill("n_layer = 7  # of my own\n")
    verdict(page, "oomph").click()
    slider(page, "block_size").press("ArrowLeft")
    keys = {"n_layer": 7, "block_size": 768, "batch_size": 16, "gradient_accumulation_steps": 32}
    expect(verdict(page, "oomph")).to_contain_text(needed("oomph", **keys))
    page.wait_for_url(re.compile("trainer=oomph.*block_size=768"))
    again = open_page("#" + page.url.partition("#")[2])
    expect(verdict(again, "oomph")).to_contain_text(needed("oomph", **keys))
    expect(verdict(again, "oomph").locator("input")).to_be_checked()
    again.get_by_role("button", name="paste or edit").click()
    expect(again.get_by_label("Config text")).to_have_value("n_layer = 7  # of my own\n")


def test_the_timeline_is_read_by_pointer_and_by_keys(open_page: OpenPage) -> None:
    page = open_page(TOO_LARGE)
    chart = page.locator(".timeline svg")
    chart.hover()
    expect(page.locator(".tip")).to_contain_text("MiB")
    page.mouse.move(0, 0)
    chart.focus()
    chart.press("ArrowRight")
    expect(page.locator(".tip .tip-title")).to_contain_text("loss")


def test_fit_is_sorted_and_a_row_is_downloaded_and_applied(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page(TOO_LARGE.replace("plan", "fit"))
    best = page.locator(".options tr.best")
    expect(best).to_contain_text("best", timeout=120_000)
    expect(page.locator(".scatter circle:not(.legend circle)")).to_have_count(
        page.locator(".options tr[data-rank]").count()
    )
    page.get_by_role("button", name="Memory, MiB").click()
    figures = [int(text.replace(",", "")) for text in page.locator(".options td.memory").all_inner_texts()]
    assert len(figures) > 5 and figures == sorted(figures)
    need = best.locator("td.memory").inner_text()
    with page.expect_download() as caught:
        page.get_by_role("button", name="Download").click()  # the best one stands open
    saved = tmp_path / caught.value.suggested_filename
    caught.value.save_as(saved)
    assert f"{oomph.plan(saved, 'RTX 4070').memory.total_mib:,.0f}" == need
    page.get_by_role("button", name="Apply").click()
    expect(page).to_have_title("Plan · oomph")
    expect(page.locator(".verdict.chosen")).to_contain_text(need)
    expect(page.locator(".verdict.chosen")).to_contain_text("fits")
    page.go_back()
    expect(page).to_have_title("Fit · oomph")
    expect(best).to_contain_text("best", timeout=120_000)


def test_back_and_forward_show_what_the_address_says(open_page: OpenPage) -> None:
    page = open_page(TOO_LARGE)
    kept = {"gradient_accumulation_steps": 32}
    expect(verdict(page, "nanogpt")).to_contain_text(needed(batch_size=16, **kept))
    page.get_by_label("keep the batch").uncheck()
    for size in ("8", "4"):
        exact(page, "batch_size").fill(size)
        exact(page, "batch_size").press("Enter")
        page.wait_for_url(re.compile(f"batch_size={size}&"))
    page.get_by_role("link", name="Runs").click()
    expect(page.locator(".run-list")).to_be_visible()
    page.go_back()
    for move, size in ((page.go_back, "8"), (page.go_back, "16"), (page.go_forward, "8"), (page.go_forward, "4")):
        move()
        expect(exact(page, "batch_size")).to_have_value(size)
        expect(verdict(page, "nanogpt")).to_contain_text(needed(batch_size=int(size), **kept))
        assert f"batch_size={size}" in page.url


def test_a_drag_of_a_slider_is_one_step_back(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&gpu=RTX+4070&n_layer=2")
    expect(verdict(page, "nanogpt")).to_contain_text(needed(n_layer=2))
    entries = page.evaluate("history.length")
    box = slider(page, "block_size").bounding_box()
    assert box is not None
    middle = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + 0.73 * box["width"], middle)
    page.mouse.down()
    for part in (0.6, 0.4, 0.2):
        page.mouse.move(box["x"] + part * box["width"], middle)
        page.wait_for_timeout(300)  # long enough for the address to follow
    page.mouse.up()
    page.wait_for_url(re.compile("block_size="))
    assert page.evaluate("history.length") == entries + 1
    page.go_back()
    expect(verdict(page, "nanogpt")).to_contain_text(needed(n_layer=2))


def test_an_answer_under_way_dims_the_old_one_and_can_be_cancelled(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&gpu=RTX+4070&n_layer=2")
    results = page.locator(".results")
    expect(results).to_have_attribute("aria-busy", "false")
    page.route("**/api/plan", lambda _: None)  # which never answers
    exact(page, "n_layer").fill("3")
    exact(page, "n_layer").press("Enter")
    expect(results).to_have_attribute("aria-busy", "true")
    expect(page.locator(".results.stale .verdict")).to_have_count(2)
    page.locator(".results").get_by_role("button", name="cancel").click()
    expect(page.locator(".verdict")).to_have_count(0)
    page.unroute("**/api/plan")
    page.get_by_role("button", name="Plan it").click()
    expect(verdict(page, "nanogpt")).to_contain_text(needed(n_layer=3))


def test_what_would_fit_is_a_click_away_and_undone_by_back(open_page: OpenPage) -> None:
    page = open_page(TOO_LARGE)
    fixes = page.locator(".fixes li")
    expect(fixes).to_have_count(3, timeout=120_000)
    fixes.first.get_by_role("button").click()
    expect(page.locator(".verdict.chosen")).to_contain_text("fits")
    expect(page.locator(".fixes")).to_have_count(0)
    page.wait_for_url(lambda url: not url.endswith(TOO_LARGE))
    page.go_back()
    expect(verdict(page, "nanogpt")).to_contain_text("does not fit")


def test_a_click_on_the_timeline_tells_what_is_alive_then(open_page: OpenPage) -> None:
    page = open_page(TOO_LARGE)
    held = page.locator("section", has=page.get_by_role("heading", name="Held at"))
    expect(held).to_contain_text("loss")
    page.locator(".timeline svg").click(position={"x": 80, "y": 150})
    expect(held).to_contain_text("moment you clicked")
    expect(held.locator("tbody tr").first).to_be_visible()
    page.get_by_role("button", name="the peak again").click()
    expect(held).to_contain_text("Held at the peak")


def test_the_picture_and_the_snapshot_are_files(open_page: OpenPage, tmp_path: Path) -> None:
    page = open_page("#plan?preset=gpt2&gpu=RTX+4070&n_layer=2")
    starts = {"picture (SVG)": b"<svg", "memory snapshot": b"\x80"}
    for name, start in starts.items():
        with page.expect_download() as caught:
            page.get_by_role("button", name=name).click()
        caught.value.save_as(tmp_path / "file")
        assert (tmp_path / "file").read_bytes().startswith(start)


def test_a_card_may_be_given_by_its_numbers(open_page: OpenPage) -> None:
    page = open_page("#plan?preset=gpt2&n_layer=2")
    page.get_by_text("By its own numbers").click()
    exact(page, "gpu_mib").fill("3000")
    exact(page, "gpu_mib").press("Enter")
    expect(page.locator(".card-line")).to_contain_text("custom GPU: 2,700 MiB")  # what its driver leaves


def test_explain_asks_for_exactly_what_is_missing_and_takes_a_config(open_page: OpenPage) -> None:
    page = open_page("#explain")
    page.get_by_placeholder("paste here").fill(
        "iter 10: loss 3.2, time 310.00ms, mfu 30.1%\niter 20: loss 3.1, time 310.00ms"
    )
    page.get_by_role("button", name="Explain", exact=True).click()
    expect(page.locator(".missing #missing-n_embd")).to_be_visible(timeout=120_000)
    page.get_by_label("The config that the run had").set_input_files(
        {
            "name": "run.py",
            "mimeType": "text/plain",
            "buffer": b"n_layer = 2\nn_head = 2\nn_embd = 64\nbatch_size = 4\n",
        }
    )
    expect(page.locator(".report")).to_contain_text("n_embd")
    expect(page.locator(".missing #missing-n_embd")).to_have_count(0)
    page.get_by_placeholder("paste here").fill("another text")
    expect(page.locator(".stale .report")).to_have_count(1)


def test_an_out_of_memory_message_is_explained_and_leads_to_a_plan(open_page: OpenPage) -> None:
    page = open_page("#explain")
    page.get_by_placeholder("paste here").fill((EXAMPLES / "out_of_memory.log").read_text())
    page.get_by_label("Card, where").fill("RTX 4070")
    page.get_by_role("button", name="Explain", exact=True).click()
    expect(page.locator(".finding.error")).to_contain_text("The card ran out of memory", timeout=120_000)
    expect(page.locator(".options tbody tr").first).to_be_visible()
    page.get_by_role("button", name="Open in Plan").click()
    keys = {"batch_size": 16, "gradient_accumulation_steps": 32}
    expect(verdict(page, "nanogpt")).to_contain_text(needed(**keys))


def test_text_that_says_nothing_is_refused_in_words(open_page: OpenPage) -> None:
    page = open_page("#explain")
    page.get_by_placeholder("paste here").fill("hello")
    page.get_by_role("button", name="Explain", exact=True).click()
    expect(page.locator(".paste .problem, .finding")).not_to_have_count(0)
