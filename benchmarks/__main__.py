"""Run a benchmark: `python -m benchmarks NAME [options]`; without a name, list them."""

from __future__ import annotations

import importlib
import os
import sys

BENCHMARKS = {
    "lines": "how long the flows of examples/ are",
    "graph": "import, building and checking a flow, a step without a model",
    "planner": "finding a plan: 3 roles on 8 devices, 5 roles on 64 and 512, and why nothing fits",
    "operators": "advantages over 8,192 groups and over 8 million tokens",
    "overhead": "a step of a flow against the same step written by hand",
    "shared_prompt": "an update that runs each prompt once, against whole rows",
    "predict": "predicted seconds and bytes of a sharded training step against measured ones (--tiny without a GPU)",
    "reshard": "weights from a trainer's shards into an engine's parameters on two GPUs (--tiny without)",
    "one_copy": "weights on the device twice, or once with reshard and offload: memory, samples/s on two GPUs (--tiny without)",
    "offload": "an optimizer streamed from host memory, on the CPU and resident; parking (--tiny without a GPU)",
    "pages": "pages of plans and of a run of 500 steps: bytes, and how long a browser takes (needs a Chromium)",
    "curve": "draw metrics of runs as an SVG (no measurement)",
    "tables": "the experience table against other stores, and what it promises (--prepare makes an environment for them)",
    "trl_grpo": "GRPO on a tiny model against TRL's GRPOTrainer (makes an environment of its own at first)",
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print("python -m benchmarks NAME [--quick] [--save] [options]      --help after a name lists its options\n")
        for name, what in BENCHMARKS.items():
            print(f"  {name:10} {what}")
        return 0
    if argv[0] not in BENCHMARKS:
        print(f"there is no benchmark '{argv[0]}'; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return int(importlib.import_module(f"benchmarks.{argv[0]}").main(argv[1:]) or 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
