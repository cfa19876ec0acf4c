"""One algorithm a file: the flow, its paper, and what sets it apart from GRPO. `docs/gallery.md` is made of these."""
