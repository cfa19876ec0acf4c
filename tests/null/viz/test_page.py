"""The page: hostile texts stay text, everything agrees, it is small, and it can be read without a script."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

import flowrl as fr
import flowrl.viz
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster, Layout, Mesh
from flowrl.planner.measured import Comparison, compare
from flowrl.planner.steps import Plan
from flowrl.planner.tasks import Hold, Lane, StepKind
from flowrl.planner.views import VIEWS, view
from flowrl.trace import Event
from flowrl.viz.dataflow import Dataflow, Point
from flowrl.viz.flowchart import flowchart
from flowrl.viz.frame import POLICY, asset
from flowrl.viz.html import notebook_html, plan_html
from flowrl.viz.measured import Seen, seen
from flowrl.viz.single import PICTURES
from flowrl.viz.svg import clean
from flowrl.viz.why import looked_at
from flowrl.viz.words import layout_words, offload_words
from tests.null.viz.cases import GIB, HOSTILE, compute, hostile as hostile_plan, large, move

MOST_BYTES = 400_000
MOST_SCRIPT_BYTES = 60_000
SECTIONS = ("timeline", "devices", "memory", "dataflow", "why", "steps")
VOID = {"meta", "br", "input", "link", "img", "path"}


class Reader(HTMLParser):
    """Tags with attributes, text by the tag it stands in, and whether every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> ends something else"

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open
    return reader


def data_of(page: str) -> str:
    found = re.search(r'<script type="application/json" id="plan">(.*?)</script>', page, re.DOTALL)
    assert found
    return found[1]


@pytest.fixture(scope="module")
def page() -> str:
    return plan_html(large())


def test_every_view_is_there(page: str) -> None:
    ids = {attributes.get("id") for _, attributes in read(page).tags}
    assert ids >= {*SECTIONS, "gantt", "map", "mem-devices-0", "mem-hosts-0", "flow", "pareto", "plan"}


def test_pictures_are_well_formed_and_described(page: str) -> None:
    drawings = re.findall(r"<svg[^>]*role=\"img\".*?</svg>", page, re.DOTALL)
    assert len(drawings) >= 7
    for drawing in drawings:
        root = ElementTree.fromstring(drawing)
        space = "{http://www.w3.org/2000/svg}"
        assert root.findtext(f"{space}title") and root.findtext(f"{space}desc")
        assert not re.search(r"\b(nan|inf)\b", drawing)


def test_ids_are_unlike_each_other(page: str) -> None:
    ids = [attributes["id"] for _, attributes in read(page).tags if "id" in attributes]
    assert len(ids) == len(set(ids))


def test_the_policy_forbids_everything_from_outside(page: str) -> None:
    tags = read(page).tags
    assert ("meta", {"http-equiv": "Content-Security-Policy", "content": POLICY}) in tags
    for tag, attributes in tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "image", "use", "foreignobject")
        assert not {"src", "srcset", "data", "action", "xlink:href"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "#").startswith("#")
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "@import" not in page and not re.search(r"url\((?!#)", page)


def test_it_is_small(page: str) -> None:
    assert len(page.encode()) < MOST_BYTES
    assert len(asset("page.js").encode()) < MOST_SCRIPT_BYTES
    assert len(plan_html(large(max_staleness=2), measured=[Seen("rollout", 50.0)]).encode()) < MOST_BYTES


def test_hostile_texts_stay_text() -> None:
    plan = hostile_plan()
    page = plan_html(plan, measured=[Seen(HOSTILE, 2.0)])
    found = read(page)
    assert [tag for tag, _ in found.tags].count("script") == 2
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)
    assert "img" not in {tag for tag, _ in found.tags}
    inside = [text for tag, text in found.texts if tag not in ("script", "style") and "alert(1)" in text]
    assert any(clean(HOSTILE) in text for text in inside), "the name is shown as it is"
    assert "\x00" not in page and "\u202e" not in page
    assert Plan.from_json(data_of(page)) == plan


@pytest.mark.parametrize("name", sorted(set(VIEWS) - {"text"}))
def test_hostile_names_end_no_string(name: str) -> None:
    text = view(name, hostile_plan())
    if name == "trace":
        json.loads(text)
    elif name == "dot":
        assert all(re.fullmatch(r'(?:[^"\\]|"(?:[^"\\]|\\.)*")*', line) for line in text.splitlines())
    elif name == "mermaid":
        assert "<script" not in text and "<img" not in text
    elif name == "notebook":
        assert text.count("<") == 2 and text.startswith("<iframe") and text.endswith("</iframe>")


