"""The models that arms run on: one set of weights, cast to the dtypes that arms ask for."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from kvferry.errors import InvalidInput
from kvferry.hf.identity import identity_of
from kvferry.hf.quiet import quiet
from kvferry.snapshot import dtype_from_name, dtype_name

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvferry.audit.arm import Arm
    from kvferry.snapshot import Identity


class ModelSet:
    """A model, and the same weights in other dtypes, cast when first asked for and kept.

    Casting up leaves every weight the number that it was, so that an arm in a longer dtype differs from the model in
    its arithmetic and its cache alone.
    """

    def __init__(self, model: PreTrainedModel):
        self.own = model
        self.dtype = dtype_name(model.dtype)
        self._cast: dict[str, PreTrainedModel] = {self.dtype: model}
        self._identities: dict[tuple[str, str], Identity] = {}

    def get(self, dtype: str | None = None) -> PreTrainedModel:
        """The model in ``dtype``."""
        name = self.dtype if dtype is None else dtype_name(dtype_from_name(dtype))
        if name not in self._cast:
            with quiet():
                self._cast[name] = copy.deepcopy(self.own).to(dtype_from_name(name)).eval()
        return self._cast[name]

    def release(self) -> None:
        """Forget the casts."""
        self._cast = {self.dtype: self.own}

    def identity(self, model: PreTrainedModel) -> Identity:
        """Of one of these models, hashed once a dtype and backend: their weights stay as they are between runs."""
        key = dtype_name(model.dtype), str(model.config._attn_implementation)
        if key not in self._identities:
            self._identities[key] = identity_of(model)
        return self._identities[key]

    @contextlib.contextmanager
    def use(self, arm: Arm) -> Iterator[PreTrainedModel]:
        """The model as ``arm`` runs it; backend and number of threads are as before on the way out.

        Raises:
            InvalidInput: an attention backend that the model does not take.
        """
        model = self.get(arm.dtype)
        with contextlib.ExitStack() as stack:
            if arm.threads is not None and arm.threads != torch.get_num_threads():
                stack.callback(torch.set_num_threads, torch.get_num_threads())
                torch.set_num_threads(arm.threads)
            if arm.accumulation is not None:
                stack.enter_context(_accumulation(reduced=arm.accumulation == "reduced"))
            if arm.attn is not None and arm.attn != model.config._attn_implementation:
                stack.enter_context(_backend(model, arm.attn))
            yield model


@contextlib.contextmanager
def _accumulation(*, reduced: bool) -> Iterator[None]:
    cuda = torch.backends.cuda.matmul
    before = (
        torch.get_float32_matmul_precision(),
        cuda.allow_bf16_reduced_precision_reduction,
        cuda.allow_fp16_reduced_precision_reduction,
    )

    def put(precision: str, bf16: bool, fp16: bool) -> None:
        torch.set_float32_matmul_precision(precision)
        cuda.allow_bf16_reduced_precision_reduction = bf16
        cuda.allow_fp16_reduced_precision_reduction = fp16

    put("medium" if reduced else "highest", reduced, reduced)
    try:
        yield
    finally:
        put(*before)


@contextlib.contextmanager
def _backend(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    try:
        with quiet():
            model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        raise InvalidInput(f"{type(model).__name__} has no attention backend {name!r}: {error}") from error
    try:
        yield
    finally:
        with quiet():
            model.set_attn_implementation(before)
