"""`batchspec bench --tensor-parallel 2` on the CPU: the numbers of one process, and no process or number left where one dies."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from batchspec.bench import command as bench
from batchspec.bench.arguments import parse
from batchspec.bench.engines import Bench, config_of, variant_specs
from batchspec.bench.workloads import Workload
from batchspec.cache.layer_state import LayerState
from batchspec.errors import ConfigError
from batchspec.model.families.shapes import COMMON, SHAPES, shape_spec
from batchspec.model.layers.base import Shard
from batchspec.model.shard import part_of as cut
from batchspec.model.target import Target
from tests.bench.test_bench import SHARING_KV, TINY
from tests.helpers.engines import DEVICE
from tests.helpers.forked import run_python
from tests.helpers.ranks import on_ranks, part_of, whole_of

pytestmark = pytest.mark.second

SIZES = ["--batch", "3", "--prompt", "4", "--gen", "9", "--dtype", "float32", "--device", "cpu"]
SAME = ("variant", "tokens", "rounds", "mean_acceptance_length", "accepted_by_position", "mean_live_rows", "runs")


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shape") / "config.json"
    path.write_text(json.dumps({**COMMON, **TINY, "num_hidden_layers": 2}))
    return path


def measured(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def on_two_ranks(*words: str, patch: str = "") -> CompletedProcess[str]:
    """patch: statements that the leader executes first."""
    code = f"import os, signal, sys\nfrom batchspec.cli import console\n{patch}\nsys.argv[0] = 'batchspec'\nconsole()"
    return run_python(["-c", code, "bench", *words, *SIZES, "--tensor-parallel", "2"], timeout_s=60)


@pytest.mark.parametrize(
    "words",
    [
        ["--kv", "fp8", "--temperature", "100"],
        pytest.param(
            ["--accept", ".8,.5", "--temperature", "0", "100", "--opt", "dead_rows=false", "--requests", "5"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_ranks_accept_what_one_process_does(words: list[str], shape: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    given = ["--shape", str(shape), "--draft", "none", "eagle3", "--k", "2", "--runs", "2", *words]
    assert bench.main([str(one), "tiny", *given, *SIZES]) == 0
    done = on_two_ranks(str(two), "tiny", *given)
    assert done.returncode == 0, done.stderr
    alone, together = measured(one), measured(two)
    assert [[row.get(key) for key in SAME] for row in alone] == [[row.get(key) for key in SAME] for row in together]
    assert alone[-1]["mean_acceptance_length"] > 1.5, "drafts are accepted at all"
    assert {(row["ranks"], row["device"]) for row in alone} == {(1, "cpu")}
    assert {(row["ranks"], row["device"]) for row in together} == {(2, "2 x cpu")}
    assert "turn 2 of 2  eagle3 K=2" in done.stdout


@pytest.mark.slow
def test_single_rounds_are_timed_on_two_ranks(shape: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    done = on_two_ranks(
        str(out), "tiny", "--shape", str(shape), "--rounds", "3", "--draft", "none", "eagle3", "--k", "0", "2", "--accept", "1,0"
    )
    assert done.returncode == 0, done.stderr
    found = [(row["variant"], row["ranks"], row["rounds"], row["mean_acceptance_length"]) for row in measured(out)]
    assert found == [("none", 2, 3, 1.0), ("eagle3 K=0", 2, 3, 1.0), ("eagle3 K=2", 2, 3, 2.0)]


def test_every_rank_drafts_with_the_whole_head(shape: Path) -> None:
    args = parse(["o", "n", "--shape", str(shape), "--draft", "eagle3", "--k", "2", *SIZES])
    (way,) = variant_specs(args)

    def layout(target: Target) -> tuple[LayerState, ...]:
        return Bench(args, Workload(target, []), DEVICE).drafter(way, config_of(args, way)).layer_states(16)

    spec = shape_spec(str(shape))
    whole = layout(whole_of(spec))
    assert whole
    assert on_ranks(2, lambda ranks: layout(part_of(spec, ranks))) == [whole, whole]


DIES = """
from pathlib import Path
from batchspec.bench.variants import EngineVariant
run = EngineVariant.run
def run_then(self, cap=None):
    follower = int(Path(f"/proc/self/task/{os.getpid()}/children").read_text())
    print("follower", follower, flush=True)
    os.kill(WHO, signal.SIGKILL)
    return run(self, cap)
