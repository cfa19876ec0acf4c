"""Lines and events: legal JSON whatever is written, readable whatever is cut off."""

import json
from pathlib import Path

import numpy as np
import pytest

from flowrl.errors import RunError
from flowrl.trace import Event, LineWriter, TraceWriter, now_s, read_lines, read_trace, to_json

EVENTS = [
    Event("compute", "rollout", 0, 1.5, 2.0, 8, 100, {"kind": "rollout", "version": 3}),
    Event("save", step=1, start_s=2.0, end_s=2.25),
]


def test_events_come_back(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.jsonl") as trace:
        for event in EVENTS:
            trace.add(event)
        assert not (tmp_path / "trace.jsonl").exists()  # buffered until flushed
        trace.flush()
        assert read_trace(trace.path) == EVENTS
    assert EVENTS[0].seconds == 0.5
    assert read_trace(tmp_path / "missing.jsonl") == []


def test_spans_are_timed_and_record_what_ended_them(tmp_path: Path) -> None:
    before = now_s()
    with TraceWriter(tmp_path / "trace.jsonl") as trace:
        with trace.span("compute", "reward", step=2) as found:
            found.update(rows=4, bytes=32, chunks=1)
        with pytest.raises(KeyboardInterrupt):
            with trace.span("compute", "update", step=2):
                raise KeyboardInterrupt
    first, second = read_trace(trace.path)
    assert (first.rows, first.bytes, first.attributes) == (4, 32, {"chunks": 1})
    assert before <= first.start_s <= first.end_s <= second.start_s
    assert second.attributes["error"] == "KeyboardInterrupt: "


def test_a_file_cut_anywhere_is_readable_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with TraceWriter(path) as trace:
        for event in EVENTS:
            trace.add(event)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert read_trace(path) == EVENTS[: sum(end <= cut for end in ends)]


def test_going_on_after_a_torn_line_joins_nothing(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for torn in ('{"a": 1}\n{"a"', '{"a": 1}\n' + '{"a": "' + "x" * 200_000, '{"a": 1}\n'):
        path.write_text(torn)
        with LineWriter(path) as lines:
            lines.write({"a": 2})
        assert list(read_lines(path)) == [{"a": 1}, {"a": 2}]
    path.write_text('{"torn')
    LineWriter(path).close()
    assert path.read_text() == ""


def test_a_line_that_is_no_json_is_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    for text, says in (('{"a": 1}\nnonsense\n{"a": 2}\n', ":2 is not a line of JSON"), ("[1]\n", ":1 holds list")):
        path.write_text(text)
        with pytest.raises(RunError, match=says):
            list(read_lines(path))
    path.write_text('{"what": "compute"}\n')
    with pytest.raises(RunError, match="no event"):
        read_trace(path)


def test_everything_written_is_legal_json(tmp_path: Path) -> None:
    odd = {
        "nan": float("nan"),
        "inf": [float("inf"), np.float32("-inf")],
        "array": np.array([1.5, np.nan]),
        "number": np.int64(3),
        "flag": np.bool_(True),
        "path": Path("a/b"),
        "set": {2, 1},
        "object": ...,
        5: "key",
        "surrogate": "\udc80",
        "text": "line\nbreak é",
    }
    with LineWriter(tmp_path / "lines.jsonl") as lines:
        lines.write(odd)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    text = (tmp_path / "lines.jsonl").read_text()
    assert text.count("\n") == 1
    read = json.loads(text, parse_constant=refuse)
    assert read["nan"] is None and read["inf"] == ["Infinity", "-Infinity"] and read["array"] == [1.5, None]
    assert read["number"] == 3 and read["flag"] is True and read["path"] == "a/b" and read["set"] == [1, 2]
    assert read["object"] == "Ellipsis" and read["5"] == "key" and read["text"] == "line\nbreak é"
    assert to_json(True) is True