def test_plan_page_and_trace_agree(page: str) -> None:
    plan = large()
    facts = read(page).tags[0][1]
    written = json.loads(data_of(page))["predicted"]
    trace = json.loads(plan.to_trace())
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    peaks = [e["args"]["peak"] for e in trace["traceEvents"] if e["ph"] == "C" and e["name"].startswith("peak of dev")]
    for makespan_s in (
        float(facts["data-makespan-s"] or 0),
        written["latency_s"],
        trace["otherData"]["makespan_s"],
        max(event["ts"] + event["dur"] for event in slices) / 1e6,
    ):
        assert makespan_s == pytest.approx(plan.predicted.latency_s, abs=1e-9)
    for device_bytes in (
        int(facts["data-device-bytes"] or 0),
        written["device_bytes"],
        trace["otherData"]["device_bytes"],
        max(peaks),
    ):
        assert device_bytes == plan.predicted.device_bytes
    for host_bytes in (int(facts["data-host-bytes"] or 0), written["host_bytes"], trace["otherData"]["host_bytes"]):
        assert host_bytes == plan.predicted.host_bytes


def test_figures_answer_where_memory_is_and_what_moves() -> None:
    said = read(plan_html(large())).texts
    notes = [text for _, text in said if "predicted peak of devices" in text or "all steps move" in text]
    assert "predicted peak of devices 0–31, during rollout; largest part: KV cache with 42.0 GiB" in notes
    assert (
        "onload from the host, predicted, over all devices, in 1.6 s, and as many by policy.offload; all steps move 1008.1 GiB, "
        "without what models gather and reduce inside a step" in notes
    )
    assert any("Moved is without what models gather and reduce inside a step." in text for _, text in said)
    streamed = compute("update", Mesh(0, 2), 1.0, role="policy")
    streamed = replace(streamed, lanes=(Lane.COMPUTE, Lane.H2D))
    moved = move("rows", "update", StepKind.ONLOAD, Lane.H2D, Mesh(0, 2), 0.5, 2**20)
    page = plan_html(Plan.of("streams", "ab12", Cluster.named("2xA100-80G"), [moved, streamed]))
    assert "all steps move 1.0 MiB, without what update streams while it computes" in page
    assert "gather and reduce" not in page, "no step has a layout"


def test_slots_that_wait_and_a_tie_are_said_as_on_the_command_line() -> None:
    plan = large()
    rollout = next(step for step in plan.steps if step.name == "rollout")
    waiting = replace(rollout, predicted=replace(rollout.predicted, slot_utilization=0.28))
    steps = [waiting if step is rollout else step for step in plan.steps]
    assert plan.searched is not None
    faster = replace(plan.searched.alternatives[0], seconds=plan.predicted.seconds * 0.99)
    why = "a tie: gen:d8t4 is predicted 1.0% faster, less than the model can tell apart (2.0%); this plan is simpler"
    searched = replace(plan.searched, alternatives=(faster,), tie=0.02, why_simpler=why)
    page = plan_html(replace(plan, steps=tuple(steps), searched=searched))
    assert "slots at work" in page and "the longest responses decide; a lower cap or Async helps" in page
    assert "A tie: gen:d8t4 is predicted 1.0% faster" in page
    assert "slots at work" not in plan_html(plan) and "A tie:" not in plan_html(plan)


def test_the_search_is_not_counted_by_what_is_shown() -> None:
    plan = large()
    assert plan.searched is not None
    few = replace(plan.searched, placements=2, simulated=1, unfit=1)
    said = looked_at(replace(plan, searched=few))
    assert "2 splits of the devices into meshes, 1 plan simulated" in said and "1 split where nothing fits" in said
    assert "shown beside the chosen plan was looked for afterwards" in said
    assert "afterwards" not in looked_at(replace(plan, searched=replace(few, alternatives=())))


def test_the_largest_part_at_the_peak_has_a_name_in_the_picture(page: str) -> None:
    said = [text for _, text in read(page).texts if text.startswith("peak ") and "of 80.0 GiB" in text]
    assert said[0].endswith("during rollout; largest: KV cache, 42.0 GiB")
    only = compute("update", Mesh(0, 1), 1.0, role="policy", holds=(Hold("policy activations", GIB),))
    assert "largest: " not in plan_html(Plan.of("only", "ab12", Cluster.named("1xA100-80G"), [only])), (
        "there is one part"
    )


