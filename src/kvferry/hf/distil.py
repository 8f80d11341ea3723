"""Training a small model on what a larger one predicts, in the memory of a few hundred tokens' logits.

What makes it cheap on a CPU: the logits of a vocabulary of tens of thousands in pieces, whose gradient is written down
while they are there and which are then dropped; embeddings and head left as the teacher's, so that nothing is
propagated into them; products in bfloat16 (`kvferry.hf.train` keeps the weights in float32).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvferry.errors import InvalidInput
from kvferry.hf.prune import watched_states
from kvferry.hf.train import Loss

_PIECE = 256
"""Tokens whose logits are held at once."""


class _HeadKL(torch.autograd.Function):
    """Mean KL of the student's next-token distributions from the teacher's, a piece of tokens at a time."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Float[Tensor, "tokens hidden"],
        head: Float[Tensor, "vocab hidden"],
        taught: Float[Tensor, "tokens taught"],
        teacher_head: Float[Tensor, "vocab taught"],
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        gradient = torch.empty_like(hidden)
        for start in range(0, hidden.shape[0], _PIECE):
            piece = slice(start, start + _PIECE)
            said = torch.log_softmax((hidden[piece] @ head.T).float(), dim=-1)
            want = torch.log_softmax((taught[piece] @ teacher_head.T).float(), dim=-1)
            chance = want.exp()
            # Summed in float64: in pieces of millions of terms, float32 would lose the last digits of the loss.
            total += (chance * want.sub_(said)).sum(dim=-1).double().sum()
            if ctx.needs_input_grad[0]:
                gradient[piece] = said.exp_().sub_(chance).to(head.dtype) @ head
        ctx.save_for_backward(gradient.div_(hidden.shape[0]))
        return (total / hidden.shape[0]).float()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None, None, None


def head_kl(
    hidden: Float[Tensor, "tokens hidden"],
    head: Float[Tensor, "vocab hidden"],
    taught: Float[Tensor, "tokens taught"],
    teacher_head: Float[Tensor, "vocab taught"],
) -> Tensor:
    """Mean KL of the next-token distributions of last states ``hidden`` from those of ``taught``, with a gradient to
    ``hidden`` alone."""
    found: Tensor = _HeadKL.apply(hidden, head, taught, teacher_head)  # type: ignore[no-untyped-call]
    return found


def distillation(
    teacher: PreTrainedModel, student: PreTrainedModel, kept: Sequence[int], *, states_weight: float
) -> tuple[dict[str, nn.Parameter], Loss]:
    """What of ``student`` is trained (its layers and last norm; embeddings and head stay), and the loss.

    The loss is the mean KL of the student's predictions from the teacher's, and ``states_weight`` times the mean
    squared distance of the states before each of the student's layers but the first from those before the same layer
    of the teacher, relative to the square of the latter, token by token (the first tokens' states are hundreds of
    times the others').

    Args:
        teacher: the parent.
        student: its child, with the parent's layers ``kept``.
        kept: of the parent's layers.
        states_weight: of the states; 0 leaves them out.

    Raises:
        InvalidInput: a model whose logits are not its last states times its head.
    """
    heads = [head_of(model) for model in (student, teacher)]
    for parameter in (*teacher.parameters(), *student.parameters()):
        parameter.requires_grad_(False)
    fixed = {id(module.weight) for module in (student.get_input_embeddings(), student.get_output_embeddings())}
    weights = {name: weight for name, weight in student.named_parameters() if id(weight) not in fixed}
    for weight in weights.values():
        weight.requires_grad_(True)

    def loss_of(ids: Tensor) -> Tensor:
        with watched_states(teacher) as taught, torch.no_grad():
            want = teacher.base_model(input_ids=ids, use_cache=False).last_hidden_state
        with watched_states(student) as states:
            said = student.base_model(input_ids=ids, use_cache=False).last_hidden_state
        loss = head_kl(said.flatten(0, 1), heads[0], want.flatten(0, 1), heads[1])
        if states_weight:
            far = [
                relative_distance(states[place], taught[index])
                for place, index in enumerate(kept)
                if 0 < place < len(states)
            ]
            loss = loss + states_weight * torch.stack(far).mean()
        return loss

    return weights, loss_of


@torch.no_grad()
def divergence(
    student: PreTrainedModel, windows: Int[Tensor, "windows tokens"], taught: Float[Tensor, "windows tokens hidden"]
) -> float:
    """Mean KL, in nats, of the student's predictions from those that its head makes of the last states ``taught``."""
    head, total = head_of(student), 0.0
    for window, want in zip(windows, taught, strict=True):
        said = student.base_model(input_ids=window[None], use_cache=False).last_hidden_state[0]
        total += float(head_kl(said, head, want, head))
    return total / windows.shape[0]


def relative_distance(states: Tensor, taught: Tensor) -> Tensor:
    """Mean squared distance of states, each token's relative to the square of what it should be."""
    want = taught.float()
    return ((states.float() - want).square().sum(-1) / want.square().sum(-1).clamp_min(1e-6)).mean()


def head_of(model: PreTrainedModel) -> Tensor:
    """The weight of a model's head."""
    head: Any = model.get_output_embeddings()
    what = f"the logits of a {type(model).__name__}"
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        raise InvalidInput(f"{what} are not its last states times one matrix: it cannot be distilled")
    ids = torch.arange(8, device=model.device).remainder(head.weight.shape[0])[None]
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
        plain = head(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    if not torch.allclose(logits.float(), plain.float(), rtol=0.02, atol=0.02 * float(logits.abs().max())):
        raise InvalidInput(f"{what} are scaled or capped after its head: it cannot be distilled")
    return head.weight


@torch.no_grad()
def cross_entropy(model: PreTrainedModel, windows: Int[Tensor, "windows tokens"]) -> float:
    """Mean negative log-likelihood, in nats, of every token of the windows but the first of each."""
    head = head_of(model).float()
    total = 0.0
    for window in windows:
        hidden = model.base_model(input_ids=window[None], use_cache=False).last_hidden_state[0, :-1]
        for states, targets in zip(hidden.split(_PIECE), window[1:].split(_PIECE), strict=True):
            logits = states.float() @ head.T
            total += float(nn.functional.cross_entropy(logits, targets, reduction="sum").double())
    return total / (windows.shape[0] * (windows.shape[1] - 1))
