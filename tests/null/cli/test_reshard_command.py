"""`flowrl reshard-explain`: the bytes of an edge, the bound, and what is refused."""

import json

import pytest

from .conftest import Cli

QWEN = "Qwen/Qwen2.5-7B"


def test_two_devices_from_shards_to_tensor_parallelism(cli: Cli) -> None:
    result = cli("reshard-explain", QWEN, "--from", "f2", "--to", "t2", "--cluster", "2xH200")
    assert result.code == 0
    assert "Qwen/Qwen2.5-7B: f2 -> t2" in result.out
    assert "lower bound   2.1 GiB; the ratio is 1.0000" in result.out
    assert "by gathering  14.2 GiB" in result.out
    assert "buckets       9 of at most 128.0 MiB" in result.out
    assert "ms on the wire" in result.out


def test_json_and_other_devices(cli: Cli) -> None:
    told = cli("reshard-explain", QWEN, "--from", "d1", "--to", "d1", "--apart", "--source-dtype", "float32", "--json")
    found = json.loads(told.out)
    assert found["peer_bytes"] == [{"from": 0, "to": 1, "bytes": 2 * 7615616512}]
    assert found["ratio"] == 1.0
    assert found["local_bytes"] == {"0": 0, "1": 0}
    assert found["staging_bytes"] <= 256 * 2**20
    assert found["predicted_s"] is None  # nobody said on what


def test_stages_and_small_buckets(cli: Cli) -> None:
    told = cli("reshard-explain", QWEN, "--from", "f4", "--to", "t2p2", "--bucket-mib", "16", "--json")
    found = json.loads(told.out)
    assert found["ratio"] == 1.0
    assert found["staging_bytes"] <= 32 * 2**20


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--from", "x2", "--to", "t2"), "a layout is letters"),
        (("--from", "f4", "--to", "t4", "--cluster", "2xH200"), "needs 4 devices; cluster 2xH200 has 2"),
        (("--from", "f2", "--to", "t2", "--apart", "--cluster", "2xH200"), "needs 4 devices"),
        (("--from", "f2", "--to", "t2", "--bucket-mib", "0"), "--bucket-mib is at least 1"),
        (("--from", "f2", "--to", "t3"), "tp 3 must divide 4 key-value heads"),
    ],
)
def test_what_does_not_fit_is_refused(cli: Cli, more: tuple[str, ...], message: str) -> None:
    result = cli("reshard-explain", QWEN, *more)
    assert result.code == 2
    assert message in result.err
