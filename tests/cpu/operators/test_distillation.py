"""Distillation: limits, what a cut vocabulary does, extremes, the policy gradient of the reverse KL."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flowrl as fr
from examples.tiny import tiny_model
from flowrl.errors import ConfigError, DataError, OperatorError
from flowrl_operators import advantages, losses

F64 = torch.float64


@pytest.fixture
def logits() -> tuple[Tensor, Tensor]:
    """Student and teacher, 6 tokens over 9 words."""
    generator = torch.Generator().manual_seed(1)
    student, teacher = (2 * torch.randn(6, 9, dtype=F64, generator=generator) for _ in range(2))
    return student.requires_grad_(), teacher


def kl(p: Tensor, q: Tensor) -> Tensor:
    p, q = p.log_softmax(-1), q.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def slope(value: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(value.sum(), leaf)[0]


def test_ends_of_the_jensen_shannon_divergence_are_the_two_kls(logits: tuple[Tensor, Tensor]) -> None:
    student, teacher = logits
    torch.testing.assert_close(losses.jsd(student, teacher, beta=0.0)[0], kl(teacher, student))
    torch.testing.assert_close(losses.jsd(student, teacher, beta=1.0)[0], kl(student, teacher))


def test_divided_by_its_weight_it_tends_to_them_and_itself_to_0(logits: tuple[Tensor, Tensor]) -> None:
    student, teacher = logits
    small = 1e-6
    near_forward, near_reverse = (losses.jsd(student, teacher, beta=b)[0] for b in (small, 1 - small))
    torch.testing.assert_close(near_forward / small, kl(teacher, student), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(near_reverse / small, kl(student, teacher), rtol=1e-3, atol=1e-4)
    assert near_forward.max() < 1e-4 and near_reverse.max() < 1e-4
    torch.testing.assert_close(
        slope(near_forward / small, student), slope(kl(teacher, student), student), rtol=1e-2, atol=1e-4
    )


def test_it_is_symmetric_bounded_and_0_at_the_teacher(logits: tuple[Tensor, Tensor]) -> None:
    student, teacher = logits
    for beta in (0.1, 0.5, 0.9):
        value, _ = losses.jsd(student, teacher, beta=beta)
        other, _ = losses.jsd(teacher, student, beta=1 - beta)
        torch.testing.assert_close(value, other)
        bound = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
        assert (value > 0).all() and (value < bound).all()
        agreed, _ = losses.jsd(teacher.clone().requires_grad_() + 3.0, teacher, beta=beta)
        torch.testing.assert_close(agreed, torch.zeros_like(agreed))


def test_temperature_divides_both_logits(logits: tuple[Tensor, Tensor]) -> None:
    student, teacher = logits
    warm, metrics = losses.jsd(student, teacher, beta=0.0, temperature=2.0)
    torch.testing.assert_close(warm, kl(teacher / 2, student / 2))
    ours = (student / 2).log_softmax(-1)
    torch.testing.assert_close(metrics["student_entropy"], -(ours.exp() * ours).sum(-1).detach())


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_divergence_is_finite_however_far_apart(beta: float, dtype: torch.dtype) -> None:
    student = torch.tensor([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    teacher = torch.tensor([[-1e4, 0.0, 1e4], [1e4, 0.0, 0.0]], dtype=dtype)
    value, _ = losses.jsd(student, teacher, beta=beta)
    assert value.isfinite().all() and slope(value, student).isfinite().all()


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_word_that_both_exclude_is_not_there(beta: float, logits: tuple[Tensor, Tensor]) -> None:
    student, teacher = logits
    padding = torch.full((6, 2), -math.inf, dtype=F64)
    wide = torch.cat([student.detach(), padding], 1).requires_grad_()
    value, _ = losses.jsd(wide, torch.cat([teacher, padding], 1), beta=beta)
    plain, _ = losses.jsd(student, teacher, beta=beta)
    torch.testing.assert_close(value, plain)
    torch.testing.assert_close(slope(value, wide)[:, :9], slope(plain, student))
    assert (slope(losses.jsd(wide, torch.cat([teacher, padding], 1), beta=beta)[0], wide)[:, 9:] == 0).all()


@pytest.mark.parametrize("outside", ["bucket", "renormalise"])
@pytest.mark.parametrize(("beta", "temperature"), [(0.0, 1.0), (0.3, 1.0), (0.3, 2.0), (1.0, 0.5)])
def test_all_words_of_the_teacher_give_the_whole_jensen_shannon_divergence(
    outside: str, beta: float, temperature: float, logits: tuple[Tensor, Tensor]
) -> None:
    student, teacher = logits
    top, ids = teacher.log_softmax(-1).topk(9, -1)
    whole, said = losses.jsd(student, teacher, beta=beta, temperature=temperature)
    value, metrics = losses.jsd(student, None, ids, top, beta=beta, temperature=temperature, outside=outside)
    torch.testing.assert_close(value, whole)
    torch.testing.assert_close(slope(value, student), slope(whole, student))
    torch.testing.assert_close(metrics["student_entropy"], said["student_entropy"])


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_a_bucket_bounds_the_jensen_shannon_divergence_from_below(beta: float, logits: tuple[Tensor, Tensor]) -> None:
    student, teacher = logits
    whole, _ = losses.jsd(student, teacher, beta=beta)
    before = torch.zeros(6, dtype=F64)
    for k in (1, 3, 6, 9):
        top, ids = teacher.log_softmax(-1).topk(k, -1)
        value, _ = losses.jsd(student, None, ids, top, beta=beta)
        assert (value >= before - 1e-12).all() and (value <= whole + 1e-6).all()
        before = value.detach()
        agreed, _ = losses.jsd(teacher.clone().requires_grad_(), None, ids, top, beta=beta)
        torch.testing.assert_close(agreed, torch.zeros_like(agreed), rtol=0, atol=1e-12)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_scaled_to_the_teachers_words_only_these_are_compared(
    temperature: float, logits: tuple[Tensor, Tensor]
) -> None:
    student, teacher = logits
    top, ids = teacher.log_softmax(-1).topk(4, -1)
    value, _ = losses.jsd(student, None, ids, top, temperature=temperature, outside="renormalise")
    wanted, _ = losses.jsd(student.gather(-1, ids), teacher.gather(-1, ids), temperature=temperature)
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(slope(value, student), slope(wanted, student))


def test_the_jensen_shannon_divergence_at_a_temperature_needs_to_know_the_other_words(
    logits: tuple[Tensor, Tensor],
) -> None:
    student, teacher = logits
    top, ids = teacher.log_softmax(-1).topk(4, -1)
    with pytest.raises(ConfigError, match=r"temperature=2\.0\) over the teacher's 4 likeliest of 9 .*'renormalise'"):
        losses.jsd(student, None, ids, top, temperature=2.0)
    with pytest.raises(ConfigError, match="outside is one of bucket, renormalise; found 'ignore'"):
        losses.jsd(outside="ignore")
    with pytest.raises(DataError, match="of the student's vocabulary, 0 to 8"):
        losses.jsd(student, None, ids + 9, top)


def test_the_jensen_shannon_divergence_without_a_teacher_says_what_writes_one(logits: tuple[Tensor, Tensor]) -> None:
    student, teacher = logits
    for columns in ({}, {"teacher_ids": teacher.argsort(-1)}, {"teacher_logprobs": teacher.log_softmax(-1)}):
        with pytest.raises(
            ConfigError, match=r"'teacher_ids' and 'teacher_logprobs', or .* fr\.top_logprobs\(teacher, rows"
        ):
            losses.jsd(student, **columns)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bucket_of_the_jensen_shannon_divergence_stays_finite(dtype: torch.dtype) -> None:
    student = torch.tensor([[1e4, 0.0, -1e4], [0.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    top, ids = torch.tensor([[-1e4, 0.0, 1e4], [1e4, 0.0, 0.0]]).log_softmax(-1).topk(2, -1)
    for beta in (0.0, 0.3, 1.0):
        value, _ = losses.jsd(student, None, ids, top, beta=beta)
        assert value.isfinite().all() and slope(value, student).isfinite().all()


def test_the_full_kl_is_the_reverse_kl_over_all_words(logits: tuple[Tensor, Tensor]) -> None:
    student, reference = logits
    top, ids = reference.log_softmax(-1).topk(9, -1)
    value, _ = losses.reverse_kl(student, ids, top)
    wanted, _ = losses.full_kl(student, reference)
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(slope(value, student), slope(wanted, student))


@pytest.mark.parametrize("outside", ["bucket", "renormalise", "ignore"])
def test_all_words_give_the_whole_divergence(outside: str, logits: tuple[Tensor, Tensor]) -> None:
    student, teacher = logits
    top, ids = teacher.log_softmax(-1).topk(9, -1)
    for loss, whole in ((losses.forward_kl, kl(teacher, student)), (losses.reverse_kl, kl(student, teacher))):
        value, metrics = loss(student, ids, top, outside=outside)
        torch.testing.assert_close(value, whole)
        torch.testing.assert_close(slope(value, student), slope(whole, student))
        torch.testing.assert_close(metrics["inside_mass"], torch.ones(6, dtype=F64))
    floored, _ = losses.reverse_kl(student, ids, top, outside="floor")
    torch.testing.assert_close(floored, kl(student, teacher))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_a_bucket_bounds_the_divergence_from_below(direction: str, logits: tuple[Tensor, Tensor]) -> None:
    student, teacher = logits
    loss = losses.forward_kl if direction == "forward" else losses.reverse_kl
    whole = kl(teacher, student) if direction == "forward" else kl(student, teacher)
    before = torch.zeros(6, dtype=F64)
    for k in (1, 3, 6, 9):
        top, ids = teacher.log_softmax(-1).topk(k, -1)
        value, _ = loss(student, ids, top)
        assert (value >= before - 1e-12).all() and (value <= whole + 1e-6).all()  # more words, more seen
        before = value.detach()
        agreed, _ = loss(teacher.clone().requires_grad_(), ids, top)
        torch.testing.assert_close(agreed, torch.zeros_like(agreed), rtol=0, atol=1e-12)


def test_renormalised_divergence_does_not_see_the_other_words(logits: tuple[Tensor, Tensor]) -> None:
    student, teacher = logits
    top, ids = teacher.log_softmax(-1).topk(3, -1)
    away = student.detach().clone()
    away.scatter_(-1, teacher.argmin(-1, keepdim=True), 9.0)
    for loss in (losses.forward_kl, losses.reverse_kl):
        moved, _ = loss(away.requires_grad_(), ids, top, outside="renormalise")
        torch.testing.assert_close(moved, loss(student, ids, top, outside="renormalise")[0])
        assert (loss(away, ids, top)[0] > loss(student, ids, top)[0]).any()


def test_a_floor_drives_the_student_out_of_the_other_words(logits: tuple[Tensor, Tensor]) -> None:
    student, teacher = logits
    top, ids = teacher.log_softmax(-1).topk(3, -1)
    value, metrics = losses.reverse_kl(student, ids, top, outside="floor", floor=-50.0)
    padded = torch.full((6, 9), -50.0, dtype=F64).scatter(-1, ids, top)
    ours = student.log_softmax(-1)
    torch.testing.assert_close(value, (ours.exp() * (ours - padded)).sum(-1))
    # a step against the gradient moves probability into the teacher's words
    stepped = (student - 0.01 * slope(value, student)).log_softmax(-1).gather(-1, ids).exp().sum(-1)
    assert (stepped > metrics["inside_mass"]).all()


def test_both_directions_mix_as_a_sum(logits: tuple[Tensor, Tensor]) -> None:
    student, teacher = logits
    top, ids = teacher.log_softmax(-1).topk(3, -1)
    columns = {"logits": student[:, None], "teacher_ids": ids[:, None], "teacher_logprobs": top[:, None]}
    mixed, _ = fr.apply_loss(0.3 * losses.forward_kl() + 0.7 * losses.reverse_kl(), columns, torch.ones(6, 1))
    wanted = 0.3 * losses.forward_kl(student, ids, top)[0] + 0.7 * losses.reverse_kl(student, ids, top)[0]
    torch.testing.assert_close(mixed, wanted.mean())


def test_log_probabilities_held_from_below_have_no_gradient_there() -> None:
    student = torch.tensor([[0.0, -9.0, 0.0]], dtype=F64, requires_grad=True)
    ids = torch.tensor([[1]])
    value, _ = losses.forward_kl(student, ids, torch.tensor([[-0.1]], dtype=F64), outside="ignore", min_logprob=-3.0)
    assert value.item() == pytest.approx(math.exp(-0.1) * (-0.1 + 3.0))
    assert (slope(value, student) == 0).all()


@pytest.mark.parametrize("name", ["forward_kl", "reverse_kl"])
def test_cut_divergences_are_finite_however_far_apart(name: str) -> None:
    for outside in ("bucket", "renormalise", "ignore"):
        student = torch.tensor([[1e4, 0.0, -1e4, 0.0], [0.0, 0.0, 0.0, 1e4]], requires_grad=True)
        teacher = torch.tensor([[-1e4, 0.0, 1e4, 0.0], [1e4, 0.0, 0.0, -1e4]]).log_softmax(-1)
        top, ids = teacher.topk(2, -1)
        value, _ = getattr(losses, name)(student, ids, top, outside=outside)
        assert value.isfinite().all() and slope(value, student).isfinite().all()


def test_policy_gradient_is_that_of_the_reverse_kl(logits: tuple[Tensor, Tensor]) -> None:
    """Every word weighed by its probability: the expected gradient, on policy."""
    student, teacher = logits
    ours, theirs = student.log_softmax(-1), teacher.log_softmax(-1)
    sampled = ours.detach()
    value, metrics = losses.distillation_gradient(ours, sampled, theirs)
    torch.testing.assert_close(slope(sampled.exp() * value, student), slope(kl(student, teacher), student))
    torch.testing.assert_close((sampled.exp() * metrics["reverse_kl"]).sum(-1), kl(student, teacher).detach())


def test_policy_gradient_off_policy_is_weighed_to_the_student(logits: tuple[Tensor, Tensor]) -> None:
    student, teacher = logits
    ours, theirs = student.log_softmax(-1), teacher.log_softmax(-1)
    sampled = torch.zeros_like(ours) - math.log(9)  # any other policy
    value, _ = losses.distillation_gradient(ours, sampled, theirs)
    torch.testing.assert_close(slope(sampled.exp() * value, student), slope(kl(student, teacher), student))


def test_words_that_fell_too_far_are_left_out() -> None:
    student = torch.tensor([0.4, 0.4, 0.9], dtype=F64).log().requires_grad_()
    sampled, teacher = (torch.tensor(p, dtype=F64).log() for p in ([0.7, 0.5, 0.2], [0.1, 0.1, 0.1]))
    value, metrics = losses.distillation_gradient(student, sampled, teacher, max_drop=0.2)
    assert metrics["dropped"].tolist() == [1.0, 0.0, 0.0]
    gradient = slope(value, student)
    assert gradient[0].item() == 0 and (gradient[1:] > 0).all()  # the teacher likes them less: down


def test_policy_gradient_is_finite_and_follows_the_sign_of_the_teacher() -> None:
    student = torch.tensor([-1e4, -0.1, -0.1], requires_grad=True)
    value, _ = losses.distillation_gradient(
        student, torch.tensor([-0.1, -1e4, -0.1]), torch.tensor([-0.1, -1e4, -0.05])
    )
    gradient = slope(value, student)
    assert value.isfinite().all() and gradient.isfinite().all() and gradient[2] < 0


def test_advantage_of_distillation() -> None:
    teacher = fr.Ragged.of([[-1.0, -2.0, np.nan], [-np.inf], []], dtype=float)
    student = fr.Ragged.of([[-3.0, -1.0, -1.0], [-1.0], []], dtype=float)
    mask = fr.Ragged.of([[1, 1, 1], [1], []], dtype=bool)
    assert advantages.distillation(teacher, student, mask).to_list() == [[2.0, -1.0, 0.0], [0.0], []]
    assert advantages.distillation(teacher, student, mask, clip=1.5).to_list() == [[1.5, -1.0, 0.0], [0.0], []]
    half = fr.Ragged.of([[0, 1, 1], [1], []], dtype=bool)
    assert advantages.distillation(teacher, student, half).to_list()[0] == [0.0, -1.0, 0.0]
    with pytest.raises(ConfigError, match="clip > 0 or None; found 0"):
        advantages.distillation(teacher, student, mask, clip=0)


def test_advantage_and_loss_pull_alike_on_policy() -> None:
    student, teacher = torch.tensor([-1.0, -2.0], dtype=F64, requires_grad=True), torch.tensor([-2.0, -0.5], dtype=F64)
    direct, _ = losses.distillation_gradient(student, student.detach(), teacher)
    row = [fr.Ragged.of([x.detach().tolist()]) for x in (teacher, student)]
    advantage = advantages.distillation(*row, fr.Ragged.of([[True, True]]))
    other = losses.reinforce(student, torch.tensor(advantage.values))
    torch.testing.assert_close(slope(direct, student), slope(other, student))


def test_what_makes_no_sense_is_refused(logits: tuple[Tensor, Tensor]) -> None:
    student, teacher = logits
    top, ids = teacher.log_softmax(-1).topk(3, -1)
    with pytest.raises(ConfigError, match="0 <= beta <= 1 and temperature > 0; found beta=1.5"):
        losses.jsd(student, teacher, beta=1.5)
    with pytest.raises(DataError, match=r"over one vocabulary; found \[6, 9\] and \[6, 8\]"):
        losses.jsd(student, teacher[:, :8])
    with pytest.raises(ConfigError, match="forward_kl: outside is one of bucket, renormalise, ignore; found 'floor'"):
        losses.forward_kl(student, ids, top, outside="floor")
    with pytest.raises(ConfigError, match="reverse_kl: outside is one of bucket, .*, floor; found 'zero'"):
        losses.reverse_kl(student, ids, top, outside="zero")


def test_no_token_is_no_loss() -> None:
    columns = {"logits": torch.zeros(2, 3, 4, requires_grad=True), "teacher_logits": torch.zeros(2, 3, 4)}
    value, _ = fr.apply_loss(losses.jsd(), columns, torch.zeros(2, 3))
    assert value.item() == 0 and (torch.autograd.grad(value, columns["logits"])[0] == 0).all()


def test_flows_of_distillation_have_no_problem() -> None:
    @fr.flow
    def cut(prompts, student, teacher, *, k=8):  # type: ignore[no-untyped-def]
        rows = fr.top_logprobs(teacher, fr.rollout(student, prompts), k=k, out="teacher")
        return fr.update(student, rows, loss=0.5 * losses.forward_kl() + 0.5 * losses.reverse_kl())

    @fr.flow
    def gradient(prompts, student, teacher):  # type: ignore[no-untyped-def]
        rows = fr.logprobs(teacher, fr.rollout(student, prompts), out="teacher_logprobs")
        return fr.update(student, rows, loss=losses.distillation_gradient())

    @fr.flow
    def by_advantage(prompts, student, teacher):  # type: ignore[no-untyped-def]
        rows = fr.logprobs(teacher, fr.rollout(student, prompts), out="teacher_logprobs")
        return fr.update(student, advantages.distillation(rows), loss=losses.ppo_clip(0.2))

    for flow in (cut, gradient, by_advantage):
        assert flow.check() == (), flow


@pytest.mark.parametrize("loss", [losses.forward_kl, losses.reverse_kl])
def test_ids_of_another_vocabulary_are_refused(logits: tuple[Tensor, Tensor], loss: Any) -> None:
    student, _ = logits
    ids, logprobs = torch.arange(3).repeat(6, 1), torch.full((6, 3), -2.0, dtype=F64)
    assert loss(student, ids, logprobs)[0].shape == (6,)
    for wrong, found in ((ids + 7, "7 to 9"), (ids - 1, "-1 to 1")):
        with pytest.raises(DataError, match=f"teacher_ids of the student's vocabulary, 0 to 8; found {found}"):
            loss(student, wrong, logprobs)
    with pytest.raises(DataError, match=r"of one shape, .* found \[6, 3\] and \[6, 2\]"):
        loss(student, ids, logprobs[:, :2])
    with pytest.raises(DataError, match=r"k at most the vocabulary, 9; found \[6, 12\]"):
        loss(student, torch.zeros(6, 12, dtype=torch.int64), torch.zeros(6, 12))


def test_a_model_learns_by_the_jensen_shannon_divergence_and_one_without_a_teacher_is_told() -> None:
    @fr.flow
    def taught(prompts, policy, teacher):  # type: ignore[no-untyped-def]
        rows = fr.top_logprobs(teacher, fr.rollout(policy, prompts, n=2), k=5, out="teacher")
        return fr.update(policy, rows, loss=losses.jsd())

    @fr.flow
    def untaught(prompts, policy):  # type: ignore[no-untyped-def]
        return fr.update(policy, fr.rollout(policy, prompts, n=2), loss=losses.jsd())

    options: dict[str, Any] = {"out": None, "progress": "off", "max_tokens": 4, "batch": 2}
    prompts = [{"prompt": "21="}, {"prompt": "31="}]
    fr.check(taught)
    done = fr.run_local(taught, prompts=prompts, policy=tiny_model(0), teacher=tiny_model(1), **options)
    assert 0 < done.metrics[-1]["update/divergence"] < math.log(2)
    with pytest.raises(OperatorError, match=r"jsd needs the teacher's 'teacher_ids' and .*fr\.top_logprobs"):
        fr.run_local(untaught, prompts=prompts, policy=tiny_model(0), **options)
