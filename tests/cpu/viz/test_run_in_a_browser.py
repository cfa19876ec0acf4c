"""The page of a run in a real browser: from a file, without a network. Skipped where there is no Chromium."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.viz.run.compare import compare_html
from flowrl.viz.run.page import run_html
from tests.null.viz.run_cases import EMOJI, HOSTILE, LONG_TOKENS, SCRIPT, as_bytes, hostile_run, large_run, plain_run

READY = "document.documentElement.dataset.viewed"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    plain, other = plain_run(folder), plain_run(folder, name="other", seed=5, shift=0.3)
    texts = {
        "plain": run_html(plain, pieces=as_bytes),
        "ids": run_html(plain),
        "hostile": run_html(hostile_run(folder), pieces=as_bytes),
        "compare": compare_html([plain, other]),
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


def opened(browser: Any, page: Path, **how: Any) -> None:
    browser.open(page, **how)
    assert browser.wait(READY) == "true"


def quiet(browser: Any, page: Path) -> None:
    assert browser.said == []
    assert [url for url in browser.requests if url != page.as_uri()] == []


def choose(browser: Any, name: str, value: str) -> None:
    """Set a control of the viewer as a person would, and wait for what it shows."""
    browser.run(
        f"(() => {{const e = document.getElementById('ask-{name}'); e.value = {json.dumps(value)};"
        "delete document.getElementById('viewer').dataset.shown; e.dispatchEvent(new Event('change'))})()"
    )
    browser.wait("document.getElementById('viewer').dataset.shown")


def search(browser: Any, words: str) -> None:
    browser.run(
        f"(() => {{document.getElementById('ask-words').value = {json.dumps(words)};"
        "delete document.getElementById('viewer').dataset.shown; document.getElementById('ask-go').click()})()"
    )
    browser.wait("document.getElementById('viewer').dataset.shown")


def said(browser: Any) -> str:
    return str(browser.run("document.getElementById('ask-said').textContent"))


@pytest.mark.parametrize("is_dark", [False, True])
def test_it_asks_for_nothing_and_complains_of_nothing(browser: Any, pages: dict[str, Path], is_dark: bool) -> None:
    opened(browser, pages["plain"], is_dark=is_dark)
    assert browser.run("document.querySelectorAll('#viewer .row').length") == 5 * 4
    assert browser.run("document.getElementById('samples').hidden") is True
    assert said(browser) == "48 responses in 12 groups"
    quiet(browser, pages["plain"])


def test_the_page_is_not_wider_than_a_screen(browser: Any, pages: dict[str, Path]) -> None:
    for name in ("plain", "hostile", "compare"):
        browser.open(pages[name])
        for width in (1280, 420, 390):
            browser.send(
                "Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False
            )
            assert browser.run("document.documentElement.scrollWidth") <= width, name
        browser.send("Emulation.clearDeviceMetricsOverride")


def test_it_can_be_read_without_a_script(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["plain"], has_script=False)
    words = browser.run("document.body.innerText")
    for one in ("Curves", "Reward", "step 5 · reward 0"):
        assert one in words
    assert browser.run("document.querySelectorAll('svg .curve').length") > 4
    assert browser.run("document.querySelectorAll('#viewer *').length") == 0, "no control that does nothing"
    quiet(browser, pages["plain"])


def test_filters_and_search(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["plain"])
    choose(browser, "from", "2")
    choose(browser, "until", "3")
    assert said(browser) == "16 responses in 4 groups"
    search(browser, "NEEDLE 3")
    assert said(browser) == "1 response in 1 group"
    assert browser.run("[...document.querySelectorAll('#viewer mark')].map(m => m.textContent)") == ["needle 3"]
    assert browser.run("document.querySelectorAll('#viewer .row.miss').length") == 3, "the group is shown whole"
    search(browser, "")
    choose(browser, "low", "1")
    shown = browser.run(
        "[...document.querySelectorAll('#viewer .row:not(.miss)')].map(r => r.querySelector('.fact b').textContent)"
    )
    assert shown and set(shown) == {"1"}
    quiet(browser, pages["plain"])


def test_no_hit_is_said_with_its_reason(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["plain"])
    search(browser, "is nowhere")
    assert said(browser) == "No response fits; with fewer filters or other words there may be some."
    assert browser.run("document.getElementById('ask-at').textContent") == ""
    search(browser, "")
    choose(browser, "low", "1")
    choose(browser, "high", "0.5")
    assert said(browser) == "No response: a reward of at least 1 and at most 0.5 is none."
    choose(browser, "from", "4")
    choose(browser, "until", "2")
    assert "the first is the later one" in said(browser)
    quiet(browser, pages["plain"])


def test_versions_come_after_scores(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["plain"])
    names = browser.run(
        "[...document.querySelector('#viewer .row .facts').children].map(f => f.firstChild.textContent.trim())"
    )
    assert names[:2] == ["reward", "advantage"] and names.index("version") > names.index("advantage")
    assert names.index("style") < names.index("version"), names
    quiet(browser, pages["plain"])


def test_order_by_reward(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["plain"])
    means = (
        "[...document.querySelectorAll('#viewer h3 small')].map(s => +s.textContent.match(/mean reward ([\\d.]+)/)[1])"
    )
    choose(browser, "order", "best")
    high = browser.run(means)
    choose(browser, "order", "worst")
    low = browser.run(means)
    assert high == sorted(high, reverse=True) and low == sorted(low) and high[0] > low[0]


def test_a_response_says_how_stale_it_is(browser: Any, pages: dict[str, Path]) -> None:
    """Versions between the oldest weights that sampled it and the newest that sampled any of its step."""
    opened(browser, pages["plain"])
    choose(browser, "from", "5")
    facts = browser.run("[...document.querySelectorAll('#viewer .row .facts')].map(f => f.textContent)")
    stale = [one for one in facts if "version 3–5" in one and "staleness 2" in one]
    fresh = [one for one in facts if "version 5" in one and "staleness 0" in one]
    assert len(stale) == 2 and len(fresh) == 6, facts
    quiet(browser, pages["plain"])


@pytest.mark.parametrize("name", ["rollout_logprobs", "ratio", "loss_mask"])
def test_tokens_are_coloured(browser: Any, pages: dict[str, Path], name: str) -> None:
    opened(browser, pages["plain"])
    choose(browser, "colour", name)
    row = "document.querySelector('#viewer .row')"
    text = browser.run(f"[...{row}.querySelectorAll('.tk')].map(t => t.textContent)")
    assert "".join(text[:-1]) == "it is 6" and text[-1] == "⟨256⟩"
    marked = browser.run("document.querySelectorAll('#viewer .tk:is(.q1,.q2,.q3,.q4,.n1,.n2,.n3,.masked)').length")
    assert marked > 0
    browser.run(f"{row}.querySelector('.tk').dispatchEvent(new PointerEvent('pointermove', {{bubbles: true}}))")
    tip = browser.run("document.querySelector('.tip').textContent")
    assert tip.startswith("token 0 · id 105\n") and "rollout_logprobs: -" in tip and "ratio: " in tip
    quiet(browser, pages["plain"])


def test_without_a_tokenizer_ids_are_shown(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["ids"])
    choose(browser, "colour", "old_logprobs")
    assert browser.run("document.querySelector('#viewer .tk').textContent") == "⟨105⟩"


def test_charts_tell_a_step(browser: Any, pages: dict[str, Path]) -> None:
    for name, words in (("plain", "reward/mean: 0.2"), ("compare", "other-1: 0.5")):
        browser.open(pages[name])
        browser.run(
            "(() => {const s = document.querySelector('svg[data-chart]'), r = s.getBoundingClientRect();"
            "s.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, "
            "clientX: r.left + r.width * (50 + 2 / 5 * 312) / 372, clientY: r.top + 40}))})()"
        )
        tip = browser.run("document.querySelector('.tip').textContent")
        assert tip.startswith("step 2") and words in tip
        quiet(browser, pages[name])


def test_typing_is_no_command(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["plain"])
    browser.run("document.getElementById('ask-words').focus()")
    browser.send("Input.dispatchKeyEvent", type="keyDown", key="t", text="t")
    browser.send("Input.dispatchKeyEvent", type="keyUp", key="t")
    assert browser.run("document.getElementById('ask-words').value") == "t"
    assert browser.run("document.documentElement.dataset.theme ?? null") is None


# ------------------------------------------------------------------------------------------------------------- hostile


def test_hostile_responses_run_nothing(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["hostile"])
    choose(browser, "until", "0")
    seen: set[str] = set()
    for colour in ("", "rollout_logprobs", "advantage", "loss_mask"):
        if colour != "advantage":
            choose(browser, "colour", colour)
        for _ in range(2):
            seen |= set(browser.run("[...document.querySelectorAll('#viewer .body')].map(b => b.textContent)"))
            browser.run("document.getElementById('ask-next').click()")
    assert browser.run("document.querySelectorAll('img, iframe, svg [onload], b > i').length") == 0
    assert SCRIPT in seen, "shown as it was sampled"
    assert any(EMOJI in one for one in seen)
    assert any("[U+202E]gnp.exe[U+2066]" in one for one in seen), "what turns the text around it is named"
    assert any("␀␇␛[31m" in one for one in seen)
    search(browser, "</script>")
    assert "in 6 groups" in said(browser)
    quiet(browser, pages["hostile"])


def test_right_to_left_text_stays_in_its_box(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["hostile"])
    choose(browser, "until", "0")
    search(browser, HOSTILE[1])
    directions = browser.run(
        "[...document.querySelectorAll('#viewer .row:not(.miss) .body')].map(b => [getComputedStyle(b).direction, "
        "getComputedStyle(b).unicodeBidi, b.textContent.slice(0, 6)])"
    )
    assert ["rtl", "isolate", HOSTILE[1][:6]] in directions
    assert browser.run("getComputedStyle(document.querySelector('#viewer .facts')).direction") == "ltr"


def test_bytes_that_are_no_text_are_shown(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["hostile"])
    choose(browser, "from", "1")
    choose(browser, "colour", "rollout_logprobs")
    tokens = browser.run("[...document.querySelector('#viewer .row').querySelectorAll('.tk')].map(t => t.textContent)")
    assert tokens[:4] == ["", "", "", "😀"], "a character that lies in four tokens comes with its last"
    assert "�" in "".join(tokens) and len(tokens) == 14
    quiet(browser, pages["hostile"])


def test_a_hundred_thousand_tokens_are_shown_in_parts(browser: Any, pages: dict[str, Path]) -> None:
    opened(browser, pages["hostile"])
    choose(browser, "from", "1")
    choose(browser, "order", "longest")
    body = "document.querySelector('#viewer .row .body')"
    assert browser.run(f"{body}.textContent.length") < 5000
    browser.run(f"{body}.querySelector('button').click()")
    assert browser.run(f"{body}.textContent.length") == LONG_TOKENS
    choose(browser, "colour", "old_logprobs")
    shown = f"[...{body}.querySelectorAll('.tk')].map(t => t.textContent)"
    first = browser.run(shown)
    assert first[:5] == list("word ") and len(first) < 2000, "a window: all at once would take a browser minutes"
    browser.run(
        f"(() => {{const m = {body}.querySelector('input'); m.value = m.max; m.dispatchEvent(new Event('change'))}})()"
    )
    assert browser.run(shown)[-2:] == [" ", "⟨256⟩"]
    assert "of 100,001" in browser.run(f"{body}.querySelector('.window').textContent")
    quiet(browser, pages["hostile"])


# --------------------------------------------------------------------------------------------------------------- large


@pytest.mark.slow
def test_a_run_of_500_steps_of_512_responses(browser: Any, tmp_path: Path) -> None:
    page = tmp_path / "large.html"
    text = run_html(large_run(tmp_path, steps=500, rows=512), pieces=as_bytes, most_bytes=96 * 2**20)
    page.write_text(text, encoding="utf-8")
    opened(browser, page)
    count = int(said(browser).split()[0].replace(",", ""))
    assert count == 512 * 500, "texts of all steps have room"
    search(browser, "needle250")
    assert said(browser) == "1 response in 1 group"
    choose(browser, "low", "1")
    used = browser.run("performance.memory.usedJSHeapSize")
    assert used < 700e6
    quiet(browser, page)
