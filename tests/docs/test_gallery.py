"""The gallery's page is made of the files in `examples/gallery`: `python -m examples.gallery --page > docs/gallery.md`."""

from pathlib import Path

from examples.gallery.__main__ import page

ROOT = Path(__file__).parents[2]


def test_the_page_shows_what_is_run() -> None:
    assert (ROOT / "docs" / "gallery.md").read_text() == page()
