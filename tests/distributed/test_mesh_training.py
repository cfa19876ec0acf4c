"""The torch engine on real ranks (gloo): the same numbers as on one device, whatever the layout."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from flowrl.cost.shapes import ModelShape
from flowrl.engines.calibrate.processes import run_processes
from flowrl.engines.host_torch import TorchEngine
from flowrl.mesh import Layout
from flowrl.planner.boxes import Holding
from tests.distributed.mesh_cases import (
    ADAPTED,
    BF16,
    CASES,
    FAMILIES,
    job_of,
    metrics_of,
    model_of,
    scored,
    smollm,
    train,
    uses_of,
)

DEADLINE_S = 285.0
"""For all ranks of a world to end."""

WORK = {
    2: {
        "f2": [
            "llama", "smollm", "qwen2", "gpt2", "minibatches", "prompts", "few", "groups", "whole", "value", "checkpointing",
            "decay", "bf16", "not_finite", "learns_nothing", "from_files", "scoring", "blended", "checkpoint",
            "errors",
        ],
        "t2": ["llama", "qwen2", "qwen3", "gpt2", "prompts", "checkpointing", "bf16"],
    },
    4: {
        "f4": ["one_rank_trains", "few_prompts", "decay"],
        "f2t2": ["smollm", "prompts", "few", "resumed", "from_files"],
        "d2f2": ["llama", "minibatches", "few_prompts"],
        "d2t2@div": ["value", "halves"],
    },
}  # fmt: skip


if importlib.util.find_spec("peft") is not None:
    WORK[2]["f2"].append("adapters")


def run(
    world: int,
    folder: Path,
    work: dict[str, list[str]] | None = None,
    worker: str = "tests.distributed.mesh_worker",
) -> list[dict[str, Any]]:
    """What comes of the work of a world, by rank."""
    work = work or WORK[world]
    jobs = [json.dumps({"rank": rank, "world": world, "folder": str(folder), "work": work}) for rank in range(world)]
    ended = run_processes(worker, jobs, folder, DEADLINE_S)
    printed = "\n".join((folder / f"{rank}.err").read_text()[-3000:] for rank in range(world))
    assert not ended, f"{ended}\n{printed}"
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """A folder for each world, with a model in two files."""
    made = {world: tmp_path_factory.mktemp(f"world{world}") for world in WORK}
    for folder in made.values():
        smollm().save_pretrained(folder / "smollm", max_shard_size="8KB")
    (made[4] / "from.txt").write_text(str(made[2]))
    return made


@pytest.fixture(scope="module")
def two(folders: dict[int, Path]) -> list[dict[str, Any]]:
    return run(2, folders[2])


@pytest.fixture(scope="module")
def four(folders: dict[int, Path], two: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return run(4, folders[4])


@functools.cache
def alone(name: str) -> dict[str, Any]:
    """The same on one device."""
    case = BF16 if name == "bf16" else CASES[name]
    return train(TorchEngine().open(name, model_of(case), uses_of(case), seed=0), case)


def assert_equal_reports(
    found: list[dict[str, float]], expected: list[dict[str, float]], tolerance: float = 1e-5
) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            assert mine[key] == pytest.approx(value, rel=tolerance, abs=tolerance), key


def assert_equal_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Weights, moments, schedule and version."""
    assert found.keys() == expected.keys()
    assert found["version"] == expected["version"] and found["schedule"] == expected["schedule"]
    assert found["weights"].keys() == expected["weights"].keys()
    for name, array in expected["weights"].items():
        np.testing.assert_allclose(found["weights"][name], array, atol=1e-5, rtol=0, err_msg=name)
    assert found["optimizer"].keys() == expected["optimizer"].keys()
    for name, entry in expected["optimizer"].items():
        assert found["optimizer"][name]["step"] == entry["step"]
        for key in ("exp_avg", "exp_avg_sq"):
            np.testing.assert_allclose(found["optimizer"][name][key], entry[key], atol=1e-5, rtol=0, err_msg=name)


def assert_as_alone(ranks: list[dict[str, Any]], key: str) -> None:
    name = key.split(" ")[1]
    expected = alone(name)
    begun = start(name)
    moved = [np.abs(p - begun[n].numpy()).max() for n, p in expected["state"]["weights"].items() if n in begun]
    assert max(moved) > 1e-3  # else equal weights would say nothing
    for rank in ranks:
        np.testing.assert_allclose(rank[key]["before"], expected["before"], atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(rank[key]["after"], expected["after"], atol=1e-5, rtol=1e-5)
        assert rank[key]["reports"] == ranks[0][key]["reports"]  # to the bit
    assert_equal_reports(ranks[0][key]["reports"], expected["reports"])
    assert_equal_states(ranks[0][key]["state"], expected["state"])


def start(name: str) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in FAMILIES[CASES[name].family]().named_parameters()}


def trained(world: int) -> list[str]:
    return [f"{layout} {name}" for layout, names in WORK[world].items() for name in names if name in CASES]


