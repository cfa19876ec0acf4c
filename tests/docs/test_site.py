"""The documentation builds in strict mode: no broken link, no page left out, no reference that is not found."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import markdown

ROOT = Path(__file__).parents[2]


def test_site_builds_strictly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "site" / "index.html").is_file()
    assert (tmp_path / "site" / "reference" / "index.html").is_file()


def test_links_within_a_page_lead_to_its_headings() -> None:
    """A strict build says nothing of an anchor that is not there."""
    text = (ROOT / "docs" / "explanation" / "where-systems-disagree.md").read_text(encoding="utf-8")
    anchors = set(re.findall(r'<h[23] id="([^"]*)"', markdown.markdown(text, extensions=["toc", "tables"])))
    wanted = set(re.findall(r"\]\(#([^)]*)\)", text))
    assert wanted <= anchors and len(wanted) > 40


def test_links_of_guides_work_in_a_checkout() -> None:
    """Pages of the reference that only a build of the site makes are not there for who reads the files."""
    kept = subprocess.run(
        ["git", "ls-files", "docs"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    pages = [ROOT / name for name in kept if name.startswith(("docs/tables/", "docs/how-to/")) and name.endswith(".md")]
    missing = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8"))
        if str((page.parent / target).resolve().relative_to(ROOT)) not in kept
    ]
    assert not missing and len(pages) > 20


def test_examples_of_docstrings_are_code() -> None:
    spec = importlib.util.spec_from_file_location("docstrings", ROOT / "docs" / "docstrings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = 'What it is.\n\nExample:\n    run.metrics[-1]["reward/mean"]\n\n    if x:\n        y\n\nArgs:\n    x: a number.\n'
    shown = '```python\nrun.metrics[-1]["reward/mean"]\n\nif x:\n    y\n```\n'
    assert module.fenced(text) == f"What it is.\n\n{shown}\nArgs:\n    x: a number.\n"
    assert module.fenced("An Example: here.\n") == "An Example: here.\n"
