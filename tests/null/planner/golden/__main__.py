"""`python -m tests.null.planner.golden [CASE ...]` writes pinned plans anew; what changed is seen in review.

It prints the name of each case whose files differ from before.
"""

import sys

from tests.null.planner.golden.cases import CASES
from tests.null.planner.golden.files import DATA, contents


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in CASES]
    if unknown:
        print(f"no such case: {', '.join(unknown)}; there are {', '.join(CASES)}", file=sys.stderr)
        return 2
    DATA.mkdir(exist_ok=True)
    for name in names or CASES:
        for path, text in contents(name, CASES[name]).items():
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")
                print(f"written: {path.name}")
    for path in DATA.glob("*"):
        if path.stem not in CASES:
            path.unlink()
            print(f"removed: {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