@pytest.mark.parametrize("key", trained(2))
def test_two_ranks_train_as_one_device(two: list[dict[str, Any]], key: str) -> None:
    assert_as_alone(two, key)


@pytest.mark.parametrize("key", trained(4))
def test_four_ranks_train_as_one_device(four: list[dict[str, Any]], key: str) -> None:
    assert_as_alone(four, key)


def test_checkpointing_changes_nothing(two: list[dict[str, Any]]) -> None:
    """The same numbers to the bit, and other work behind them is checked where one device does it."""
    for rank in two:
        for layout in ("f2", "t2"):
            assert rank[f"{layout} checkpointing"]["reports"] == rank[f"{layout} llama"]["reports"]
            np.testing.assert_array_equal(rank[f"{layout} checkpointing"]["after"], rank[f"{layout} llama"]["after"])


# --- how weights lie --------------------------------------------------------------------------------------------------


def test_everything_is_sharded(two: list[dict[str, Any]], four: list[dict[str, Any]]) -> None:
    """Weights and optimizer state, no parameter whole on more ranks than dp and tp ask for."""
    for ranks, world in ((two, 2), (four, 4)):
        for key in trained(world):
            layout = Layout.parse(key.split(" ")[0])
            for rank in ranks:
                audit = rank[key]["audit"]
                assert all(part.devices == world for part in audit.parts)
                for part in audit.parts:
                    assert part.copies in (layout.dp, layout.dp * layout.tp), (key, part.name)
                    assert part.optimizer_bytes == 2 * part.param_bytes, (key, part.name)
                if layout.tp == 1 and "value" not in key:  # a head of one row has nothing to share
                    assert [finding for finding in audit.problems if finding.kind.startswith("replicated")] == []


@pytest.mark.parametrize("key", ["f2 llama", "f2 smollm", "t2 llama", "t2 qwen3", "f2t2 smollm", "d2f2 llama"])
def test_ranks_hold_what_the_planner_says(two: list[dict[str, Any]], four: list[dict[str, Any]], key: str) -> None:
    """Box by box, so that resharding finds the rows where it looks for them."""
    layout, name = key.split(" ")
    ranks = two if Layout.parse(layout).size == 2 else four
    config = FAMILIES[CASES[name].family]().config
    holding = Holding(Layout.parse(layout), range(len(ranks)), kv_heads=config.num_key_value_heads)
    whole = ranks[0][key]["state"]["weights"]
    seen = set()
    for number, rank in enumerate(ranks):
        for weight in ModelShape.from_config(config).modules():
            boxes = holding.boxes(weight, number)
            mine = rank[key]["held"][weight.name].numpy()
            parts = [whole[weight.name][tuple(slice(*interval) for interval in box)] for box in boxes]
            assert len(parts) <= 1
            assert mine.size == sum(part.size for part in parts), weight.name
            seen.update([weight.name] if parts else [])
    assert seen == set(whole)


def test_ties_stay(two: list[dict[str, Any]], four: list[dict[str, Any]]) -> None:
    for key, ranks in (
        ("f2 smollm", two),
        ("f2 gpt2", two),
        ("t2 qwen3", two),
        ("t2 gpt2", two),
        ("f2t2 smollm", four),
    ):
        for rank in ranks:
            assert rank[key]["is_tied"]
            assert "lm_head.weight" not in rank[key]["held"]
    assert not two[0]["f2 llama"]["is_tied"]


# --- numbers that are not fp32 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["f2", "t2"])
def test_bf16_computes_in_bf16_and_keeps_fp32(two: list[dict[str, Any]], layout: str) -> None:
    expected = alone("bf16")
    for rank in two:
        found = rank[f"{layout} bf16"]
        assert found["stored"] == {"torch.float32"}
        np.testing.assert_allclose(found["before"], expected["before"], atol=0.05)
        np.testing.assert_allclose(found["after"], expected["after"], atol=0.05)
        assert np.abs(found["before"] - alone("llama")["before"]).max() > 1e-4  # it is not fp32
    assert_equal_reports(two[0][f"{layout} bf16"]["reports"], expected["reports"], tolerance=0.05)
    assert two[0][f"{layout} bf16"]["state"].keys() == expected["state"].keys()


def test_no_rank_takes_a_step_that_is_not_finite_on_one(two: list[dict[str, Any]]) -> None:
    for rank in two:
        found = rank["f2 not_finite"]
        assert found["skipped"]["skipped"] == 1 and found["skipped"]["steps"] == 0
        assert found["is_same"]
        assert found["next"]["steps"] == 1 and found["next"]["skipped"] == 0


# --- scoring, files, states -------------------------------------------------------------------------------------------


