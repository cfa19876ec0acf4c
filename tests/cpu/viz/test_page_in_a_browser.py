"""The page of a plan in a real browser: from a file, without a network. Skipped where there is no Chromium."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.viz.html import notebook_html, plan_html
from flowrl.viz.measured import Seen
from tests.null.planner.golden.cases import CASES
from tests.null.viz.cases import HOSTILE, hostile, large

SECTIONS = ("timeline", "devices", "memory", "dataflow", "why", "measured", "versions", "steps")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    measured = [Seen("rollout", 63.0), Seen("update_policy", 29.0)]
    plan = large(max_staleness=2)
    texts = {
        "whole": plan_html(plan, measured=measured),
        "sync": plan_html(large()),
        "hostile": plan_html(hostile(), measured=[Seen(HOSTILE, 2.0)]),
        "notebook": f"<!doctype html><meta charset=utf-8><title>n</title>{notebook_html(plan)}",
    }
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


def quiet(browser: Any, page: Path) -> None:
    assert browser.said == []
    assert [url for url in browser.requests if url != page.as_uri()] == []


@pytest.mark.parametrize("is_dark", [False, True])
def test_it_asks_for_nothing_and_complains_of_nothing(browser: Any, pages: dict[str, Path], is_dark: bool) -> None:
    page = pages["whole"]
    browser.open(page, is_dark=is_dark)
    assert browser.run("document.documentElement.dataset.ready") == "true", "the script ran to its end"
    box = "document.getElementById(id).getBoundingClientRect()"
    sizes = browser.run(f"{json.dumps(SECTIONS)}.map(id => Math.min({box}.width, {box}.height))")
    assert min(sizes) > 100
    background = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, background[4:-1].split(","))) < 200) == is_dark
    quiet(browser, page)


def test_the_page_is_not_wider_than_a_screen(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["whole"])
    for width in (1280, 420):
        browser.send("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        assert browser.run("document.documentElement.scrollWidth") <= width
    browser.send("Emulation.clearDeviceMetricsOverride")


def test_it_can_be_read_without_a_script(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["whole"], has_script=False)
    assert browser.run("document.documentElement.dataset.ready ?? null") is None
    said = browser.run("document.body.innerText")
    for words in ("Timeline", "critical path", "update_policy", "peak 51.1 GiB of 80.0 GiB (predicted)"):
        assert words in said
    assert browser.run("document.querySelectorAll('svg title').length") > 100, "tips of the browser itself"
    assert browser.run("document.querySelectorAll('button').length") == 0, "no control that does nothing"
    quiet(browser, pages["whole"])


def test_hostile_names_run_nothing(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["hostile"])
    assert browser.run("document.documentElement.dataset.ready") == "true"
    assert browser.run("document.querySelectorAll('img, iframe').length") == 0
    assert browser.run("JSON.parse(document.getElementById('plan').textContent).steps[0].name") == HOSTILE
    browser.run(
        "document.querySelector('.bar[tabindex]').dispatchEvent(new PointerEvent('pointermove', {bubbles: true}))"
    )
    assert "onerror=alert(2)" in browser.run("document.getElementById('tip').textContent")
    quiet(browser, pages["hostile"])


def test_it_works_in_the_frame_of_a_notebook(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["notebook"])
    assert browser.run("document.querySelector('iframe').getBoundingClientRect().height") == 760
    assert browser.said == []


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_pinned_plans_show_every_view(browser: Any, tmp_path: Path, name: str) -> None:
    plan = CASES[name].plan
    if plan is None:  # pinned as what fits nowhere
        return
    page = tmp_path / "plan.html"
    page.write_text(plan_html(plan), encoding="utf-8")
    browser.open(page)
    browser.wait("document.documentElement.dataset.ready")
    views = [one for one in SECTIONS if one != "measured" and (one != "versions" or plan.max_staleness)]
    box = "document.getElementById(id).getBoundingClientRect()"
    assert min(browser.run(f"{json.dumps(views)}.map(id => Math.min({box}.width, {box}.height))")) > 100
    assert browser.run("document.documentElement.scrollWidth") <= 1280
    quiet(browser, page)


# ------------------------------------------------------------------------------------------------------------- script


def key(browser: Any, name: str, text: str = "") -> None:
    browser.send("Input.dispatchKeyEvent", type="keyDown", key=name, text=text)
    browser.send("Input.dispatchKeyEvent", type="keyUp", key=name)


def bar(browser: Any, step: str) -> Any:
    """Left edge and width of a step's bar on its track."""
    return browser.run(
        "(() => {const g = [...document.querySelectorAll('#gantt .bar[tabindex]')]"
        f".find(g => g.getAttribute('aria-label').startsWith('{step}\\n'));"
        "const r = g.querySelector('rect'); return [+r.getAttribute('x'), +r.getAttribute('width')]})()"
    )


