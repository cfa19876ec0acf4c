"""`python -m tests.golden CASE.json ...`: our operators against golden files. Exit status 1 when any case fails.

Prints per case: piece, convention, case, greatest relative error of outputs and of gradients, pass or fail. A folder stands
for the files in it; without arguments the files of this folder are taken. `--quiet` prints failures and the sum only.
"""

import sys
from collections import Counter
from pathlib import Path

from tests.golden.runner import run_file
from tests.golden.vectors import DATA


def main(arguments: list[str]) -> int:
    is_quiet = "--quiet" in arguments
    named = [Path(a) for a in arguments if a != "--quiet"] or [DATA]
    files = [file for path in named for file in (sorted(path.glob("*.json")) if path.is_dir() else [path])]
    states: Counter[str] = Counter()
    conventions = set()
    for file in files:
        try:
            verdicts = list(run_file(file))
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{file}: not a golden file: {type(error).__name__}: {error}")
            states["FAIL"] += 1
            continue
        for verdict in verdicts:
            states[verdict.state] += 1
            conventions.add((verdict.piece, verdict.convention))
            if verdict.state == "FAIL" or not is_quiet:
                print(verdict)
    parts = ", ".join(f"{states[state]} {word}" for state, word in WORDS.items() if states[state])
    print(f"{len(conventions)} conventions, {sum(states.values())} cases: {parts or 'nothing to run'}")
    return 1 if states["FAIL"] or not states else 0


WORDS = {"pass": "pass", "contract": "decided by our contract", "excluded": "excluded", "FAIL": "FAIL"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
