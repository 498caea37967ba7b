"""Every kernel compiles for sm_90 on a machine without a GPU, in the variants that the wrappers launch."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.kernels.compile_cases import (
    attention,
    distributed,
    drafting,
    gated_delta,
    gemm,
    kv_cache,
    lora,
    moe,
    norm_rope,
    rounds,
    sampling,
    train,
    tree,
)
from tests.kernels.compile_cases.cases import Case
from tests.kernels.unpacking import assert_unpacks_to_the_bit

ROOT = Path(__file__).parents[2]
SHARED_BYTES = 227 << 10
"""Shared memory that a program may have on a GPU of the Hopper generation."""
PACKAGES = (attention, distributed, drafting, gated_delta, gemm, kv_cache, lora, moe, norm_rope, rounds, sampling, train, tree)
CASES: dict[str, Case] = {name: case for package in PACKAGES for name, case in package.CASES.items()}
SELDOM = {name for package in PACKAGES for name in package.CASES.seldom}
"""Variants whose branches other variants reach: each value of each constant that a kernel branches on is compiled every time."""


def waits_first(name: str, ptx: str) -> None:
    """A program that starts early neither writes nor ends before it has waited for earlier launches."""
    paths = re.findall(r"griddepcontrol\.wait|st\.global|red\.global|atom\.global|\bret;", ptx)
    assert paths[0].startswith("griddepcontrol"), f"{name}: {paths[0]} comes before the wait for earlier launches"


def multiplies_e4m3_itself(name: str, ptx: str) -> None:
    """Every tile of FP8 weights and activations sums over 32 neighbours of K at once, by instructions that all tiles share:
    mma.sync may multiply other numbers of K together (`e4m3_operand`)."""
    found = set(re.findall(r"(?:mma\.sync|wgmma\.mma_async)\S*", ptx))
    assert found, name
    assert all(re.match(r"wgmma\S*m64n\d+k32\.f32\.e4m3\.e4m3$", each) for each in found), f"{name}: {found}"


OF_INT4 = ("int4_linear_kernel", "experts_int4_kernel")


def multiplies_from_registers(name: str, ptx: str) -> None:
    """Every tile of INT4 weights is an operand (M) of wgmma in registers. It is loaded from shared memory 16 bytes at a time, and
    copied there 16 bytes at a time or by TMA."""
    found = set(re.findall(r"(?:mma\.sync|wgmma\.mma_async)\S*", ptx))
    assert found, name
    assert all(re.match(r"wgmma\S*m64n\d+k16\.f32\.bf16\.bf16$", each) for each in found), f"{name}: {found}"
    multiplied = re.findall(r"wgmma\.mma_async\S*\s*\{[^}]*\},\s*(\S)", ptx)
    assert set(multiplied) == {"{"}, f"{name}: W is read from shared memory"
    words = re.findall(r"ld\.shared\.v\d\.b\d+", ptx)
    assert words.count("ld.shared.v4.b32") >= 2, f"{name}: {set(words)}"
    copied = re.findall(r"cp\.async\.c[ag]\.shared\.global\s*\[[^\]]*\][^,]*,\s*\[[^\]]*\],\s*0x(\w+)", ptx)
    assert "cp.async.bulk.tensor" in ptx or copied.count("10") >= 2, f"{name}: {set(copied)}"
    assert ".local" not in ptx, f"{name}: spilled by LLVM"


def spilled_bytes(cubin: bytes) -> int:
    """Bytes of a thread's local memory, for registers that ptxas spilled."""
    import tempfile

    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return sum(int(found) for found in re.findall(r"(?:STACK|LOCAL):(\d+)", said))