def test_time_is_stretched_and_comes_back(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["sync"])
    before = bar(browser, "update_policy")
    labels = "[...document.querySelectorAll('#gantt text')].map(t => [t.textContent, t.getAttribute('text-anchor')])"
    said = browser.run(labels)
    area = browser.run("document.querySelector('#mem-devices-1 path.area').getAttribute('d')")
    key(browser, "+", "+")
    wide = bar(browser, "update_policy")
    assert wide[1] == pytest.approx(2 * before[1], rel=1e-3)
    assert browser.run("document.querySelector('#mem-devices-1 path.area').getAttribute('d')") != area
    key(browser, ".", ".")
    assert bar(browser, "update_policy")[0] < wide[0]
    key(browser, "0", "0")
    assert bar(browser, "update_policy") == pytest.approx(before, abs=0.02)
    assert sorted(map(str, browser.run(labels))) == sorted(map(str, said))
    quiet(browser, pages["sync"])


def test_memory_of_overlapping_iterations_keeps_its_own_time(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["whole"])
    area = "document.querySelector('#mem-devices-1 path.area').getAttribute('d')"
    before = browser.run(area)
    key(browser, "+", "+")
    assert browser.run(area) == before


def test_tables_are_not_wider_than_the_page(browser: Any, pages: dict[str, Path]) -> None:
    browser.send("Emulation.setDeviceMetricsOverride", width=1200, height=800, deviceScaleFactor=1, mobile=False)
    for name in ("sync", "whole"):
        browser.open(pages[name])
        wide = "[...document.querySelectorAll('main > section > .scroll')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        assert browser.run(wide) == 0, "no column is cut off"
    browser.send("Emulation.clearDeviceMetricsOverride")


def test_keys_go_from_step_to_step_and_tips_say_what_they_are(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["whole"])
    browser.run("document.querySelector('#gantt .bar[tabindex]').focus({focusVisible: true})")
    first = browser.run("document.getElementById('tip').textContent")
    assert first.startswith("rollout\n") and "predicted: 48.2 s" in first
    assert browser.run("document.getElementById('tip').hidden") is False
    lit = browser.run("[...document.querySelectorAll('tr.lit th')].map(th => th.textContent)")
    assert "rollout" in lit
    key(browser, "ArrowRight")
    assert browser.run("document.activeElement.getAttribute('aria-label')").startswith("reward_model\n")
    key(browser, "Escape")
    assert browser.run("document.getElementById('tip').hidden") is True


def test_theme_and_legend(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["whole"])
    colour = "getComputedStyle(document.body).backgroundColor"
    light = browser.run(colour)
    key(browser, "t", "t")
    assert browser.run(colour) != light
    browser.run("document.querySelector('#timeline .legend button').click()")
    dimmed = browser.run("document.querySelectorAll('#gantt .bar.off').length")
    assert 0 < dimmed < browser.run("document.querySelectorAll('#gantt .bar').length")
    browser.run("document.querySelector('#timeline .legend button').click()")
    assert browser.run("document.querySelectorAll('.off').length") == 0


def test_an_edge_leads_to_its_columns(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["whole"])
    assert browser.run("document.querySelector('#dataflow details').open") is False
    browser.run("document.querySelector('#flow .edge .touch').dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    assert browser.run("document.querySelector('#dataflow details').open") is True
    assert browser.run("document.querySelectorAll('#dataflow tr.lit').length") >= 1


def test_names_do_not_lie_on_each_other(browser: Any, pages: dict[str, Path]) -> None:
    browser.open(pages["whole"])
    overlaps = browser.run(
        """['gantt', 'map', 'flow', 'mem-devices-0', 'mem-devices-1', 'residuals', 'pareto', 'versions'].flatMap(id => {
          const texts = [...document.querySelectorAll(`#${id} text`)].filter(t => t.textContent.trim());
          const boxes = texts.map(t => [t.textContent, t.getBoundingClientRect()]);
          const meet = (p, q) =>
            p.left + 1 < q.right && q.left + 1 < p.right && p.top + 3 < q.bottom && q.top + 3 < p.bottom;
          return boxes.flatMap(([a, p], i) =>
            boxes.slice(i + 1).filter(([, q]) => meet(p, q)).map(([b]) => `${id}: ${a} | ${b}`));
        })"""
    )
    assert overlaps == []
