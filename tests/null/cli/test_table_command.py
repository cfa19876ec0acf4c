"""`flowrl table`: what is found at a path, what is printed, what is written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from flowrl.cli.table import WIDTH, cell
from flowrl.runtime.rundir import RunDir
from flowrl.schema import PROMPT, SAMPLE, TOKEN
from flowrl.store.interop import from_parquet, to_parquet
from flowrl.store.rows import RowBatch
from flowrl.store.table import ExperienceTable

from .conftest import Cli

LAST = 2**53 + 1
KINDS = {
    "prompt_id": PROMPT.str, "count": SAMPLE.i64, "reward": SAMPLE.f32, "half": SAMPLE.f16, "response_ids": TOKEN.i32,
    "blob": SAMPLE.bytes,
}  # fmt: skip


def rows(count: int) -> RowBatch:
    return RowBatch(
        {
            "prompt_id": [f"p{i // 2}" for i in range(count)],
            "count": [LAST + i for i in range(count)],
            "reward": [i / 2 for i in range(count)],
            "half": np.arange(count, dtype=np.float16),
            "response_ids": [list(range(i)) for i in range(count)],
            "blob": [b"x"] * count,
        },
        KINDS,
    )


class Rows:
    """Chunks of one batch."""

    def __init__(self, batch: RowBatch) -> None:
        self.batch, self.schema = batch, batch.schema

    def scan(self, columns: Any = None) -> Any:
        yield self.batch.select(self.schema.names if columns is None else columns)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`runs/grpo-1` with two recorded edges, and `rows.parquet`."""
    monkeypatch.chdir(tmp_path)
    run = RunDir.create("runs", "grpo")
    run.write_edge(0, "rollout", rows(6))
    run.write_edge(12, "grade/length", rows(3).select(["prompt_id", "reward"]))
    run.finish()
    to_parquet(Rows(rows(6)), "rows.parquet")
    return tmp_path


EDGE = "runs/grpo-1/edges/step_000000/rollout.arrow"


# ------------------------------------------------------------------------------------------------------------------ ls


def test_ls_lists_the_edges_of_a_run_as_they_are_asked_for(here: Path, cli: Cli) -> None:
    result = cli("table", "ls", "runs/grpo-1")
    assert result.code == 0
    lines = [line.split() for line in result.out.splitlines()]
    assert lines[0] == ["table", "rows", "columns", "raw", "stored", "tiers"]
    assert [line[:3] for line in lines[1:]] == [
        [EDGE, "6", "6"], ["runs/grpo-1/edges/step_000012/grade%2Flength.arrow", "3", "2"],
    ]  # fmt: skip
    for line in lines[1:]:
        assert cli("table", "head", line[0]).code == 0


def test_ls_of_one_file_a_folder_and_json(here: Path, cli: Cli) -> None:
    (here / "other.arrow").write_bytes(rows(2).to_ipc())
    found = json.loads(cli("table", "ls", ".", "--json").out)
    assert [(f["table"], f["rows"], f["columns"]) for f in found] == [
        ("other.arrow", 2, list(KINDS)), ("rows.parquet", 6, list(KINDS)),
    ]  # fmt: skip
    assert json.loads(cli("table", "ls", "rows.parquet", "--json").out) == found[1:]
    assert found[1]["stored_bytes"] == (here / "rows.parquet").stat().st_size
    assert found[0]["raw_bytes"] > 2 * (8 + 4 + 2)


@pytest.mark.parametrize(
    ("path", "code", "text"),
    [
        ("nowhere/rows.parquet", 2, "there is nothing at 'nowhere/rows.parquet'"),
        ("runs/grpo-1/edges/step_000000/rolout.arrow", 2, "did you mean 'rollout.arrow'?"),
        ("runs", 2, "it holds the runs grpo-1"),
        ("runs/grpo-1/run.json", 2, "ends in .arrow or .parquet"),
        ("runs/grpo-1/weights", 2, "no experience tables"),
        ("broken.parquet", 1, "cannot be read as a Parquet file"),
        ("broken.arrow", 1, "cannot be read as Arrow IPC"),
    ],
)
def test_what_is_no_table(here: Path, cli: Cli, path: str, code: int, text: str) -> None:
    (here / "broken.parquet").write_bytes(b"PAR1")
    (here / "broken.arrow").write_bytes(b"1234567890")
    for command in (("ls", path), ("stats", path), ("head", path), ("export", path, "out.parquet")):
        result = cli("table", *command)
        assert (result.code, result.out) == (code, ""), command
        assert text in result.err


