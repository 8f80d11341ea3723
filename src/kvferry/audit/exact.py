"""FP64 that is FP64: models cast to float32 inside, here and there; in this mode a float64 model does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_CASTS = (Tensor.to, Tensor.type)
_BELOW = (torch.float32, torch.float16, torch.bfloat16)


class Float64Mode(TorchFunctionMode):
    """Inside, whatever asks for a shorter float gets float64.

    RMS norms, softmax and rotary tables of most models are written as "in float32, whatever the model's dtype", for
    16-bit models; in a float64 model the same lines lose half of the digits. Use with float64 weights only.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if function is Tensor.float:
            return args[0].double()
        if named.get("dtype") in _BELOW:
            named["dtype"] = torch.float64
        if function in _CASTS:
            args = tuple(torch.float64 if isinstance(item, torch.dtype) and item in _BELOW else item for item in args)
        return function(*args, **named)
