"""The page of a run: what is recorded is there, hostile texts stay text, and what has no room is said."""

from __future__ import annotations

import base64
import json
import re
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flowrl as fr
from examples.rloo import rloo
from flowrl.errors import ConfigError
from flowrl.planner.measured import compare_run
from flowrl.runtime.rundir import RunDir
from flowrl.trace import Event, TraceWriter, read_trace
from flowrl.viz.frame import LIVE_POLICY, POLICY, asset, table
from flowrl.viz.run.compare import compare_html
from flowrl.viz.run.curves import SMOOTHED_FROM, Chart, Line, charts, compared, gallery, smoothed, thinned
from flowrl.viz.run.page import run_html
from flowrl.viz.run.responses import Responses, hold, spread_order
from flowrl.viz.svg import clean, tag as element
from tests.null.runtime.plans import calls, compute, plan_of
from tests.null.viz.run_cases import BROKEN_BYTES, HOSTILE, LONG_TOKENS, SCRIPT, as_bytes, hostile_run, plain_run
from tests.null.viz.test_page import read


def blocks_of(page: str) -> dict[str, bytes]:
    found = re.findall(r'<script type="text/plain" id="block-([^"]+)">([^<]*)</script>', page)
    return {name: zlib.decompress(base64.b64decode(text)) for name, text in found}


