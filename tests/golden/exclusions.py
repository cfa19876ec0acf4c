"""Conventions of other systems that none of our operators answers, on purpose: a plain fault, or a quirk nobody would choose.

(piece, convention) -> what it does and why we do not. A test holds the list to a sixth of all conventions.
"""

EXCLUDED: dict[tuple[str, str], str] = {}
