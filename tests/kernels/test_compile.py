"""Every kernel compiles on a machine without a GPU, in the variants that the wrappers launch, and fits the card.

The second tier compiles for sm_90, of each kernel as few variants as have each value of each constant that it branches on.
`-m cards` compiles the others too, for all architectures.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from batchspec.kernels.common.card import Card
from tests.kernels.architectures import CARDS, MEASURED, Usage, card_for, usage_of_bytes
from tests.kernels.compile_cases import (
    attention,
    distributed,
    drafting,
    gated_delta,
    gemm,
    kv_cache,
    latent,
    lora,
    mamba2,
    moe,
    norm_rope,
    rounds,
    sampling,
    short_conv,
    train,
    tree,
)
from tests.kernels.compile_cases.cases import Case
from tests.kernels.unpacking import assert_rounds_to_the_bit, assert_unpacks_to_the_bit

ROOT = Path(__file__).parents[2]
PACKAGES = (
    attention, distributed, drafting, gated_delta, gemm, kv_cache, latent, lora, mamba2, moe, norm_rope, rounds, sampling,
    short_conv, train, tree,
)
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


RECURRENT = ("delta_steps_kernel", "delta_chunks_kernel", "scan_steps_kernel", "scan_chunks_kernel")
OF_FOUR_BIT = ("four_bit_linear_kernel", "four_bit_direct_kernel", "experts_four_bit_kernel")
DIRECT = ("four_bit_direct_kernel", "experts_mxfp4_kernel")


def multiplies_from_registers(name: str, ptx: str) -> None:
    """Every tile of weights of four bits is an operand (M) of wgmma in registers."""
    found = set(re.findall(r"(?:mma\.sync|wgmma\.mma_async)\S*", ptx))
    assert found, name
    assert all(re.match(r"wgmma\S*m64n\d+k16\.f32\.bf16\.bf16$", each) for each in found), f"{name}: {found}"
    multiplied = re.findall(r"wgmma\.mma_async\S*\s*\{[^}]*\},\s*(\S)", ptx)
    assert set(multiplied) == {"{"}, f"{name}: W is read from shared memory"
    assert ".local" not in ptx, f"{name}: spilled by LLVM"


def passes_shared_memory_in_16_bytes(name: str, ptx: str) -> None:
    """INT4 and NVFP4 weights are loaded from shared memory 16 bytes at a time, and copied there 16 bytes at a time or by TMA."""
    words = re.findall(r"ld\.shared\.v\d\.b\d+", ptx)
    assert words.count("ld.shared.v4.b32") >= 2, f"{name}: {set(words)}"
    copied = re.findall(r"cp\.async\.c[ag]\.shared\.global\s*\[[^\]]*\][^,]*,\s*\[[^\]]*\],\s*0x(\w+)", ptx)
    assert "cp.async.bulk.tensor" in ptx or copied.count("10") >= 2, f"{name}: {set(copied)}"


def leaves_room_for_another(name: str, usage: Usage, card: Card) -> None:
    """Two programs of a tile of 128 x 128 run on a multiprocessor: one multiplies while the other unpacks. With one alone, a
    product of 256 tokens took 1.6 times as long."""
    registers = -(-usage.registers // 8) * 8 * usage.threads
    assert 2 * registers <= card.sm_registers, f"{name}: {usage.registers} registers"
    assert 2 * (usage.shared_bytes + 1024) <= card.sm_shared_bytes, f"{name}: {usage.shared_bytes} bytes of shared memory"


def passes_no_shared_memory(name: str, ttgir: str, ptx: str) -> None:
    """Weights of these kernels are loaded 16 bytes at a time, a step ahead, into the registers in which they are unpacked: only
    bf16, which tokens are, is allocated in shared memory, and the operand (M) is what unpacking leaves in each thread."""
    words = re.findall(r"ld\.global\S*evict_first\S*", ptx)
    assert len(words) >= 8, name
    assert all(word.endswith(".v4.b32") for word in words), f"{name}: {set(words)}"
    stored = set(re.findall(r"memdesc<[\dx]*x(\w+), #shared", ttgir))
    assert stored <= {"bf16", "i64"}, f"{name}: {stored}"
    assert ptx.count("shfl.") < 8, f"{name}: weights move between threads"  # one by each of the loops that load by TMA


def loads_before_it_multiplies(name: str, ttgir: str) -> None:
    """A step of latent attention issues the loads of the next block before its first product, and no two warp groups compute the
    same scores."""
    loop = ttgir[ttgir.rindex("scf.for", 0, ttgir.index("warp_group_dot")) :]
    assert loop.index("async_copy_global_to_local") < loop.index("warp_group_dot"), name
    scores = re.search(r"warp_group_dot .*-> tensor<\w+, (#mma\d*)>", loop)
    assert scores is not None, name
    warps = re.search(rf"{scores[1]} = .*warpsPerCTA = \[(\d+), (\d+)\]", ttgir)
    assert warps is not None, name
    assert warps[1] == "4", f"{name}: warps {warps[0]}"


def copies_8_bytes_at_most(name: str, ptx: str) -> None:
    """Of rows of 120 bytes. Triton 3.6 copied 16 where keys begin at 0, as those of sinks do (`attend_latents`)."""
    found = re.findall(r"cp\.async\.c[ag]\.shared\.global\s*\[[^\]]*\][^,]*,\s*\[[^\]]*\],\s*0x(\w+)", ptx)
    sizes = {int(size, 16) for size in found}
    assert sizes, name
    assert max(sizes) <= 8, f"{name}: {sizes}"


def sums_by_fma_alone(name: str, ptx: str, arguments: dict[str, object]) -> None:
    """Whatever the tile of a short convolution, an output takes one fused multiply-add a tap, and nothing else is added, but 1 in
    SiLU, which takes one exponential and one division."""
    outputs = int(str(arguments["TOKENS"])) * int(str(arguments["LANES"])) // 128
    wide, silu = "f64" if arguments["ACC"] == "fp64" else "f32", 0 if arguments["GATED"] else outputs
    met = {op: re.findall(rf"\b{op}[\w.]*\.{wide}(x2)?(?:\.bf16)?\s", ptx) for op in ("fma", "add", "sub", "div", "ex2")}
    found = {op: len(each) + each.count("x2") for op, each in met.items()}  # on some cards two at once, or of bf16
    wanted = {"fma": outputs * int(str(arguments["TAPS"])), "add": silu, "sub": 0, "div": silu, "ex2": silu}
    assert found == wanted, f"{name}: {found}, not {wanted}"


def multiples_of_16(function: Any, signature: dict[str, str], *, sizes: bool) -> list[int]:
    """Places of the arguments that launches know to be multiples of 16, so that loads have 16 bytes and are pipelined.

    sizes  all integers are, as in products with packed weights; otherwise strides alone
    """
    own = {param.num: param.name for param in function.params if not param.do_not_specialize}
    kinds = {place: (name, signature[name]) for place, name in own.items() if signature[name] != "constexpr"}
    return [i for i, (name, kind) in kinds.items() if kind.startswith("*") or (kind == "i32" if sizes else "stride" in name)]


def compile_case(name: str, architecture: int) -> str:
    """Why the compiled kernel does not fit the architecture's card; empty if it does."""
    from importlib import import_module

    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    card = card_for(architecture)
    case = CASES[name].on(card)
    assert case is not None
    package, module, kernel, warps, arguments, stages, aligned, registers, _ = case
    function = getattr(import_module(f"batchspec.kernels.{package}.{module}"), kernel)
    arguments |= {"PDL": card.overlaps_launches} if "PDL" in function.arg_names else {}
    signature, constants = dict[str, str](), dict[str, object]()
    for argument, kind in arguments.items():
        if isinstance(kind, str) and argument != "ACC":
            signature[argument] = kind
        else:
            signature[argument] = "constexpr"
            constants[argument] = {"fp32": tl.float32, "fp64": tl.float64}.get(str(kind), kind)
    assert list(signature) == function.arg_names, f"{name}: the kernel's arguments are {function.arg_names}"
    in_tiles = kernel in (*OF_FOUR_BIT, *DIRECT)
    unpacks = in_tiles or kernel == "four_bit_dequantise_kernel"
    multiples = multiples_of_16(function, signature, sizes=in_tiles) if unpacks or aligned else []
    attributes = {(place,): [["tt.divisibility", 16]] for place in multiples}
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers}
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    if arguments.get("PDL") and not arguments.get("EARLY"):
        waits_first(name, compiled.asm["ptx"])
    if architecture == 90 and kernel in ("fp8_linear_kernel", "experts_fp8_kernel"):
        multiplies_e4m3_itself(name, compiled.asm["ptx"])
    if architecture == 90 and kernel == "verify_latents_kernel" and (arguments["TILE"] == 64 or not arguments["KEYS"]):
        loads_before_it_multiplies(name, compiled.asm["ttgir"])
    if kernel == "short_conv_kernel":
        sums_by_fma_alone(name, compiled.asm["ptx"], arguments)
    if name == latent.NARROW:
        copies_8_bytes_at_most(name, compiled.asm["ptx"])
    usage = usage_of_bytes(compiled.metadata._asdict(), compiled.asm["cubin"])
    if kernel in RECURRENT and arguments["state"] == "*bf16":
        assert_rounds_to_the_bit(compiled.asm["ttgir"])
        pairs, alone = (compiled.asm["ptx"].count(f"cvt.rn.{kind}.f32") for kind in ("bf16x2", "bf16"))
        assert pairs >= 32, f"{name}: a state's numbers of a thread are 64, and {pairs} pairs are rounded"
        if architecture > 80:  # on an A100 Triton rounds the outputs of chunks one by one
            assert alone < 16, f"{name}: {alone} numbers are rounded one by one, at a sixteenth of the rate"
    if unpacks:
        assert_unpacks_to_the_bit(compiled.asm["ttgir"])
    if in_tiles and architecture == 90:
        multiplies_from_registers(name, compiled.asm["ptx"])
        assert usage.spilled_bytes == 0, name
        if kernel in DIRECT:
            passes_no_shared_memory(name, compiled.asm["ttgir"], compiled.asm["ptx"])
        else:
            passes_shared_memory_in_16_bytes(name, compiled.asm["ptx"])
        if kernel == "four_bit_linear_kernel" and registers is not None:
            leaves_room_for_another(name, usage, card)
    return usage.misfit(card)


