"""The state of one model in a folder, by torch.distributed.checkpoint: written from one layout, read into any other.

    state.json               version, optimizer steps taken, shapes of the parameters
    .metadata, __0_0.distcp  weights, buffers and the optimizer's state: each process its own part; none for an unchanged model

A model that no node changes is opened from its source again, so nothing of its weights is written.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from flowrl.errors import EngineError

if TYPE_CHECKING:
    from flowrl.engines.host_torch import TorchHost

ABOUT = "state.json"
WEIGHTS, OPTIMIZER = "weights", "optimizer"


def write(host: TorchHost, folder: Path, *, group: dist.ProcessGroup | None, is_first: bool) -> None:
    """Write a model. Every rank of the group calls it; without one, this process is alone.

    Args:
        is_first: whether this rank writes what is not a tensor.

    Errors: EngineError with what the file system said.
    """
    is_unchanged = host.version == 0 and host.trainer is None
    with _told(f"the state of model '{host.name}' cannot be written to '{folder}'"):
        folder.mkdir(parents=True, exist_ok=True)
        if is_first:
            about = {
                "version": host.version,
                "steps": 0 if host.trainer is None else host.trainer.steps,
                "has_masters": host.weights.has_masters,
                "is_unchanged": is_unchanged,
                "shapes": _digest(host),
            }
            (folder / ABOUT).write_text(json.dumps(about), encoding="utf-8")
        if not is_unchanged:
            save(_tensors(host), checkpoint_id=str(folder), process_group=group, no_dist=group is None)


def read(host: TorchHost, folder: Path, *, group: dist.ProcessGroup | None) -> None:
    """Take what `write` has written, from however many processes. Every rank of the group calls it.

    Errors: EngineError for a folder that cannot be read, and for a model of other parameters, which it names.
    """
    whose = f"the checkpoint in '{folder}'"
    with _told(f"{whose} cannot be read", " It is damaged, or not all of it was copied: resume from another one."):
        about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        steps, version = int(about["steps"]), int(about["version"])
        found = None if about["is_unchanged"] else FileSystemReader(str(folder)).read_metadata()
    if found is not None:
        if about["has_masters"]:  # an average in bf16 goes on from its fp32 masters
            host.weights.make_masters(host.weights.dtype)
        _match(host, found, whose)
        state = _tensors(host)
        with _told(f"{whose} cannot be read", " It is damaged, or not all of it was copied: resume from another one."):
            load(state, checkpoint_id=str(folder), process_group=group, no_dist=group is None)
        host.weights.publish()
        if host.trainer is not None:
            host.trainer.store.took(state[OPTIMIZER])
    elif about["shapes"] != _digest(host):
        raise EngineError(
            f"{whose} is of another model '{host.name}' than this one: parameters have other names or shapes; resume with the "
            "models that the run was started with"
        )
    if host.trainer is not None:
        host.trainer.steps = steps
    host.version = version


def _tensors(host: TorchHost) -> dict[str, Any]:
    """What this process holds: the tensors themselves, to be read from and written into."""
    weights = host.weights
    state: dict[str, Any] = {
        WEIGHTS: {name: master.detach() for name, master in weights.masters.items()},
        "buffers": dict(weights.buffers),
    }
    if host.trainer is not None:
        state[OPTIMIZER] = host.trainer.store.held()
    return state


def _match(host: TorchHost, found: Metadata, whose: str) -> None:
    """Errors: EngineError where parameters, or those that train, are others."""
    sizes = {
        name: tuple(one.size)
        for name, one in found.state_dict_metadata.items()
        if isinstance(one, TensorStorageMetadata)
    }
    start = f"{WEIGHTS}."
    host.weights.match({n.removeprefix(start): size for n, size in sizes.items() if n.startswith(start)}, whose)
    trained: Mapping[str, Any] = {} if host.trainer is None else host.trainer.trained
    lacking = [name for name in trained if f"{OPTIMIZER}.{name}.exp_avg" not in sizes]
    if lacking:
        raise EngineError(
            f"{whose} has no state of the optimizer for parameter '{lacking[0]}', which model '{host.name}' trains; resume with "
            "the models that the run was started with"
        )


def _digest(host: TorchHost) -> str:
    """Of names and shapes of the parameters."""
    shapes = sorted((name, tuple(tensor.shape)) for name, tensor in host.weights.masters.items())
    return hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest()


@contextmanager
def _told(what: str, hint: str = "") -> Iterator[None]:
    """Errors of the file system and of torch as one of ours; that of torch is no Exception."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
            yield
    except CheckpointException as error:
        rank, (first, _) = min(error.failures.items())
        raise EngineError(f"{what}: {type(first).__name__} on its rank {rank}: {first}.{hint}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{what}: {type(error).__name__}: {error}.{hint}") from error
