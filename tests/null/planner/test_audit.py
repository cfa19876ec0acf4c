"""The predicted sharding audit: its bytes are those of the memory formulas, and what is not sharded is found."""

from dataclasses import replace

import pytest

from flowrl.cost.audit import Part, module_of
from flowrl.cost.offload import ADAM_8BIT, ADAM_FP32, ADAM_MASTER, Offload, state_cost
from flowrl.cost.shapes import ModelShape
from flowrl.errors import ConfigError
from flowrl.mesh import Cluster, Layout
from flowrl.planner.audit import audit_layout

QWEN = ModelShape.of("Qwen/Qwen2.5-7B")
F8 = Layout.parse("f8")


def kinds(audit):
    return [one.kind for one in audit.problems]


@pytest.mark.parametrize("state", [ADAM_FP32, ADAM_MASTER, ADAM_8BIT], ids=lambda one: one.name)
@pytest.mark.parametrize("offload", [Offload.NONE, Offload.PARK, Offload.STREAM_ALL, Offload.CPU_OPTIMIZER])
def test_bytes_are_those_of_the_memory_formulas(state, offload):
    """Eight shards divide every tensor of this model. Parked state is back on the device while it trains."""
    audit = audit_layout(QWEN, F8, offload=offload, state=state)
    cost = state_cost(QWEN, Cluster.named("8xA100-80G"), shards=8, offload=offload, state=state)
    assert audit.device_bytes == cost.train_bytes
    if offload is not Offload.PARK:
        assert 8 * audit.host_bytes == cost.host_bytes
    assert audit.findings == ()


def test_adapters_are_trained_and_their_base_is_not():
    shape = QWEN.with_lora(16)
    audit = audit_layout(shape, F8)
    cost = state_cost(shape, Cluster.named("8xA100-80G"), shards=8)
    assert audit.device_bytes == pytest.approx(cost.train_bytes, rel=1e-6)
    assert {part.module for part in audit.parts if part.is_trained} == {"model.layers.*.lora"}
    assert kinds(audit_layout(shape, F8, precision="fp32")) == ["frozen_fp32"]


def test_what_the_wrap_leaves_out_is_found():
    audit = audit_layout(QWEN, F8, wrap="layers")
    (found,) = audit.problems
    assert found.kind == "replicated"
    assert found.modules == ("model.embed_tokens", "model.norm", "lm_head")
    outside = QWEN.root_params()
    assert found.wasted_bytes == 16 * outside * 7 // 8
    assert audit.device_bytes - audit_layout(QWEN, F8).device_bytes == found.wasted_bytes
    assert "fully_shard" in str(audit)


def test_copies_of_a_frozen_model_are_found():
    audit = audit_layout(QWEN, Layout.parse("d8"), is_frozen=True)
    assert kinds(audit) == ["replicated_frozen"]
    assert audit.device_bytes == 2 * QWEN.params()
    assert kinds(audit_layout(QWEN, F8, is_frozen=True)) == []
    # two copies of shards are what the layout asks for
    shared = audit_layout(QWEN, Layout.parse("d2f4"), is_frozen=True)
    assert shared.findings == () and {part.copies for part in shared.parts} == {2}


def test_rows_that_do_not_divide():
    """9 rows over 4 devices: the first has 3, an even share is 2.25."""
    shape = ModelShape(hidden=8, layers=1, heads=1, kv_heads=1, head_dim=8, ffn=8, vocab=9)
    audit = audit_layout(shape, Layout.parse("f4"), is_frozen=True)
    embedding = audit.parts[0]
    assert embedding.param_bytes == 2 * 3 * 8
    assert embedding.uneven_bytes == 2 * 8 * 3 - 2 * 8 * 9 / 4
    (found,) = [one for one in audit.findings if one.kind == "uneven"]
    assert found.modules == ("model.embed_tokens", "lm_head")
    # a value head has one row: the first device has it, and the others nothing
    value = audit_layout(QWEN.with_head("value"), F8).parts[-2]
    assert value.name == "score.weight" and value.param_bytes == value.whole_bytes


