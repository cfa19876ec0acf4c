"""Value and reward heads: a base transformer with one number per token.

Where Transformers has a class of that shape for the architecture (`...ForTokenClassification` for values,
`...ForSequenceClassification` for rewards, one label), that class holds the two parts, so that saved weights load there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

from flowrl.engines.modules import hidden_size
from flowrl.errors import EngineError

HEAD_NAMES = ("score", "classifier", "v_head", "value_head")
CLASSES = {"value": AutoModelForTokenClassification, "reward": AutoModelForSequenceClassification}


class ScalarModel(nn.Module):
    """Base transformer and linear head, for architectures that Transformers has no such class for."""

    def __init__(self, base: nn.Module, score: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.score = score

    @property
    def base_model(self) -> nn.Module:
        return self.base

    @property
    def config(self) -> Any:
        return self.base.config

    def forward(self, input_ids: Tensor, **options: Any) -> Tensor:
        """[B, L] to [B, L, 1]."""
        scores: Tensor = self.score(self.base(input_ids, **options)[0])
        return scores


def find_head(module: nn.Module) -> nn.Linear | None:
    """The linear head with one output that a module already has, if any."""
    for name in HEAD_NAMES:
        found = getattr(module, name, None)
        if isinstance(found, nn.Linear) and found.out_features == 1:
            return found
    return None


def with_head(name: str, module: nn.Module, kind: str, *, seed: int) -> tuple[nn.Module, bool]:
    """`module` with a scalar head, and whether the head is new (untrained).

    A module that has one is returned as it is. A new value head starts at zero, so that first predictions are 0 and not
    noise; a new reward head is drawn with standard deviation 1 / sqrt(H + 1) (Stiennon et al., arXiv 2009.01325), because
    with a zero head no gradient would reach the transformer at first.
    """
    if find_head(module) is not None:
        if isinstance(getattr(module, "base_model", None), nn.Module):
            return module, False
        raise EngineError(
            f"model '{name}' has a head, and {type(module).__name__} has no base_model from which its hidden states would come; "
            "give it a property base_model, a module whose first output is [B, L, H]"
        )
    base = getattr(module, "base_model", module)
    width = hidden_size(base)
    if width is None:
        raise EngineError(
            f"model '{name}' needs a {kind} head, and the hidden size of {type(base).__name__} is in no place known "
            "(config.hidden_size); give a module that has the head, as an nn.Linear with one output named 'score'"
        )
    parameter = next(base.parameters())
    holder = _holder(base, kind)
    if holder is None:
        holder = ScalarModel(base, nn.Linear(width, 1, bias=kind == "value"))
        head = holder.score
    else:
        head_name = next(child for child in HEAD_NAMES if isinstance(getattr(holder, child, None), nn.Linear))
        head = nn.Linear(width, 1, bias=getattr(holder, head_name).bias is not None)
        setattr(holder, head_name, head)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        weight = (
            torch.zeros(1, width)
            if kind == "value"
            else torch.randn(1, width, generator=generator) / math.sqrt(width + 1)
        )
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.zero_()
    head.to(parameter.device, parameter.dtype)
    return holder, True


def _holder(base: nn.Module, kind: str) -> Any:
    """An empty Transformers model of that shape around `base`; None when there is no such class."""
    config = getattr(base, "config", None)
    known = CLASSES[kind]._model_mapping
    if config is None or type(config) not in known:
        return None
    cls = known[type(config)]
    cls = cls[0] if isinstance(cls, tuple | list) else cls
    fields = {name: value for name, value in config.to_dict().items() if name not in ("id2label", "label2id")}
    config = type(config).from_dict({**fields, "num_labels": 1, "architectures": [cls.__name__]})
    with torch.device("meta"):  # only the shell is wanted; both parts with weights are put in
        shell = cls(config)
    prefix = shell.base_model_prefix
    if type(getattr(shell, prefix, None)) is not type(base):
        return None
    setattr(shell, prefix, base)
    return shell
