"""Dry runs: results have their real shapes, no existing tensor is written, the host reads nothing, no kernel is launched."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.jit import JITFunction

from batchspec.kernels.common.dry_run import DryRunEnded, dry_run, is_dry

CPU = torch.device("cpu")
IDS = torch.tensor([2, 0, 2])
KEPT: list[Tensor] = []

OPERATIONS: dict[str, Callable[[Tensor], object]] = {
    "row by id": lambda x: x[IDS],
    "values by ids": lambda x: x[IDS[:, None], IDS],
    "selected rows": lambda x: x.index_select(0, IDS),
    "selected columns": lambda x: x.index_select(1, IDS[:2]),
    "padded": lambda x: F.pad(x, (1, 0, 2, 3), value=1.0),
    "product": lambda x: x @ x.t(),
    "product in fp64": lambda x: x.double() @ x.double().t(),
    "linear": lambda x: F.linear(x, x, torch.zeros(3)),
    "cast": lambda x: x.to(torch.bfloat16),
    "comparison": lambda x: x > x.roll(1),
    "sum": lambda x: x.sum(1),
    "cumulative sum": lambda x: (x > 0).cumsum(0, dtype=torch.int32),
    "softmax": lambda x: x.softmax(-1),
    "largest": lambda x: x.topk(2).indices,
    "no known shape": lambda x: x.logcumsumexp(0),
    "ids after a dimension": lambda x: x[:, torch.tensor([[1, 3], [0, 2]]), ...],
    "layer norm": lambda x: torch.nn.functional.layer_norm(x, (4,)),
    "joined": lambda x: torch.cat([x, x[:1]]),
    "contiguous": lambda x: x.t().contiguous(),
    "view": lambda x: x.view(4, 3)[1:, ::2],
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_have_the_shapes_of_real_ones(name: str) -> None:
    x = torch.randn(3, 4)
    real, found = OPERATIONS[name](x), []
    assert isinstance(real, Tensor)

    def run() -> None:
        given = OPERATIONS[name](x)
        assert isinstance(given, Tensor)
        found.append((given.shape, given.stride(), given.dtype, given.device))

    assert dry_run(run, CPU) is None
    assert found == [(real.shape, real.stride(), real.dtype, real.device)]


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


EXCHANGES: dict[str, Callable[[Tensor], object]] = {
    "sum": dist.all_reduce,
    "gather": lambda x: dist.all_gather([torch.empty_like(x)], x),
    "gather into one": lambda x: dist.all_gather_into_tensor(torch.empty_like(x), x),
    "to each other": lambda x: dist.all_to_all_single(torch.empty_like(x), x),
    "broadcast": lambda x: dist.broadcast(x, src=0),
}


@pytest.mark.parametrize("name", EXCHANGES)
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_an_exchange_between_ranks_ends_the_run(name: str, group: None) -> None:
    """If another rank has compiled before, it skips the dry run, and the exchange would wait for it forever."""
    EXCHANGES[name](torch.ones(4))
    ended = dry_run(lambda: EXCHANGES[name](torch.ones(4)), CPU)
    assert ended is not None
    assert ended.startswith("c10d.")


def test_flash_attention_has_the_shapes_that_torch_says() -> None:
    """The meta device gives the shapes, because a CPU has no kernel for it."""
    q, lengths = torch.empty(5, 4, 8, dtype=torch.bfloat16), torch.tensor([0, 2, 5], dtype=torch.int32)

    def attended(q: Tensor, lengths: Tensor) -> list[tuple[torch.Size, torch.dtype]]:
        out = torch.ops.aten._flash_attention_forward(q, q, q, lengths, lengths, 3, 3, 0.0, True, False)
        return [(x.shape, x.dtype) for x in out[:2]]

    found: list[tuple[torch.Size, torch.dtype]] = []
    assert dry_run(lambda: found.extend(attended(q, lengths)), CPU) is None
    assert found == attended(q.to("meta"), lengths.to("meta"))


def test_nothing_that_existed_is_written() -> None:
    x, ids = torch.arange(12.0).view(3, 4), torch.tensor([1])
    before = x.clone()

    def run() -> None:
        x.zero_()
        x[ids] = 7.0
        x[1, 2] = 5.0
        x.add_(1).mul_(2)
        torch.mm(torch.ones(3, 3), torch.ones(3, 4), out=x)
        x.copy_(torch.ones(4))
        x.index_copy_(0, ids, torch.ones(1, 4))
        assert x.scatter_(0, ids[None], 1.0) is x

    assert dry_run(run, CPU) is None
    assert torch.equal(x, before)


def test_constants_are_real_and_may_be_kept() -> None:
    kept: list[Tensor] = []

    def run() -> None:
        kept.extend([torch.zeros(3), torch.full((2,), 7), torch.arange(3), torch.zeros_like(IDS), IDS.new_ones(2)])

    assert dry_run(run, CPU) is None
    assert [x.tolist() for x in kept] == [[0.0] * 3, [7, 7], [0, 1, 2], [0, 0, 0], [1, 1]]


@pytest.mark.second
@pytest.mark.parametrize("computed", [lambda: IDS[IDS], lambda: IDS + 1, lambda: (IDS + 1)[1:]])
def test_no_undefined_tensor_may_be_kept(computed: Callable[[], Tensor]) -> None:
    """A cache that is filled in a dry run would pass it on to real runs."""
    try:
        with pytest.raises(AssertionError, match="was kept"):
            dry_run(lambda: KEPT.append(computed()), CPU)
    finally:
        KEPT.clear()
    assert dry_run(lambda: [computed()], CPU) is None


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "truth": lambda x: bool((x > 0).all()),
    "equal": lambda x: torch.equal(x, x + 1),
    "shape that depends on values": lambda x: x[x > 0],
    "random numbers": lambda x: torch.rand_like(x),
    "library": lambda x: torch.ops.test_dry_run.identity(x),
    "error of an operation": lambda x: x.view(7),
}


@torch.library.custom_op("test_dry_run::identity", mutates_args=())
def _identity(x: Tensor) -> Tensor:
    return x.clone()


@pytest.mark.parametrize("name", READS)
def test_an_operation_that_cannot_be_skipped_ends_the_run_whatever_is_caught(name: str) -> None:
    went_on: list[BaseException | None] = []

    def run() -> None:
        try:
            READS[name](torch.ones(2, 3))
        except Exception as error:
            went_on.append(error)
        else:
            went_on.append(None)

    ended = dry_run(run, CPU)
    assert ended
    assert not went_on


def test_a_copy_to_the_host_ends_the_run() -> None:
    """The dry run of a device of type meta, so that the test needs no GPU."""
    device, x, host = torch.device("meta"), torch.empty(3, device="meta"), torch.zeros(3)
    for read in (lambda: x.cpu(), lambda: x.tolist(), lambda: host.copy_(x), lambda: torch.add(x, 1, out=host)):
        assert dry_run(read, device) is not None
    assert dry_run(lambda: x.copy_(host), device) is None
    assert host.tolist() == [0.0] * 3


def test_work_on_other_devices_is_done_as_usual() -> None:
    found: list[Any] = []
    assert dry_run(lambda: found.append((IDS + 1)[IDS].tolist()), torch.device("meta")) is None
    assert found == [(IDS + 1)[IDS].tolist()]


def test_launches_of_this_thread_alone_become_compilations(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, bool, Any]] = []

    def launch(kernel: str, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launched.append((kernel, warmup, options))

    monkeypatch.setattr(JITFunction, "run", launch)
    run: Any = JITFunction.run

    def both() -> None:
        assert is_dry()
        other = threading.Thread(target=lambda: JITFunction.run("other", grid=(1,), warmup=is_dry()))
        other.start()
        other.join()
        JITFunction.run("own", grid=(1,), warmup=False, num_warps=4)

    assert dry_run(both, CPU) is None
    assert launched == [("other", False, {}), ("own", True, {"num_warps": 4})]
    assert not is_dry()
    assert JITFunction.run is run

    def fails() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dry_run(fails, CPU)
    assert not is_dry()
    assert JITFunction.run is run


def test_errors_of_the_code_end_the_run() -> None:
    def run() -> None:
        raise ValueError("rows must be contiguous")

    assert dry_run(run, CPU) == "rows must be contiguous"
    assert not issubclass(DryRunEnded, Exception)


USUAL = """
import sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from batchspec.kernels.common.dry_run import dry_run
x, ids = torch.zeros(4, 4), torch.tensor([1, 2])
def run():
    x[ids], x[ids, ids], x.index_select(0, ids), F.pad(x, (1, 0))
    x @ x, F.linear(x, x, x[0]), ids.cumsum(0), x.to(torch.bfloat16), x > 1
    F.layer_norm(x, (4,), x[0], x[0]), F.gelu(x, approximate="tanh"), torch.stack([x, x], 1), x.mean(1), x[:, ids], x.repeat(1, 2)
assert dry_run(run, torch.device("cpu")) is None
assert "sympy" not in sys.modules and "torch._dynamo" not in sys.modules
"""


@pytest.mark.second
def test_usual_operations_do_not_import_the_compiler_of_torch() -> None:
    """The import would take several seconds of every start on a GPU."""
    import subprocess

    done = subprocess.run([sys.executable, "-c", USUAL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
