"""Conventions of other systems that none of our operators answers, on purpose: a plain fault, or a quirk nobody would choose.

(piece, convention) -> what it does and why we do not. A test holds the list to a sixth of all conventions.
"""

EXCLUDED: dict[tuple[str, str], str] = {
    (
        "math_equiv",
        "openrlhf.grade_answer",
    ): "two graders in a row, and either may say yes: a list of text replacements, and "
    "sympy on what is left. It says 1/2 is not 2/4, {1,2,3} is not {3,2,1}, and -3 is -3 in \\text. Use rewards.math",
    ("math_equiv", "slime.grade_answer_verl"): "the same two graders as openrlhf.grade_answer",
    ("math_equiv", "verl.math_dapo_minerva"): "equality of text after a list of replacements made for one benchmark's "
    "answers: \\frac{1}{2} is not 0.5, 7 is not 7.0, but -3 is -3 in \\text. Use rewards.math, or rewards.exact for text",
    (
        "math_equiv",
        "verl.math_reward_is_equiv",
    ): "equality of text after another list of replacements: 1,234 is not 1234, 1/2 is "
    "not 2/4, 50% is 50. Use rewards.math, or rewards.exact for text",
}
