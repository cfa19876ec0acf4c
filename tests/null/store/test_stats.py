"""What a table says of itself: the bytes of each column, by codec and by tier."""

from pathlib import Path

from flowrl.schema import PROMPT, SAMPLE
from flowrl.store.catalog import TIERS
from flowrl.store.rows import RowBatch
from flowrl.store.table import ExperienceTable


def rows(count: int) -> RowBatch:
    columns = {"prompt_id": [f"p{i // 4}" for i in range(count)], "reward": [0.0] * count}
    return RowBatch(columns, {"prompt_id": PROMPT.str, "reward": SAMPLE.f32})


def test_bytes_of_a_column_by_tier(tmp_path: Path) -> None:
    with ExperienceTable(path=tmp_path / "replay", chunk_rows=4) as table:
        table.append(rows(4))
        table.spill()
        table.append(rows(2))
        table.add_column("judged", None, SAMPLE.bool)
        table.add_column("score", [1.0] * 6, SAMPLE.f64)
        found = table.stats()
        assert list(found.columns["reward"].tiers) == ["hot", "disk"]
        assert found.columns["reward"].tiers["hot"] == 2 * 4
        assert dict(found.columns["judged"].tiers) == {}
        assert dict(found.columns["score"].tiers) == {"hot": 6 * 8}
        for column in found.columns.values():
            assert sum(column.tiers.values()) == column.stored_bytes
        for tier in TIERS:
            assert sum(column.tiers.get(tier, 0) for column in found.columns.values()) <= found.tiers[tier]
        assert found.to_dict()["columns"]["score"]["tiers"] == {"hot": 6 * 8}


def test_compressed_columns_are_packed() -> None:
    with ExperienceTable(compression="lz4", hot_bytes=0, chunk_rows=256) as table:
        table.append(rows(256))
        table.flush()
        column = table.stats().columns["reward"]
        assert dict(column.tiers) == {"packed": column.stored_bytes}
        assert dict(column.codecs) == {"lz4": column.stored_bytes}