def test_scores_are_those_of_one_device(two: list[dict[str, Any]]) -> None:
    case = CASES["llama"]
    host = TorchEngine().open("ref", model_of(case), frozenset({"logprobs", "top_logprobs"}), seed=0)
    from tests.distributed.mesh_cases import rows_of

    ids, nats = host.top_logprobs(rows_of(case, 50), 3)
    for rank in two:
        found = rank["f2 scoring"]
        np.testing.assert_allclose(found["logprobs"], scored(host, case), atol=1e-5)
        assert found["none"].size == 0
        np.testing.assert_array_equal(found["top"][0], ids.values)
        np.testing.assert_allclose(found["top"][1], nats.values, atol=1e-5)
        np.testing.assert_allclose(found["bf16"], found["logprobs"], atol=0.05)
        assert found["stored"] == {"torch.bfloat16"}
        assert found["sum"] == host.state()["unchanged"]


def test_files_are_read_and_written(
    two: list[dict[str, Any]], four: list[dict[str, Any]], folders: dict[int, Path]
) -> None:
    case = CASES["smollm"]
    assert len(list((folders[2] / "smollm").glob("*.safetensors"))) > 1
    host = TorchEngine().open("files", model_of(case), uses_of(case), seed=0)
    before, report = scored(host, case), metrics_of(host.update(job_of(case, 0)))
    for ranks, layout, world in ((two, "f2", 2), (four, "f2t2", 4)):
        for rank in ranks:
            found = rank[f"{layout} from_files"]
            assert found["read"] >= set(dict(host.module.named_parameters()))  # one by one, none of them before
            np.testing.assert_allclose(found["before"], before, atol=1e-5)
            np.testing.assert_allclose(found["after"], scored(host, case), atol=1e-5)
            assert_equal_reports([found["report"]], [report])
        written = AutoModelForCausalLM.from_pretrained(folders[world] / f"written-{layout}", dtype=torch.float32)
        assert type(written).__name__ == "LlamaForCausalLM"
        for name, parameter in host.module.named_parameters():
            np.testing.assert_allclose(
                written.get_parameter(name).detach(), parameter.detach(), atol=1e-5, err_msg=name
            )


def test_a_run_goes_on_from_another_layout(two: list[dict[str, Any]], four: list[dict[str, Any]]) -> None:
    """Saved on f2 in both ways, loaded on f2t2; as if it had never stopped."""
    expected = alone("qwen3")
    assert_equal_reports(two[0]["f2 checkpoint"], expected["reports"][:3])
    for rank in four:
        runs, versions = rank["f2t2 resumed"]
        assert versions == (3, 3)
        for found in runs:
            assert_equal_reports(found["reports"], expected["reports"][3:])
            assert_equal_states(found["state"], expected["state"])


def test_a_job_has_several_meshes(four: list[dict[str, Any]]) -> None:
    found = [rank["d2t2@div halves"] for rank in four]
    assert [(name, rank) for name, rank, _ in found] == [
        ("few", 0), ("few", 1), ("one_rank_trains", 0), ("one_rank_trains", 1)
    ]  # fmt: skip
    for name, _, made in found:
        assert_equal_reports(made["reports"], alone(name)["reports"])
        assert_equal_states(made["state"], alone(name)["state"])


def test_adapters_train_on_a_sharded_frozen_base(two: list[dict[str, Any]]) -> None:
    pytest.importorskip("peft", reason="adapters come from peft, which is not installed")
    host = TorchEngine().open("adapted", model_of(ADAPTED), uses_of(ADAPTED), seed=0)
    expected = [metrics_of(host.update(job_of(ADAPTED, seed))) for seed in range(3)]
    for rank in two:
        found = rank["f2 adapters"]
        assert found["trained"] == {name for name in found["stored"] if "lora_" in name}
        assert len(found["trained"]) == 8
        assert found["moved"] and found["moved"] <= found["trained"]
        for name, kind in found["stored"].items():
            assert kind == ("torch.float32" if "lora_" in name else "torch.bfloat16"), name
        assert found["copies"] == {1}
        assert_equal_reports(found["reports"], expected, tolerance=0.05)
        state = host.state()
        for name, array in state["weights"].items():
            np.testing.assert_allclose(found["state"]["weights"][name], array, atol=5e-3, err_msg=name)


def test_an_average_follows(two: list[dict[str, Any]]) -> None:
    begun = start("llama")
    for rank in two:
        found = rank["f2 blended"]
        for name, array in found["average"].items():
            np.testing.assert_allclose(array, 0.5 * begun[name].numpy() + 0.5 * found["policy"][name], atol=1e-6)
        assert any(np.abs(found["policy"][name] - begun[name].numpy()).max() > 1e-4 for name in begun)


def test_errors_say_what_to_do(two: list[dict[str, Any]]) -> None:
    for rank in two:
        sampler, opened, model, blend = rank["f2 errors"]
        assert "was not opened for 'generate'" in sampler and "use a layout of dp and tp, as d2" in opened
        assert "save it and open the folder" in model
        assert "no parameter" in blend or "lacks" in blend
        texts, after = rank["f2 learns_nothing"]
        assert texts[0].startswith("OperatorError: the loss 'detached' does not depend on the model")
        assert texts[1].startswith("OperatorError: the loss 'stored_only' does not depend on the model")
        np.testing.assert_allclose(after, alone("llama")["before"], atol=1e-5)
