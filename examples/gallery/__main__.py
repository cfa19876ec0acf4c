"""`python -m examples.gallery NAME`: run an algorithm of the gallery on its tiny task and print how it learns.

Without a name every one is run. `--page` prints the gallery's page instead.
"""

import argparse
import inspect
import re
import sys
from pathlib import Path

from examples.gallery.runs import RUNS, TinyRun

TOP = """\
# Gallery

Each algorithm is a flow of a few lines. Those below are files in `examples/gallery`; tests run every one on the null engine and
on a model of 15,000 parameters, where its reward must rise or its loss fall. See one learn:

```console
$ python -m examples.gallery grpo
```

Rewards are `rewards.exact` here; any other operator that writes `reward` takes its place. What a function does, from which paper
it is and which options others choose, its docstring says: `flowrl ops show core.group_norm`.
"""


def section(run: TinyRun) -> str:
    """The part of the page about one algorithm, from its file."""
    module = sys.modules[run.flow.function.__module__]
    title, paper, apart = (" ".join(part.split()) for part in inspect.getdoc(module).split("\n\n", 2))
    number = re.search(r"\d{4}\.\d{5}", paper)[0]
    code = Path(module.__file__).read_text().rpartition('"""\n\n')[2].rstrip()
    paper = f"[arXiv {number}](https://arxiv.org/abs/{number})"
    return f"## {title.rstrip('.')}\n\n{paper}. {apart}\n\n```python\n{code}\n```\n"


def page() -> str:
    """The gallery as Markdown."""
    return "\n".join([TOP, *(section(run) for run in RUNS.values())])


def show(run: TinyRun, seed: int) -> None:
    """Run it and print its metric, ten points of it."""
    done = run.run(seed=seed)
    curve = run.curve(done)
    points = curve[:: max(len(curve) // 10, 1)]
    print(f"{run.name:14} {run.metric:12} {'  '.join(f'{value:6.3f}' for value in points)}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.gallery", description="Algorithms on a tiny task.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(RUNS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", action="store_true", help="print the gallery's page")
    options = parser.parse_args()
    unknown = [name for name in options.names if name not in RUNS]
    if unknown:
        parser.error(f"no algorithm {unknown[0]!r}; there are {', '.join(RUNS)}")
    if options.page:
        print(page(), end="")
        return
    for name in options.names or RUNS:
        show(RUNS[name], options.seed)


if __name__ == "__main__":
    main()