def compile_what_is_asked_for() -> None:
    """The program: for each architecture and name that are read, a line with what is wrong, as a JSON string."""
    for line in sys.stdin:
        architecture, _, name = line.rstrip("\n").partition(" ")
        try:
            said = compile_case(name, int(architecture))
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


def branches(name: str) -> set[tuple[str, bool]]:
    """Which way each argument sends a case: given or not, true or false, zero or not."""
    return {(argument, kind is not None and bool(kind)) for argument, kind in CASES[name].arguments.items()}


def covering(names: Iterable[str]) -> set[str]:
    """As few of the variants of a kernel as have each of its branches, nearly: the one with the most new ones first."""
    left, found = {name: branches(name) for name in names}, set[str]()
    while any(left.values()):
        most = max(left, key=lambda name: len(left[name]))
        found.add(most)
        done = left.pop(most)
        left = {name: own - done for name, own in left.items()}
    return found


TIGHT = {"scan_chunks_kernel fp32, 8 groups, states of 4 bytes"}
"""Seldom variants that take most of a card's shared memory: with -m slow they are compiled for all architectures."""
USUAL = [name for name in CASES if not seldom(name) and CASES[name].on(card_for(MEASURED))]
COVER = {latent.NARROW}.union(
    *(covering(n for n in USUAL if CASES[n].kernel == kernel) for kernel in {CASES[n].kernel for n in USUAL})
)
"""What the second tier compiles."""