def compile_case(name: str) -> int:
    """Bytes of its cubin."""
    from importlib import import_module

    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    package, module, kernel, warps, arguments, stages = CASES[name]
    function = getattr(import_module(f"batchspec.kernels.{package}.{module}"), kernel)
    arguments |= {"PDL": True} if "PDL" in function.arg_names else {}
    signature, constants = dict[str, str](), dict[str, object]()
    for argument, kind in arguments.items():
        if isinstance(kind, str) and argument != "ACC":
            signature[argument] = kind
        else:
            signature[argument] = "constexpr"
            constants[argument] = {"fp32": tl.float32, "fp64": tl.float64}.get(str(kind), kind)
    assert list(signature) == function.arg_names, f"{name}: the kernel's arguments are {function.arg_names}"
    aligned, options = list[int](), {"num_warps": warps}
    if kernel in OF_INT4:  # as in launches: sizes and addresses are multiples of 16, so that loads have 16 bytes
        sizes = (param for param in function.params if signature[param.name] != "constexpr" and not param.do_not_specialize)
        kinds = {param.num: signature[param.name] for param in sizes}
        aligned = [place for place, kind in kinds.items() if kind.startswith("*") or kind == "i32"]
    elif stages is not None:
        aligned = [i for i, (own, kind) in enumerate(signature.items()) if kind.startswith("*") or "stride" in own]
        options["num_stages"] = stages
    source = ASTSource(
        fn=function, signature=signature, constexprs=constants, attrs={(place,): [["tt.divisibility", 16]] for place in aligned}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    if stages is not None:
        assert compiled.metadata.shared <= SHARED_BYTES, f"{name}: {compiled.metadata.shared} bytes of shared memory"
    if "PDL" in arguments and not arguments.get("EARLY"):
        waits_first(name, compiled.asm["ptx"])
    if kernel in ("fp8_linear_kernel", "experts_fp8_kernel"):
        multiplies_e4m3_itself(name, compiled.asm["ptx"])
    if kernel in OF_INT4:
        multiplies_from_registers(name, compiled.asm["ptx"])
        assert_unpacks_to_the_bit(compiled.asm["ttgir"])
        assert spilled_bytes(compiled.asm["cubin"]) == 0, name
    return len(compiled.asm["cubin"])


def compile_what_is_asked_for() -> None:
    """The program: for each name that is read, a line with the bytes of its cubin, or with its error as a JSON string."""
    for line in sys.stdin:
        try:
            said: int | str = compile_case(line.rstrip("\n"))
        except Exception:
            said = traceback.format_exc()
        print(json.dumps(said), flush=True)


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """A process without the interpreter, and with an empty cache so that each case is really compiled."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")), "PYTHONPATH": str(ROOT)}
    env |= {"TRITON_DISABLE_LINE_INFO": "1"}  # a tenth of the time, and nothing here reads it
    words = [sys.executable, __file__]
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        yield program


def with_dtype(name: str, dtype: str) -> str:
    return re.sub(r"\b(fp32|bf16|fp16|fp64)\b", dtype, name)


def seldom(name: str) -> bool:
    """Compiled with -m slow alone: `SELDOM`, fp16 and fp32 where bf16 takes the same branches, and fp64, which is interpreted."""
    if re.search(r"\b(fp16|fp64)\b", name) or name in SELDOM:
        return True
    alike = with_dtype(name, "bf16")
    return alike != name and alike in CASES and constants_of(alike) == constants_of(name)


def constants_of(name: str) -> dict[str, object]:
    """What a kernel branches on, up to the type of its values."""
    return {key: with_dtype(kind, "bf16") if isinstance(kind, str) else kind for key, kind in CASES[name].arguments.items()}


FIRST = set({CASES[name].kernel: name for name in reversed(CASES) if not seldom(name)}.values())
"""One variant of each kernel."""


def tier(name: str) -> Sequence[pytest.MarkDecorator]:
    return [pytest.mark.slow] if seldom(name) else [] if name in FIRST else [pytest.mark.second]


@pytest.mark.parametrize("name", [pytest.param(name, marks=tier(name)) for name in CASES])
def test_kernel_compiles_for_hopper(name: str, compiler: subprocess.Popen[str]) -> None:
    assert compiler.stdin is not None
    assert compiler.stdout is not None
    print(name, file=compiler.stdin, flush=True)
    said = json.loads(compiler.stdout.readline())
    assert isinstance(said, int), said
    assert said > 1000


def test_every_kernel_is_compiled_every_time() -> None:
    files = [path for path in (ROOT / "kernels").glob("*/*.py") if path.parent.name != "benchmarks"]
    kernels = {name for path in files for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)}
    assert {CASES[name].kernel for name in CASES if not seldom(name)} == kernels
    assert CASES.keys() >= SELDOM


def branches(names: Iterable[str]) -> set[tuple[str, str, object]]:
    """Which way each argument of each kernel sends these cases: given or not, true or false, zero or not."""
    return {
        (CASES[name].kernel, argument, kind is not None and bool(kind))
        for name in names
        for argument, kind in CASES[name].arguments.items()
    }


def test_every_value_that_a_kernel_branches_on_is_compiled_every_time() -> None:
    assert branches(CASES) - branches(name for name in CASES if not seldom(name)) == set()


if __name__ == "__main__":
    compile_what_is_asked_for()