def test_letters_of_layouts_and_kinds_of_offload_are_explained() -> None:
    plan = large()
    page = plan_html(plan)
    for words in (
        "In layouts dN is N copies, fN is N shards",
        "tN is N parts of each matrix",
        "pN is N stages of layers",
    ):
        assert words in page
    assert "@div" not in page and "Offload:" not in page, "this plan has neither"
    assert plan.searched is not None
    other = replace(
        plan.searched.alternatives[0], placement="(f9:f8 + gen:t4d2@div)", why="'policy' offload none -> sopt"
    )
    step = compute("update", Mesh(0, 2), 1.0, role="f4", layout=Layout.parse("f2"))
    step = replace(step, settings=(*step.settings, ("offload", "park")))
    searched = replace(plan.searched, alternatives=(other,))
    little = Plan.of("little", "ab12", Cluster.named("2xA100-80G"), [step], searched=searched)
    assert "@div: parts of a matrix" in plan_html(little)
    assert "park: what is not in use" in offload_words(little) and "; sopt: optimizer state" in offload_words(little)
    assert "all:" not in offload_words(little)
    alone = replace(little, searched=None)
    assert layout_words(alone).startswith("In layouts fN is N shards") and "dN" not in layout_words(alone)
    assert layout_words(Plan.of("none", "ab12", Cluster.named("1xA100-80G"), [])) == ""


def test_plans_in_one_place_of_the_picture_are_named_together() -> None:
    plan = large()
    assert plan.searched is not None
    first, second, *rest = plan.searched.alternatives
    twin = replace(second, seconds=first.seconds * 1.0001, device_bytes=first.device_bytes)
    searched = replace(plan.searched, alternatives=(first, twin, *rest))
    drawn = ElementTree.fromstring(replace(plan, searched=searched).to_svg(picture="pareto"))
    space = "{http://www.w3.org/2000/svg}"
    rivals = [one for one in drawn.iter() if one.get("class") == "rival"]
    names = [one.text or "" for one in drawn.iter() if one.get("class") == "dotname"]
    assert len(rivals) == len(searched.alternatives) + 1
    assert "1, 2" in names and not any(name.startswith(("1:", "2:")) for name in names)
    for one in rivals[1:3]:
        tip = one.findtext(f"{space}title") or ""
        assert "1: " in tip and "2: " in tip, "of two marks only the upper one is pointed at"
    for one in rivals:
        labels = [child for child in one if child.get("class") == "dotname"]
        assert len(labels) == len([child for child in one if child.get("class") == "plate"]), (
            "no line goes through a name"
        )


def test_predicted_is_said_where_numbers_are(page: str) -> None:
    main = page[page.index("<main") :]
    for section in re.findall(r"<section.*?</section>", main, re.DOTALL):
        assert "redicted" in section


def test_the_same_plan_gives_the_same_page(page: str) -> None:
    assert plan_html(large()) == page


# --------------------------------------------------------------------------------------------------------- measured


def test_measured_is_shown_beside_predicted() -> None:
    plan = large()
    page = plan_html(plan, measured=[Seen("rollout", 48.2 * 1.31), Seen("update_policy", 31.4)])
    assert "rollout took 14.9 s longer than predicted (+31 %): 63.1 s measured, 48.2 s predicted" in page
    assert "16 of 18 steps were not measured" in page
    assert page.count('class="measured"') == 2
    assert 'id="measured"' not in plan_html(plan)


def ran(plan: Plan, attribute: str = "device_bytes") -> Comparison:
    """Two iterations of the first step alone; the first does not count."""
    what = {"plan_step": "rollout", attribute: 20}
    return compare(
        plan, [Event("compute", "rollout", step, 100.0 * step, 100.0 * step + 50.0, attributes=what) for step in (0, 1)]
    )


def test_a_comparison_of_a_run_is_read() -> None:
    plan = large()
    assert seen(plan, ran(plan)) == (Seen("rollout", 50.0, 0.0, 20),)
    assert seen(plan, ran(plan, "process_bytes")) == (Seen("rollout", 50.0, 0.0),), (
        "the memory of a process is not that of a device"
    )
    page = plan_html(plan, measured=ran(plan))
    assert "step time, measured" in page and "median of 1 iterations" not in page
    with pytest.raises(ConfigError, match="draw the plan that ran"):
        seen(plan, ran(large(max_staleness=1)))