EngineVariant.run = run_then
"""


def test_a_killed_follower_ends_the_command(shape: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.jsonl"
    done = on_two_ranks(str(out), "tiny", "--shape", str(shape), patch=DIES.replace("WHO", "follower"))
    assert done.returncode == 75, done.stderr
    said = "batchspec: --tensor-parallel 2: rank 1 was killed by SIGKILL; nothing was written, run the same command again\n"
    assert done.stderr.endswith(said)
    assert "turn" not in done.stdout
    assert not out.exists()


def test_no_follower_outlives_its_leader(shape: Path, tmp_path: Path) -> None:
    done = on_two_ranks(str(tmp_path / "o.jsonl"), "tiny", "--shape", str(shape), patch=DIES.replace("WHO", "os.getpid()"))
    assert done.returncode == -9
    follower, until = Path("/proc", done.stdout.split()[-1], "cmdline"), time.monotonic() + 30
    while _runs(follower) and time.monotonic() < until:
        time.sleep(0.05)
    assert not _runs(follower)


def _runs(command: Path) -> bool:
    try:
        return b"batchspec.bench.follower" in command.read_bytes()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tensor-parallel", "3"], "invalid choice: 3"),
        (["--tensor-parallel", "2", "--make-job", "job"], "nothing is measured"),
    ],
)
def test_what_ranks_cannot_do_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        bench.main(["o", "n", "--device", "cpu", *words])


@pytest.mark.slow
def test_a_model_that_cannot_be_cut_is_one_line(tmp_path: Path) -> None:
    done = on_two_ranks(str(tmp_path / "o.jsonl"), "n", "--shape", "smol135m")
    assert done.returncode == 2
    *phases, error = done.stderr.splitlines()
    assert error == (
        "batchspec: num_key_value_heads 3 and 2 ranks: one must be a multiple of the other; choose another --tensor-parallel"
    )
    assert all(re.fullmatch(r" *\d+\.\d s  making the weights of smol135m", line) for line in phases), done.stderr


def test_of_the_shapes_these_alone_cannot_be_cut(tmp_path: Path) -> None:
    """Over eight GPUs an expert of Qwen3-30B-A3B in FP8 or INT4 has six blocks. One GPU holds that model."""
    refused = {}
    for name, shape in SHAPES.items():
        few: dict[str, Any] = {"num_hidden_layers": 2}
        few |= {"full_attention_interval": 2} if "full_attention_interval" in shape else {}
        if kinds := [*dict.fromkeys(shape.get("layer_types", ()))]:
            few |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
        if pattern := "".join(dict.fromkeys(shape.get("hybrid_override_pattern", ""))):
            few |= {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}
        few |= {key: [1] for key in ("full_attn_idxs", "attn_layer_indices") if key in shape}
        few |= SHARING_KV if "num_kv_shared_layers" in shape else {}
        (tmp_path / "config.json").write_text(json.dumps({**COMMON, **shape, **few}))
        spec = shape_spec(str(tmp_path / "config.json"))
        for ranks in (2, 4, 8):
            try:
                for rank in range(ranks):
                    cut(spec, Shard(rank, ranks))
            except ConfigError as error:
                refused[name, ranks] = str(error).partition(";")[0]
    odd = "num_key_value_heads {} and {} ranks: one must be a multiple of the other"
    assert refused == {
        **{("smol135m", ranks): odd.format(3, ranks) for ranks in (2, 4, 8)},
        **{("phi4-14b", ranks): odd.format(10, ranks) for ranks in (4, 8)},
        ("qwen2.5-7b", 8): "num_attention_heads 28 cannot be cut into 8 equal parts",
        ("glm-4.7-flash", 8): "num_attention_heads 20 cannot be cut into 8 equal parts",
        **{
            (name, ranks): f"the number of groups of Mamba2 heads 1 cannot be cut into {ranks} equal parts"
            for name in ("granite4-h-micro", "granite4-h-tiny", "bamba-9b", "falcon-h1-0.5b") for ranks in (2, 4, 8)
        },
        ("qwen3-30b-a3b-fp8", 8): "the size of an expert 768 cannot be cut into 8 parts in blocks of 128",
        ("qwen3-30b-a3b-int4", 8): "the size of an expert 768 cannot be cut into 8 parts in blocks of 128",
        ("qwen3.5-35b-a3b-fp8", 8): "the size of an expert 512 cannot be cut into 8 parts in blocks of 128",
    }


@pytest.mark.parametrize(
    ("name", "billions", "inner"),
    [
        ("llama70b", 70.55, [3584] * 8), ("llama70b-fp8", 70.55, [3584] * 8), ("qwen3-235b-a22b", 235.1, [8 * 192] * 8),
        ("qwen3-235b-a22b-fp8", 235.1, [8 * 256] * 4 + [8 * 128] * 4), ("minimax-m2-fp8", 228.7, [8 * 256] * 4 + [8 * 128] * 4),
    ],
)
def test_a_large_shape_has_its_published_size_and_is_cut_into_whole_blocks(
    name: str, billions: float, inner: list[int], tmp_path: Path
) -> None:
    """inner: numbers of the MLP of a layer on each of eight ranks."""
    config = {**COMMON, **SHAPES[name]}
    sizes = []
    for num_layers in (1, 2):
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": num_layers}))
        spec = shape_spec(str(tmp_path / "config.json"))
        sizes.append(sum(math.prod(tensor.shape) for tensor in spec.tensors() if tensor.role != "scale"))
    assert sizes[0] + (config["num_hidden_layers"] - 1) * (sizes[1] - sizes[0]) == pytest.approx(billions * 1e9, rel=1e-2)
    for ranks in (2, 4, 8):
        parts = [cut(spec, Shard(rank, ranks)).layers[0].mlp.inner_size for rank in range(ranks)]
        assert sum(parts) == sum(inner)
    assert parts == inner
