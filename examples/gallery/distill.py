"""On-policy distillation: a teacher grades every token of the student's own answers.

Paper: arXiv 2306.13649.

Beside GRPO: no reward: at each token the student is pulled towards the teacher's distribution, over its k likeliest
tokens.
"""

import flowrl as fr
from flowrl_operators import losses


@fr.flow
def distill(prompts, student, teacher, *, k=64):
    rows = fr.rollout(student, prompts)
    rows = fr.top_logprobs(teacher, rows, k=k, out="teacher")
    return fr.update(student, rows, loss=losses.reverse_kl())
