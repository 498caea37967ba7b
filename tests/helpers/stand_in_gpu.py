"""A CPU that passes for a GPU of the Hopper generation: whole models take every kernel that they take there, interpreted.

Tensors say that they lie on a GPU. The device keeps its name, so nothing asks CUDA for anything, and products that a GPU leaves
to its library go to torch. Rounds are not captured, and results are read at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from batchspec.engine.rounds.graphs import Graphs
from batchspec.engine.rounds.records import PendingResult
from batchspec.kernels.common.dry_run import is_dry
from batchspec.model.layers.attention.padded import TorchPlan
from batchspec.tuning import policy

WIDE_IN_BF16 = {
    "verify_kernel", "verify_latents_kernel", "ordered_attention_kernel", "ordered_prefill_kernel", "ragged_prefill_kernel",
    "bidirectional_kernel",
}
"""Kernels that are told so that the interpreter must convert their operands."""


@contextmanager
def stand_in_gpu(*dtypes: torch.dtype) -> Iterator[Counter[str]]:
    """What is built and run in here takes the CPU for a GPU that has the kernels for models of these dtypes.

    Gives the number of launches of each kernel.
    """
    launch, launches = interpreter.GridExecutor.__call__, Counter[str]()

    def interpreted(executor: Any, *args: Any, **kwargs: Any) -> None:
        """A wrapper tells its kernel by the tensors whether it is interpreted."""
        given = {"INTERPRETED": True} | ({"WIDE": True} if executor.fn.__name__ in WIDE_IN_BF16 else {})
        launches[executor.fn.__name__] += 1
        launch(executor, *args, **kwargs | {name: value for name, value in given.items() if name in executor.arg_names})

    def product(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
        """A GPU's library multiplies bf16 into fp32, a CPU's does not."""
        return mm(a, b) if out_dtype is None else mm(a.to(out_dtype), b.to(out_dtype))

    def attended(plan: TorchPlan, q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """A GPU's attention reads no lengths on the host, which in a dry run are undefined."""
        return torch.empty_like(q) if is_dry() else attend(plan, q, *args, **kwargs)

    mm, attend = torch.mm, TorchPlan.attend
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", interpreted)
        patch.setattr(policy, "has_kernels", lambda device: True)
        patch.setattr(policy, "FAST_DTYPES", dtypes)
        patch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True), raising=False)
        patch.setattr(torch, "mm", product)
        patch.setattr(TorchPlan, "attend", attended)
        patch.setattr(Graphs, "run", Graphs._run)
        patch.setattr(PendingResult, "send", lambda result, began=None: PendingResult(result.to_host(), began))
        yield launches