def test_ls_names_what_cannot_be_read_and_goes_on(here: Path, cli: Cli) -> None:
    (here / "broken.parquet").write_bytes(b"PAR1")
    result = cli("table", "ls", ".")
    assert result.code == 1
    assert result.err.startswith("error: broken.parquet: 'broken.parquet' cannot be read")
    assert [line.split()[0] for line in result.out.splitlines()] == ["table", "rows.parquet"]


def test_ls_goes_on_when_a_table_has_gone_since_it_was_found(
    here: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flowrl.cli.table.names_at", lambda target: ["0123456789", "rows.parquet"])
    result = cli("table", "ls")
    assert result.code == 1
    assert result.err.startswith("error: 0123456789: there is no file, folder or table '0123456789'")
    assert [line.split()[0] for line in result.out.splitlines()] == ["table", "rows.parquet"]


def test_a_run_without_recordings_says_how_to_record(here: Path, cli: Cli) -> None:
    RunDir.create("runs", "bare").finish()
    for command in ("ls", "head"):
        result = cli("table", command, "runs/bare-1")
        assert result.code == 2 and "nothing was recorded" in result.err


def test_a_folder_of_several_tables_asks_for_one(here: Path, cli: Cli) -> None:
    result = cli("table", "head", "runs/grpo-1")
    assert result.code == 2
    assert EDGE in result.err and "flowrl table ls runs/grpo-1" in result.err


# ---------------------------------------------------------------------------------------------------------------- head


def test_head_puts_values_side_by_side(here: Path, cli: Cli) -> None:
    result = cli("table", "head", EDGE, "-n", "2", "--columns", "count,prompt_id,response_ids")
    assert result.out.splitlines() == [
        "count             prompt_id  response_ids", f"{LAST}  p0         []", f"{LAST + 1}  p0         [0]",
    ]  # fmt: skip
    assert len(cli("table", "head", "rows.parquet", "--columns", "reward").out.splitlines()) == 6


def test_head_puts_many_columns_under_each_other(here: Path, cli: Cli) -> None:
    wide = RowBatch(
        {f"column_{i}": [f"{'long ' * 100}\n"] for i in range(8)}, {f"column_{i}": SAMPLE.str for i in range(8)}
    )
    Path("wide.arrow").write_bytes(wide.to_ipc())
    lines = cli("table", "head", "wide.arrow").out.splitlines()
    assert lines[0] == "row 0" and len(lines) == 9
    assert all(len(line) <= WIDTH and line.endswith(" ... (501 characters)") for line in lines[1:])


@pytest.mark.parametrize(
    ("value", "room", "text"),
    [
        ("a\nb", 20, "a\\nb"),
        ("x" * 50, 24, "xxxx ... (50 characters)"),
        ([1, 2, 3], 20, "[1, 2, 3]"),
        (list(range(1000)), 24, "[0, 1, 2 ... (1000 values)"[:8] + " ... (1000 values)"),
        ([[1, 2], [3, 4]], 20, "[[1, 2], [3, 4]]"),
        (None, 9, "null"),
        (True, 9, "true"),
        (0.1 + 0.2, 9, "0.3"),
        (b"\x00a", 20, "b'\\x00a'"),
    ],
)
def test_a_cell(value: Any, room: int, text: str) -> None:
    found = cell(value, room)
    assert len(found) <= max(room, len(text))
    assert found == text or ("..." in text and found.endswith(text[text.index("...") :]))


def test_head_refuses(here: Path, cli: Cli) -> None:
    result = cli("table", "head", "rows.parquet", "--columns", "rewrd")
    assert result.code == 2 and "did you mean 'reward'?" in result.err
    assert cli("table", "head", "rows.parquet", "--columns", "reward,reward").code == 2
    assert cli("table", "head", "rows.parquet", "-n", "0").code == 2
    assert cli("table", "head").code == 2


def test_of_a_recording_that_was_cut_off_the_whole_batches(here: Path, cli: Cli) -> None:
    batch = rows(6).to_arrow().to_batches(max_chunksize=2)
    with pa.OSFile("cut.arrow", "wb") as sink, pa.ipc.new_stream(sink, batch[0].schema) as writer:
        for part in batch:
            writer.write_batch(part)
    data = Path("cut.arrow").read_bytes()
    Path("cut.arrow").write_bytes(data[: int(len(data) * 0.9)])
    assert json.loads(cli("table", "ls", "cut.arrow", "--json").out)[0]["rows"] == 4


# --------------------------------------------------------------------------------------------------------------- stats


def test_stats_of_a_parquet_file(here: Path, cli: Cli) -> None:
    result = cli("table", "stats", "rows.parquet")
    assert result.code == 0
    assert result.out.startswith("rows.parquet: 6 rows\n")
    found = json.loads(cli("table", "stats", "rows.parquet", "--json").out)
    assert list(found["columns"]) == list(KINDS)
    column = found["columns"]["response_ids"]
    assert (column["type"], column["codecs"], column["tiers"], column["rows"]) == ("TOKEN.i32", ["zstd"], ["disk"], 6)
    assert column["ratio"] == round(column["raw_bytes"] / column["stored_bytes"], 4)
    assert sum(c["stored_bytes"] for c in found["columns"].values()) < found["stored_bytes"]


def test_stats_of_a_stream(here: Path, cli: Cli) -> None:
    found = json.loads(cli("table", "stats", EDGE, "--json").out)
    assert found["columns"]["count"] == {
        "type": "SAMPLE.i64", "raw_bytes": 48, "stored_bytes": 48, "ratio": 1.0, "codecs": ["none"], "tiers": ["disk"],
        "rows": 6,
    }  # fmt: skip
    table = RowBatch({"prompt_id": ["the same"] * 4000}, {"prompt_id": PROMPT.str}).to_arrow()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile("packed.arrow", "wb") as sink, pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    found = json.loads(cli("table", "stats", "packed.arrow", "--json").out)
    assert found["columns"]["prompt_id"]["stored_bytes"] is None, "the file does not say how much each column takes"
    assert found["raw_bytes"] > found["stored_bytes"]
    result = cli("table", "stats", "packed.arrow")
    assert result.code == 0
    titles = next(line.split() for line in result.out.splitlines() if line.startswith("column"))
    assert titles == ["column", "type", "raw", "tier"], "what no column has is left out"


def test_a_file_of_someone_else(here: Path, cli: Cli) -> None:
    pq.write_table(pa.table({"a.b": [1, None], "text": ["x", "y"], "inner": [{"k": 1}, {"k": 2}]}), "foreign.parquet")
    assert "int64" in cli("table", "stats", "foreign.parquet").out
    assert "null" in cli("table", "head", "foreign.parquet").out
    with pa.OSFile("feather.arrow", "wb") as sink, pa.ipc.new_file(sink, pa.schema({"x": pa.int8()})) as writer:
        writer.write_table(pa.table({"x": pa.array([1, 2], pa.int8())}))
    assert cli("table", "head", "feather.arrow").out == "x\n1\n2\n"


# -------------------------------------------------------------------------------------------------------------- export


def test_export_to_parquet_and_arrow_keeps_everything(here: Path, cli: Cli) -> None:
    result = cli("table", "export", EDGE, "out.parquet")
    assert (result.code, result.out) == (0, "6 rows of 6 columns written to out.parquet\n")
    assert RowBatch.concat(list(from_parquet("out.parquet"))).equals(rows(6))
    assert cli("table", "export", "rows.parquet", "out.arrow").code == 0
    assert RowBatch.from_ipc(Path("out.arrow").read_bytes()).equals(rows(6))


@pytest.mark.parametrize(
    ("span", "first", "last"),
    [
        ("0:2", 0, 2),
        (":3", 0, 3),
        ("4:", 4, 6),
        ("-2:", 4, 6),
        ("1:-1", 1, 5),
        ("2:2", 2, 2),
        ("9:", 6, 6),
        (":", 0, 6),
    ],
)
def test_export_of_some_rows(here: Path, cli: Cli, span: str, first: int, last: int) -> None:
    result = cli("table", "export", EDGE, "out.arrow", f"--rows={span}", "--columns", "count,prompt_id")
    assert result.code == 0
    found = RowBatch.from_ipc(Path("out.arrow").read_bytes())
    assert found.equals(rows(6).slice(first, last).select(["count", "prompt_id"]))


def test_export_to_lines_of_json(here: Path, cli: Cli) -> None:
    odd = rows(2).drop(["blob"]).with_column("reward", [np.nan, np.inf], SAMPLE.f32)
    Path("odd.arrow").write_bytes(odd.to_ipc())
    assert cli("table", "export", "odd.arrow", "out.jsonl").code == 0
    found = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert found[1] == {"prompt_id": "p0", "count": LAST + 1, "reward": "Infinity", "half": 1.0, "response_ids": [0]}
    assert found[0]["reward"] is None


def test_export_to_csv(here: Path, cli: Cli) -> None:
    assert cli("table", "export", EDGE, "out.csv", "--columns", "prompt_id,count,half").code == 0
    found = pyarrow.csv.read_csv("out.csv")
    assert found.to_pydict() == {
        "prompt_id": ["p0", "p0", "p1", "p1", "p2", "p2"], "count": [LAST + i for i in range(6)],
        "half": [float(i) for i in range(6)],
    }  # fmt: skip


def test_export_refuses(here: Path, cli: Cli) -> None:
    refused = [
        (("rows.parquet", "out.csv"), "leave out response_ids, blob with --columns"),
        (("rows.parquet", "out.jsonl"), "leave out blob with --columns"),
        (("rows.parquet", "out.txt"), "ends in one of .parquet, .arrow, .jsonl, .csv"),
        (("rows.parquet", "rows.parquet"), "exists already"),
        (("rows.parquet", "out.arrow", "--rows", "5"), "--rows takes FIRST:STOP"),
        (("rows.parquet", "out.arrow", "--columns", "none_such"), "no column 'none_such'"),
    ]
    for arguments, text in refused:
        result = cli("table", "export", *arguments)
        assert result.code == 2 and text in result.err, arguments
    result = cli("table", "export", "rows.parquet", "nowhere/out.arrow")
    assert result.code == 1 and "make the folder 'nowhere' first" in result.err
    assert sorted(path.name for path in here.iterdir()) == ["rows.parquet", "runs"]


# ----------------------------------------------------------------------------------------------------------------- sql


@pytest.mark.parametrize("path", [EDGE, "rows.parquet"])
def test_sql(here: Path, cli: Cli, path: str) -> None:
    pytest.importorskip("duckdb")
    query = "select prompt_id, avg(reward) as mean, max(len(response_ids)) as longest from rows group by 1 order by 1"
    result = cli("table", "sql", path, query)
    assert result.out.splitlines() == [
        "prompt_id  mean  longest", "p0         0.25  1", "p1         1.25  3", "p2         2.25  5",
    ]  # fmt: skip
    result = cli("table", "sql", path, "select rewrd from rows")
    assert result.code == 2 and "rewrd" in result.err
    assert cli("table", "sql", path, "select reward from rows where reward > 99").out == "reward\n"


# --------------------------------------------------------------------------------------------------- experience tables


def test_an_experience_table_by_folder(here: Path, cli: Cli) -> None:
    with ExperienceTable(path=here / "replay", max_rows=4, chunk_rows=2) as table:
        table.append(rows(6).drop(["blob"]))
        table.add_column("judged", None, SAMPLE.bool)
        table.fill("judged", [5], [True])
        found = json.loads(cli("table", "stats", "replay", "--json").out)
        assert (found["rows"], found["appended"], found["evicted"]) == (4, 6, 2)
        assert found["columns"]["judged"]["rows"] == 1
        table.spill()
        table.fill("judged", [4], [False])
        told = json.loads(cli("table", "stats", "replay", "--json").out)["columns"]
        assert told["reward"]["tiers"] == ["disk"] and "hot" in told["judged"]["tiers"]
        assert [line.split()[0] for line in cli("table", "ls", ".").out.splitlines()] == [
            "table",
            "replay",
            "rows.parquet",
        ]
        assert cli("table", "head", "replay", "--columns", "count", "-n", "1").out == f"count\n{LAST + 2}\n"
        result = cli("table", "head", "replay", "--columns", "judged")
        assert result.code == 2 and "no column 'judged' with a value in every row" in result.err
        assert cli("table", "export", "replay", "out.parquet").code == 0
        assert RowBatch.concat(list(from_parquet("out.parquet"))).equals(rows(6).slice(2).drop(["blob"]))
    assert json.loads(cli("table", "stats", "replay", "--json").out)["tiers"].keys() == {"disk"}
    assert cli("table", "stats", "replay").code == 0


def test_an_experience_table_by_name(here: Path, cli: Cli) -> None:
    with ExperienceTable() as table:
        table.append(rows(3))
        found = json.loads(cli("table", "ls", "--json").out)
        assert (table.name, 3) in [(f["table"], f["rows"]) for f in found]
        assert cli("table", "head", table.name).code == 0
        name = table.name
    result = cli("table", "head", name)
    assert result.code == 2 and f"no file, folder or table '{name}'" in result.err