def marks(name: str, architecture: int) -> list[pytest.MarkDecorator]:
    """A tier of the tests, and `cards`, which asks for all architectures."""
    if seldom(name):
        return [pytest.mark.slow]
    tier = pytest.mark.second if architecture == MEASURED and name in COVER else pytest.mark.slow
    return [tier, pytest.mark.cards]


VARIANTS = [
    pytest.param(name, architecture, marks=marks(name, architecture), id=f"{name}, sm_{architecture}")
    for architecture in CARDS for name, case in CASES.items()
    if case.on(card_for(architecture)) and not (architecture != MEASURED and seldom(name) and name not in TIGHT)
]


@pytest.mark.parametrize(("name", "architecture"), VARIANTS)
def test_kernel_compiles_and_fits(name: str, architecture: int, compiler: subprocess.Popen[str]) -> None:
    assert compiler.stdin is not None
    assert compiler.stdout is not None
    print(architecture, name, file=compiler.stdin, flush=True)
    assert json.loads(compiler.stdout.readline()) == ""


REFUSED = {"ordered_kernel", "ordered_attention_kernel", "ordered_prefill_kernel"}
"""Of decode.deterministic, which other cards than Hopper's refuse."""
DIRECT_PRODUCTS = {"four_bit_direct_kernel"}
"""Products whose tiles no rule chooses on cards without wgmma."""
REFUSED_WITHOUT_E4M3 = {
    "experts_fp8_kernel", "fp8_linear_kernel", "kv_gather_kernel", "quantise_kernel", "quantise_tokens_kernel", "norm_fp8_kernel",
    "combine_fp8_kernel",
}


@pytest.mark.parametrize("architecture", CARDS)
def test_only_kernels_that_a_card_refuses_are_left_out_for_it(architecture: int) -> None:
    card = card_for(architecture)
    own = {case.kernel for case in CASES.values() if case.on(card)}
    left_out = {case.kernel for case in CASES.values()} - own
    refused = set() if card.has_same_bits_in_all_tiles else REFUSED
    refused |= set() if card.has_wgmma else DIRECT_PRODUCTS
    assert left_out == refused | (set() if card.has_e4m3 else REFUSED_WITHOUT_E4M3)


def test_every_kernel_is_compiled_every_time() -> None:
    files = [path for path in (ROOT / "kernels").glob("*/*.py") if path.parent.name != "benchmarks"]
    kernels = {name for path in files for name in re.findall(r"^def (\w+_kernel)\(", path.read_text(), re.MULTILINE)}
    assert {CASES[name].kernel for name in COVER} == kernels
    assert CASES.keys() >= SELDOM


def test_every_value_that_a_kernel_branches_on_is_compiled_every_time() -> None:
    def met(names: Iterable[str]) -> set[tuple[str, str, bool]]:
        return {(CASES[name].kernel, *branch) for name in names for branch in branches(name)}

    assert met(CASES) == met(COVER)


if __name__ == "__main__":
    compile_what_is_asked_for()