def tokens_of(block: bytes) -> tuple[dict[str, Any], np.ndarray, dict[str, np.ndarray]]:
    (size,) = struct.unpack_from("<I", block)
    header = json.loads(block[4 : 4 + size])
    count, at = sum(header["lengths"]), 4 + size
    ids = np.frombuffer(block, "<u4", count, at)
    at += ids.nbytes
    values = {}
    for name in header["numbers"]:
        values[name] = np.frombuffer(block, "<f2", count, at)
        at += 2 * count
    for name in header["masks"]:
        values[name] = np.frombuffer(block, "u1", count, at)
        at += count
    assert at == len(block)
    return header, ids, values


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return plain_run(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def page(folder: RunDir) -> str:
    return run_html(folder, pieces=as_bytes)


def test_every_part_is_there_and_every_element_is_closed(page: str) -> None:
    ids = {attributes.get("id") for _, attributes in read(page).tags}
    assert ids >= {
        "curves",
        "responses",
        "metrics",
        "flow",
        "settings",
        "viewer",
        "samples",
        "chart-data",
        "block-index",
    }


def test_the_policy_lets_nothing_in(page: str) -> None:
    tags = read(page).tags
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}) in tags
    for tag, attributes in tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not {"src", "srcset", "action"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    assert "connect-src" not in page.split("<script>")[0]


def test_a_live_page_may_ask_who_served_it_and_holds_no_responses(folder: RunDir) -> None:
    live = run_html(folder, is_live=True)
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": LIVE_POLICY}) in read(live).tags
    assert blocks_of(live) == {}
    assert '<noscript><meta http-equiv="refresh"' in live


def test_blocks_hold_what_was_recorded(folder: RunDir, page: str) -> None:
    blocks = blocks_of(page)
    index = json.loads(blocks["index"])
    assert [chunk["step"] for chunk in index] == list(range(6))
    for place, chunk in enumerate(index):
        rows = folder.edge(chunk["step"], "group_norm")
        text = json.loads(blocks[f"text-{place}"])
        assert text["words"]["response"] == list(rows["response"])
        assert chunk["scores"]["reward"] == rows["reward"].tolist()
        assert [text["groups"][one] for one in chunk["group"]] == list(rows["prompt_id"])
        assert [chunk] == list(Responses(folder).indices(chunk["step"])), "the index alone is the same"
        assert [text["given"]["prompt"][one] for one in chunk["group"]] == list(rows["prompt"])
        header, ids, values = tokens_of(blocks[f"tokens-{place}"])
        assert ids.tolist() == rows["response_ids"].values.tolist()
        assert values["rollout_logprobs"] == pytest.approx(rows["rollout_logprobs"].values, rel=1e-3)
        assert values["loss_mask"].tolist() == rows["loss_mask"].values.tolist()
        assert header["words"]["256"] is None and base64.b64decode(header["words"]["105"]) == b"i"


def test_a_missing_tokenizer_is_said_once(folder: RunDir, page: str) -> None:
    assert run_html(folder).count("--tokenizer FOLDER") == 1 and "--tokenizer" not in page


def test_what_needs_the_script_is_said_to_who_has_none(page: str) -> None:
    (words,) = re.findall(r"<noscript>(.*?)</noscript>", page)
    assert "Advantages" in words and "need JavaScript" in words


def test_samples_are_there_without_a_script(page: str) -> None:
    texts = "".join(text for _, text in read(page).texts)
    assert "what is 5+1?" in texts and "seven" in texts


def test_each_response_is_there_once_from_the_node_that_knows_most(tmp_path: Path) -> None:
    folder = plain_run(tmp_path, steps=1)
    rows = folder.edge(0, "group_norm")
    writer = RunDir.create(tmp_path, "two")
    writer.write_edge(0, "rollout", rows.select([n for n in rows.names if n not in ("reward", "advantage")]))
    writer.write_edge(0, "kept", rows.take(np.array([0, 1])))
    writer.finish()
    chunks = list(Responses(writer).chunks(0))
    assert [(chunk.index["node"], len(chunk.index["group"])) for chunk in chunks] == [("kept", 2), ("rollout", 6)]


def test_without_records_the_samples_are_what_there_is(tmp_path: Path) -> None:
    folder = RunDir.create(tmp_path, "bare")
    folder.write_metrics(0, {"reward/mean": 0.5})
    folder.write_samples(0, [{"prompt_id": "a", "prompt": "x", "response": "y", "reward": 1.0}])
    folder.finish()
    page = run_html(folder)
    blocks = blocks_of(page)
    assert sorted(blocks) == ["index", "text-0"]
    assert json.loads(blocks["text-0"])["words"]["response"] == ["y"]
    assert "record=" in page and "without tokens" in page


def test_a_run_that_has_only_begun_can_be_drawn(tmp_path: Path) -> None:
    page = run_html(RunDir.create(tmp_path, "new"))
    assert "No step has ended yet" in page and "running" in page
    read(page)


def test_what_has_no_room_is_left_out_by_steps_and_said(tmp_path: Path) -> None:
    folder = plain_run(tmp_path, steps=40)
    found = Responses(folder, as_bytes)
    whole = hold(found, 10**9)
    size = sum(map(len, whole.blocks.values()))
    assert len(whole.steps) == whole.steps_with_tokens == 40
    some = hold(found, size // 4)
    assert sum(map(len, some.blocks.values())) <= size // 4
    assert 0 in some.steps and 39 in some.steps and 4 < len(some.steps) < 40
    assert max(np.diff(some.steps)) <= 2 * (40 // len(some.steps) + 1), "spread over the run"
    assert some.steps_with_tokens < len(some.steps), "texts come first"
    page = run_html(folder, most_bytes=size // 4)
    assert "40 steps were recorded" in page and "--serve shows all" in page


def test_any_beginning_of_the_order_is_spread() -> None:
    assert list(spread_order(0)) == [] and list(spread_order(1)) == [0]
    for count in (2, 9, 100):
        assert sorted(spread_order(count)) == list(range(count))
    assert list(spread_order(9))[:5] == [8, 0, 4, 2, 6]


def test_mismatch_of_sampler_and_trainer_is_counted_over_trained_tokens(folder: RunDir) -> None:
    rows = folder.edge(2, "group_norm")
    mask = rows["loss_mask"].values
    apart = (rows["rollout_logprobs"].values - rows["old_logprobs"].values)[mask]
    found = Responses(folder).mismatch(2)
    assert found["recorded/mismatch_mean_abs"] == pytest.approx(np.abs(apart).mean(), rel=1e-5)
    assert found["recorded/mismatch_mean"] == pytest.approx(apart.mean(), abs=1e-6)
    assert any(chart.title == "Sampler against trainer" for chart in charts([{"step": 2, **found}]))


def test_hostile_texts_stay_text(tmp_path: Path) -> None:
    folder = hostile_run(tmp_path)
    page = run_html(folder, pieces=as_bytes)
    found = read(page)
    assert "img" not in {tag for tag, _ in found.tags}
    assert [tag for tag, _ in found.tags].count("script") == 3 + len(blocks_of(page))
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    assert "\x00" not in page and "\u202e" not in page
    shown = "".join(text for tag, text in found.texts if tag not in ("script", "style"))
    assert clean(SCRIPT) in shown, "and it is shown as it is"
    blocks = blocks_of(page)
    texts = [json.loads(block) for name, block in blocks.items() if name.startswith("text-")]
    assert set(HOSTILE) <= {one for text in texts for one in text["words"]["response"]}, "unpacked as it was recorded"
    page.encode("utf-8")


def test_long_and_broken_responses_keep_every_token(tmp_path: Path) -> None:
    blocks = blocks_of(run_html(hostile_run(tmp_path), pieces=as_bytes))
    index = json.loads(blocks["index"])
    found = {}
    for place, chunk in enumerate(index):
        header, ids, _ = tokens_of(blocks[f"tokens-{place}"])
        starts = np.cumsum([0, *header["lengths"]])
        for row, length in enumerate(header["lengths"]):
            found[chunk["step"], place, row] = ids[starts[row] : starts[row] + length].tolist()
    assert [*BROKEN_BYTES, 256] in found.values()
    assert max(map(len, found.values())) == LONG_TOKENS + 1


# ---------------------------------------------------------------------------------------------------------------- plan


def planned_run(root: Path, steps: int = 3) -> RunDir:
    plan = plan_of(rloo, [compute(name, 0.25) for name in calls(rloo.graph())])
    done = fr.run_local(rloo, plan=plan, steps=steps, engine="null", prompts=[{"prompt": "1+1=", "answer": "2"}], policy="null",
                        out=str(root), progress="off")  # fmt: skip
    assert done.path is not None
    return RunDir.open(done.path)


def test_a_run_with_a_plan_shows_both(tmp_path: Path) -> None:
    folder = planned_run(tmp_path)
    page = run_html(folder)
    found = read(page)
    assert {"timeline", "measured", "time", "flow"} <= {attributes.get("id") for _, attributes in found.tags}
    spans = [attributes for _, attributes in found.tags if attributes.get("class") == "span"]
    said = {step.name: step for step in compare_run(folder.path).ran}
    assert len(spans) == len(said)
    starts = sorted(float(one["data-s"] or "nan") for one in spans)
    assert starts == pytest.approx(sorted(step.start_s or 0.0 for step in said.values())), "where the run began them"
    assert starts[-1] > starts[0], "and not all at once"
    text = "".join(words for _, words in found.texts)
    assert "Largest error: " in text and "predicted" in text
    assert page.count('class="residual"') == len(said)


def test_one_step_is_nothing_to_compare(tmp_path: Path) -> None:
    page = run_html(planned_run(tmp_path, steps=1))
    assert "the first step warms up" in page and 'id="measured"' not in page


def test_a_plan_that_cannot_be_read_hides_nothing_else(tmp_path: Path) -> None:
    folder = planned_run(tmp_path)
    (folder.path / "plan.json").write_text("{}")
    page = run_html(folder)
    assert "plan.json cannot be drawn" in page and "Where the time went" in page and "reward/mean" in page
    read(page)


def ranks_run(root: Path, ranks: int, steps: int = 4) -> RunDir:
    """Each process of a run tells of the same nodes and rows; the last one takes longest."""
    folder = RunDir.create(root, "ranks")
    folder.write_info({"flow": "grpo", "engine": "torch", "ranks": ranks, "steps": steps})

    def took_s(step: int, rank: int) -> float:
        return 2.0 + rank + 5.0 * (step == 0)

    events = [
        Event("compute", "update", step, 10.0 * step, 10.0 * step + took_s(step, rank), 256, attributes={"rank": rank})
        for step in range(steps)
        for rank in range(ranks)
    ]
    with TraceWriter(folder.path / "trace.jsonl") as writer:
        for event in events:
            writer.add(event)
    folder.finish()
    return folder


@pytest.mark.parametrize(("ranks", "took"), [(1, "2.0 s"), (4, "5.0 s")])
def test_processes_that_work_at_the_same_time_are_not_added_up(tmp_path: Path, ranks: int, took: str) -> None:
    section = run_html(ranks_run(tmp_path, ranks)).partition('id="time"')[2].partition("</section>")[0]
    cells = re.findall(r'<th scope="row">update</th><td class="num">([^<]*)</td><td class="num">([^<]*)<', section)
    assert cells == [(took, "256")]
    assert "3 steps, the first of the run left out" in section
    assert ("4 processes work at the same time" in section) is (ranks == 4)


@pytest.mark.parametrize("ranks", [1, 3])
def test_step_times_say_which_they_are(tmp_path: Path, ranks: int) -> None:
    folder = planned_run(tmp_path)
    seen, path = list(read_trace(folder.path / "trace.jsonl")), folder.path / "trace.jsonl"
    path.unlink()
    with TraceWriter(path) as writer:
        for event in seen:
            for rank in range(ranks):  # one process is in the rollout still while another is in the update
                long = 9.0 if (rank, event.node) in ((0, "rollout"), (1, "update")) else 0.0
                writer.add(replace(event, end_s=event.end_s + long, attributes={**event.attributes, "rank": rank}))
    said = compare_run(folder.path)
    words = " ".join(text for _, text in read(run_html(folder)).texts)
    assert "median of 2, the first step left out" in words and "mean of all 3 steps, with the first" in words
    assert said.processes == ranks and (ranks == 1 or said.overlapped_s > 8)
    assert ("steps overlap" in words) is (ranks > 1)
    assert ("more than the iteration" in words) is (ranks > 1)
    assert ("Outside of the plan's steps" in words) is not ("more than the iteration" in words)


@pytest.mark.parametrize(
    ("steps", "said"),
    [(1, "of the one step"), (4, "mean of all 4 steps"), (12, "mean of the last 10 steps; of the first 10: 0.045")],
)
def test_a_figure_says_of_which_steps_it_is_the_mean(tmp_path: Path, steps: int, said: str) -> None:
    folder = RunDir.create(tmp_path, "means")
    for step in range(steps):
        folder.write_metrics(step, {"reward/mean": 0.01 * step, "response_length/mean": 1.0})
    folder.finish()
    page = run_html(folder).partition("<nav")[0]
    assert said in page and "1 tokens" not in page and "1 token" in page
    assert ("of the first" in page) is (steps > 10)


def test_heads_stand_over_their_numbers() -> None:
    cells = element("td", "<td>", class_="num", data_k=1), element("td", "x")
    row = element("tr", element("th", "a", scope="row"), *cells)
    heads = re.findall(r"<th([^>]*)>(\w*)<", table(("name", "number", "words"), [row]).partition("<tbody")[0])
    assert [name for attributes, name in heads if 'class="num"' in attributes] == ["number"]
    assert "<th" in table(("name",), []), "a table without rows has its head"


# -------------------------------------------------------------------------------------------------------------- curves


def test_metrics_find_their_charts() -> None:
    names = {
        "reward/mean": "Reward", "reward/exact/mean": "Reward", "rollout_2.reward/mean": "Reward", "update/kl": "KL",
        "update/approx_kl": "KL", "update_2/entropy": "Entropy", "update/clip_fraction": "Clip fraction",
        "response_length/max": "Response length", "finish_reason/stop": "How responses ended", "update/lr": "Learning rate",
        "update/grad_norm": "Gradient norm", "tokens_per_s": "Throughput", "time/rollout_s": "Time of a step",
        "staleness/mean": "Staleness", "update/ratio": "Ratio", "log/whatever": "log/whatever",
    }  # fmt: skip
    found = {
        line.name: chart.title for chart in charts([{"step": 0, **dict.fromkeys(names, 1.0)}]) for line in chart.lines
    }
    assert found == names


def test_what_is_not_finite_is_no_point() -> None:
    rows = [
        {"step": 0, "x": float("nan")},
        {"step": 1, "x": 2.0},
        {"step": 2, "x": float("inf")},
        {"step": 3, "x": "no"},
    ]
    ((line,),) = [chart.lines for chart in charts(rows)]
    assert line.points == ((1, 2.0),)


@pytest.mark.parametrize(
    "values",
    [(-0.85, 0.85), (0.0, 0.99), (0.0002, 0.00031), (-1e-8, 2e-9), (0.9, 1.1), (-3e-4, 2e-4), (0.0, 7.9e6), (5.0, 5.0)],
)
def test_an_axis_has_two_ticks_that_are_read_whole(values: tuple[float, float]) -> None:
    drawing = gallery([Chart("x", "", (Line("x", ((0, values[0]), (1, values[1]))),))])
    ticks = re.findall(
        r'<text class="tick" text-anchor="end"[^>]*>([^<]*)<|<text[^>]*text-anchor="end"[^>]*>([^<]*)<', drawing
    )
    words = [one or other for one, other in ticks]
    assert 2 <= len(words) <= 6 and not any("…" in one for one in words), words
    assert len(set(words)) == len(words)


def test_a_band_ends_where_the_values_do() -> None:
    rows = [{"step": n, "reward/mean": 0.1, "reward/std": 0.3, "reward/min": 0.0, "reward/max": 1.0} for n in range(2)]
    (chart,) = [one for one in charts(rows) if one.title == "Reward"]
    assert chart.lines[0].band()[0] == (0.0, pytest.approx(0.4))
    bare = [{"step": 0, "reward/mean": 0.1, "reward/std": 0.3}]
    assert charts(bare)[0].lines[0].band()[0] == (pytest.approx(-0.2), pytest.approx(0.4)), (
        "nobody says what the least was"
    )


def test_thinned_lines_keep_their_spikes() -> None:
    points = [(step, 0.0) for step in range(10_000)]
    points[5_000] = (5_000, 9.0)
    points[7_777] = (7_777, -9.0)
    kept = thinned(points, 100)
    assert len(kept) < 210 and {(5_000, 9.0), (7_777, -9.0), points[0], points[-1]} <= set(kept)
    assert list(kept) == sorted(kept)


def test_smoothing_is_the_mean_of_neighbours() -> None:
    noisy = [(step, step + (-1.0) ** step) for step in range(100)]
    assert smoothed(noisy[: SMOOTHED_FROM - 1]) == (), "too short"
    assert smoothed([(step, 1e-6 * min(step, 20)) for step in range(100)]) == (), "a schedule"
    line = smoothed(noisy)
    assert line[50] == (50, pytest.approx(50.0, abs=0.3))
    assert [step for step, _ in line] == list(range(100))


# ------------------------------------------------------------------------------------------------------------- compare


def test_runs_over_each_other(tmp_path: Path) -> None:
    one, other = plain_run(tmp_path, name="one"), plain_run(tmp_path, name="other", seed=7, shift=0.5)
    page = compare_html([one, other])
    read(page)
    assert "one-1" in page and "other-1" in page
    data = json.loads(re.findall(r'id="chart-data">(.*?)</script>', page)[0])
    assert [line[0] for line in data["0"]["lines"]] == ["one-1", "other-1"]
    settings = page.split('id="settings"')[1]
    assert '<th scope="row">seed</th>' in settings and "options.batch" not in settings, "only what differs"
    means = page.split('id="last"')[1]
    assert "(+0.5)" in means


def test_what_cannot_be_compared_is_refused(folder: RunDir) -> None:
    with pytest.raises(ConfigError, match="at least two"):
        compare_html([folder])
    with pytest.raises(ConfigError, match="twice"):
        compare_html([folder, folder])


def test_a_metric_that_one_run_lacks_has_one_line() -> None:
    (chart,) = compared({"a": [{"step": 0, "x": 1.0}], "b": [{"step": 0}]})
    assert [line.label for line in chart.lines] == ["a"]


def test_the_script_is_small_and_takes_text_as_text() -> None:
    script = asset("run.js")
    assert len(script.encode()) < 60_000
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert word not in script