def test_a_comparison_says_by_how_much_each_term_is_off() -> None:
    plan = large()
    what = {"plan_step": "rollout", "kind": "rollout"}
    took_s = 2 * 48.2
    events = [
        Event("compute", "rollout", step, 100.0 * step, 100.0 * step + took_s, attributes=what) for step in (0, 1)
    ]
    section = plan_html(plan, measured=compare(plan, events)).partition('id="measured"')[2].partition("</section>")[0]
    assert "+100 % (2.00 of what was predicted)" in section
    cells = re.findall(r">(efficiency\.decode_hbm)</th><td[^>]*>([\d.]+)</td><td[^>]*>([\d.]+)<", section)
    assert cells == [("efficiency.decode_hbm", "0.7", "0.35")]
    assert "train" not in section.partition("What no term stands for")[0], "it was not measured"
    assert "of what was predicted" not in plan_html(plan, measured=[Seen("rollout", took_s)]), (
        "nobody says what kind it is"
    )


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ([Seen("rolout", 1.0)], "did you mean 'rollout'"),
        ([Seen("rollout", 1.0), Seen("rollout", 2.0)], "measured twice"),
        ([object()], "needs the step's name and its seconds"),
    ],
)
def test_measurements_of_something_else_are_refused(measured: list[object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        seen(large(), measured)


# ------------------------------------------------------------------------------------------------- other forms, views


def test_trace_has_predicted_and_measured_processes_and_flows() -> None:
    trace = json.loads(large().to_trace(measured=[Seen("rollout", 50.0)]))["traceEvents"]
    names = {event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert {"predicted: node 0", "measured: node 0", "predicted: node 7"} <= names
    assert {event["ph"] for event in trace} == {"M", "X", "C", "s", "f"}
    starts = {event["id"]: event for event in trace if event["ph"] == "s"}
    ends = {event["id"]: event for event in trace if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert all(starts[number]["ts"] <= ends[number]["ts"] + 1e-3 for number in starts)
    assert any(event["args"]["bytes"] == 96 * 2**20 for event in starts.values())
    known = {(event["pid"], event["tid"]) for event in trace if event["name"] == "thread_name"}
    assert {(event["pid"], event["tid"]) for event in trace if event["ph"] in "Xsf"} <= known
    assert sum(event["ph"] == "X" and event["pid"] > 1000 for event in trace) == 32, "one for each device of the step"


def small() -> Plan:
    mesh = Mesh(0, 2)
    cache = (Hold("KV cache", GIB),)
    steps = (
        compute("rollout", mesh, 2.0, role="gen", holds=cache),
        move("rows", "update", StepKind.TRANSFER, Lane.NVLINK, Mesh(2, 1), 0.5, 2**20, "rollout", source=mesh),
        compute("update", Mesh(2, 1), 1.5, "rows", role="policy"),
    )
    return Plan.of("small", "ab12", Cluster.named("4xA100-80G"), steps, meshes=(("A", mesh), ("B", Mesh(2, 1))))


def test_a_small_plan_as_mermaid() -> None:
    assert small().to_mermaid() == (
        """flowchart LR
    subgraph m0["A: devices 0#8211;1"]
        n0["rollout<br/>2.0 s predicted"]
    end
    subgraph m1["B: device 2"]
        n1["update<br/>1.5 s predicted"]
    end
    n0 -- "1.0 MiB #183; 500.0 ms" --> n1
    classDef h0 fill:#a9cdf3,stroke:#1b5c99,color:#111
    class n0 h0
    classDef h1 fill:#f8c987,stroke:#8f5200,color:#111
    class n1 h1
"""
    )


def test_a_small_plan_as_a_trace() -> None:
    events = json.loads(small().to_trace(measured=[Seen("update", 1.8)]))["traceEvents"]
    timed = [event for event in events if "ts" in event and event["ph"] != "C"]
    shown = [(e["ph"], e["name"], e["pid"], e["tid"], e["ts"], e.get("dur"), e["args"].get("bytes")) for e in timed]
    assert shown == [
        ("X", "rollout", 1, 1, 0.0, 2e6, 0),
        ("X", "rollout", 1, 11, 0.0, 2e6, 0),
        ("X", "rows", 1, 2, 2e6, 5e5, 2**20),
        ("X", "rows", 1, 12, 2e6, 5e5, 2**20),
        ("X", "rows", 1, 22, 2e6, 5e5, 2**20),
        ("X", "update", 1, 21, 2.5e6, 1.5e6, 0),
        ("s", "waits for", 1, 1, 2e6 - 1e-3, None, 2**20),
        ("f", "waits for", 1, 2, 2e6, None, 2**20),
        ("s", "waits for", 1, 2, 2.5e6 - 1e-3, None, 2**20),
        ("f", "waits for", 1, 21, 2.5e6, None, 2**20),
        ("X", "update", 1001, 21, 2.5e6, 1.8e6, None),
    ]
    counters = [(e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert counters[:3] == [
        ("memory of devices 0–1, predicted bytes", 0.0, {"KV cache": GIB}),
        ("memory of devices 0–1, predicted bytes", 2e6, {"KV cache": 0}),
        ("peak of devices 0–1, predicted bytes", 0.0, {"peak": GIB}),
    ]


def test_nodes_that_look_the_same_share_a_row_in_a_large_cluster() -> None:
    one = compute("update", Mesh(0, 512), 1.0, role="policy", layout=Layout.parse("f512"))
    page = plan_html(Plan.of("wide", "ab12", Cluster.named("1024xH100-80G"), [one]))
    assert page.count('class="device"') == 16
    assert ">0–63<" in page and ">64–127<" in page
    assert len(page.encode()) < MOST_BYTES


def test_measured_memory_is_a_line_on_the_devices_that_held_it() -> None:
    page = plan_html(large(), measured=[Seen("update_policy", 31.0, None, 45 * GIB)])
    assert page.count('class="held"') == 1
    assert "update_policy: measured 45.0 GiB on a device, 41.4 GiB predicted" in page


def test_too_much_memory_is_said() -> None:
    full = compute("update", Mesh(0, 1), 1.0, role="policy", holds=(Hold("policy activations", 90 * GIB),))
    page = plan_html(Plan.of("full", "ab12", Cluster.named("1xA100-80G"), [full]))
    assert "peak 90.0 GiB of 80.0 GiB (predicted), 10.0 GiB too much, all the time" in page
    assert 'class="meter over"' in page and 'class="gauge-over"' in page


@pytest.mark.parametrize("picture", sorted(PICTURES))
def test_a_picture_alone_is_a_document(picture: str) -> None:
    plan = large(max_staleness=1)
    text = plan.to_svg(picture=picture)
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg") and "redicted" in (root.findtext("{http://www.w3.org/2000/svg}title") or "")
    used = set(re.findall(r"url\(#([\w-]+)\)", text))
    assert used <= set(re.findall(r'id="([\w-]+)"', text)), "it refers to nothing outside of itself"


def test_a_picture_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match="did you mean 'timeline'"):
        large().to_svg(picture="timelin")
    with pytest.raises(ConfigError, match="nothing to show as 'pareto'"):
        small().to_svg(picture="pareto")


def test_a_plan_without_steps_is_a_page_too() -> None:
    empty = Plan.of("empty", "ab12", Cluster.named("1xA100-80G"), [])
    for name in sorted(VIEWS):
        assert view(name, empty)


def test_the_day_of_the_calibration_is_said() -> None:
    cluster = replace(
        Cluster.named("64xH100-80G"), calibrated_at="2026-01-31T10:00:00", notes=("the network was not measured",)
    )
    page = plan_html(replace(large(), cluster=cluster))
    assert "measured 2026-01-31" in page and "the network was not measured" in page
    assert 'data-since="2026-01-31"' in page
    assert 'data-since="' not in plan_html(large())


def test_dot_and_mermaid_have_all_nodes_meshes_and_moves() -> None:
    for text in (large().to_dot(), large().to_mermaid()):
        for name in ("rollout", "update_policy", "96.0 MiB", "112.0 GiB"):
            assert name in text
    assert large().to_dot().count("subgraph cluster_") == large().to_mermaid().count("subgraph m") == 4


@pytest.mark.parametrize("width", [20, 60, 100, 160])
def test_text_fits_a_terminal(width: int) -> None:
    text = large().to_text(width=width, measured=[Seen("rollout", 60.0)])
    assert max(map(len, text.splitlines())) <= max(60, width)
    assert "predicted" in text and "51.1 GiB of 80.0 GiB" in text


def test_text_shows_times_in_proportion() -> None:
    rows = [line for line in large().to_text(width=120).splitlines() if line.startswith("  compute ")]
    first, second = (row[18:] for row in rows)
    assert first.count("A") / 102 == pytest.approx(48.2 / large().predicted.latency_s, abs=0.02)
    assert second.startswith("·" * 30) and "·" in first


def test_a_view_that_nobody_draws_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.planner.views.VIEWS", {})
    with pytest.raises(ConfigError, match=r"import flowrl\.viz"):
        large().to_html()


def test_files_are_written(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plan = large()
    for name in ("to_html", "to_dot", "to_mermaid", "to_trace"):
        text = getattr(plan, name)(tmp_path / name)
        assert (tmp_path / name).read_text(encoding="utf-8") == text
    assert plan._repr_html_() == notebook_html(plan)


# --------------------------------------------------------------------------------------------------- with the flow


SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
    "tie_word_embeddings": True, "max_position_embeddings": 32768,
}  # fmt: skip


@fr.operator(writes={"reward": fr.SAMPLE.f32, "unread": fr.SAMPLE.f32})
def score(response: fr.SAMPLE.str):  # type: ignore[valid-type, no-untyped-def]
    return {"reward": [1.0] * len(response), "unread": [1.0] * len(response)}


@fr.flow
def tiny(prompts, policy, ref):  # type: ignore[no-untyped-def]
    rows = score(fr.rollout(policy, prompts, n=4))
    rows = fr.logprobs(ref, rows, out="ref_logprobs")
    return fr.update(policy, rows, loss=plain())


@fr.loss
def plain(logprobs: fr.TOKEN.f32, reward: fr.SAMPLE.f32):  # type: ignore[valid-type, no-untyped-def]
    return -logprobs * reward


@pytest.fixture(scope="module")
def planned() -> Plan:
    return fr.plan(
        tiny,
        models={"policy": SHAPE, "ref": SHAPE},
        cluster="2xA100-80G",
        workload=fr.Workload(16, fr.Lengths.fixed(128), fr.Lengths.fixed(256)),
    )


def test_what_was_pruned_is_shown_as_pruned(planned: Plan) -> None:
    page = planned.to_html(graph=tiny)
    reader = read(page)
    rows = re.findall(r"<tr data-edge=.*?</tr>", page)
    assert any("struck" in row and "unread" in row for row in rows), "a column that nothing reads"
    pruned = [
        attributes for tag, attributes in reader.tags if tag == "rect" and "pruned" in (attributes.get("class") or "")
    ]
    assert len(pruned) == 2, "the reference model and its log-probabilities"
    assert "policy t → t+1" in page


def test_what_fills_a_box_is_held_to_its_width() -> None:
    words = "epochs=2, minibatches=4"
    points = [Point("repeat", "choice", ("repeat", words), "", None, ())]
    points += [Point(f"n{index}", "rows", (f"n{index}", "filter"), "", None, ()) for index in range(5)]
    drawn = ElementTree.fromstring(flowchart(Dataflow(tuple(points), (), True)))
    box = next(one for one in drawn.iter() if one.get("class") == "point")
    frame = next(one for one in box if one.get("class") == "box sort-choice")
    second = {one.text: one for one in drawn.iter() if one.get("class") == "sub"}
    inside = float(frame.get("width") or 0) - 20
    assert 0.85 * inside < float(second[words].get("textLength") or 0) <= inside
    assert second["filter"].get("textLength") is None, "short words keep the width of their letters"


def test_the_label_of_an_edge_says_what_its_line_does(planned: Plan) -> None:
    page = planned.to_html(graph=tiny)
    found = re.findall(r'<g class="(edge|edgelabel) [^"]*"([^>]*)><title>(.*?)</title>', page, re.DOTALL)
    lines = {attributes: title for name, attributes, title in found if name == "edge"}
    labels = [(attributes, title) for name, attributes, title in found if name == "edgelabel"]
    assert labels and all(lines[attributes] == title for attributes, title in labels)
    assert len(labels) == page.count('class="edgelabel ')


def test_a_plan_of_another_flow_is_refused(planned: Plan) -> None:
    with pytest.raises(ConfigError, match="give the flow that was planned"):
        large().to_html(graph=tiny)


def test_edges_carry_bytes(planned: Plan) -> None:
    from flowrl.viz.dataflow import dataflow
    from flowrl.viz.scene import scene

    flow = dataflow(scene(planned), tiny)
    (edge,) = (edge for edge in flow.edges if edge.source == "rollout" and not edge.is_pruned)
    tokens = 16 * 4 * 256
    assert edge.carried_bytes > tokens * 4, "at least the token ids"
    assert "response_ids" in edge.columns
    assert all(edge.is_pruned == ("ref" in edge.source + edge.target) for edge in flow.edges)