def test_tensor_parallel_cuts_what_it_can():
    audit = audit_layout(QWEN, Layout.parse("f2t4"))
    copies = {part.name.split(".")[-2]: part.copies for part in audit.parts}
    assert copies["q_proj"] == copies["embed_tokens"] == 1
    assert copies["norm"] == 4  # each rank of a tensor-parallel group has all of it, cut over fsdp only
    assert audit.findings == ()


def test_a_stage_has_its_layers_only():
    audit = audit_layout(QWEN, Layout.parse("f2p2"))
    assert 0.4 < audit.device_bytes / audit_layout(QWEN, Layout.parse("f2")).device_bytes < 0.7


def test_findings_of_mixed_types():
    audit = audit_layout(QWEN, F8, state=ADAM_MASTER)
    head = audit.parts[-1]
    odd = replace(audit, parts=(*audit.parts[:-1], replace(head, dtype="float32", param_bytes=2 * head.param_bytes)))
    assert kinds(odd) == ["fp32_leftover"] and odd.problems[0].modules == ("lm_head",)
    wide = replace(audit, parts=tuple(replace(part, grad_dtype="float32") for part in audit.parts))
    assert kinds(wide) == ["gradient_dtype"]
    kept = replace(audit, parts=(*audit.parts[:-1], replace(head, state_excess_bytes=2**30)))
    assert kinds(kept) == ["state_not_sharded"]


def test_what_is_small_is_a_remark():
    audit = audit_layout(QWEN, F8)
    norm = replace(audit.parts[-2], copies=8)
    assert norm.name == "model.norm.weight"
    small = replace(audit, parts=(*audit.parts[:-2], norm, audit.parts[-1]))
    assert small.problems == () and [one.kind for one in small.findings] == ["replicated"]
    assert replace(small, worth=0.0).problems != ()


def test_names_are_counted_with_their_module():
    assert module_of("model.layers.3.mlp.up_proj.weight") == "model.layers.*.mlp"
    assert module_of("transformer.h.0.ln_1.weight") == "transformer.h.*.ln_1"
    assert module_of("lm_head.weight") == "lm_head"
    assert module_of("0.weight") == "*"
    assert module_of("model.layers.0.self_attn.q_proj.lora_A.weight") == "model.layers.*.lora"
    one = Part("weight", (2, 2), "float32", 1, 1, 16, 16)
    assert one.module == "weight" and not one.is_whole


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wrap": "layer"}, "there is no wrap 'layer'; did you mean 'layers'?"),
        ({"precision": "fp16"}, "there is no precision 'fp16'"),
    ],
)
def test_what_makes_no_sense_is_refused(options, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        audit_layout(QWEN, F8, **options)
    with pytest.raises(ConfigError, match="no adapters to train"):
        audit_layout(QWEN.with_lora(8), F8, is_frozen=True)


@pytest.mark.parametrize(
    ("layout", "wrap", "remedy"),
    [
        ("t8", "all", "Tensor parallelism does not cut them; shards would: f2t4"),
        ("d2t4", "all", "Tensor parallelism does not cut them; shards would: f2t4"),
        ("d8", "all", "The layout keeps copies; shards would cut them: f8"),
        ("f8", "layers", "Wrap the root too: fully_shard(model) after its layers"),
    ],
)
def test_what_would_cut_what_is_whole(layout, wrap, remedy):
    found = audit_layout(ModelShape.of("Qwen/Qwen3-30B-A3B"), Layout.parse(layout), wrap=wrap)
    whole = next(one for one in found.findings if one.kind == "replicated")
    assert whole.fix == remedy
    if "would" in remedy:  # and it does
        better = audit_layout(ModelShape.of("Qwen/Qwen3-30B-A3B"), Layout.parse(remedy.rpartition(" ")[2]))
        assert not any(one.kind == "replicated" for one in better.findings)
