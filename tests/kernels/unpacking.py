"""Executes the instructions with which compiled kernels unpack words of INT4, NVFP4 and MXFP4 and round states to bf16, number by
number: no CPU has them, and Triton's interpreter takes another way."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from batchspec.kernels.gemm.four_bit_steps import HIGH_SCALE, LOW_SCALE, OFFSET, SIGNS
from batchspec.kernels.moe.mxfp4 import PLACES, VALUES

Words = NDArray[np.uint32]
Bits = NDArray[np.uint16]
COUNT = 20000


def assert_unpacks_to_the_bit(ttgir: str) -> None:
    """Random words, scales of every exponent that is allowed, and zero points, in both halves of a word."""
    programs = [text.replace("\\0A", "") for text in re.findall(r'elementwise_inline_asm "([^"]*bf16x2[^"]*)"', ttgir)[:4]]
    assert len(programs) == 4
    assert_each_number_has_its_own_operands(ttgir)
    assert_pairs_are_neighbours(ttgir)
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, COUNT).astype(np.uint32)
    if all("0x81C081C0" in program for program in programs):
        assert_unpacks_nvfp4(programs, words, rng.integers(12 << 3, 30 << 3, COUNT) << 4 | 0x7000)
        return
    bits = rng.integers(27 << 7, 130 << 7, COUNT) | rng.integers(0, 2, COUNT) << 15
    scale, pairs = _number(bits.astype(np.uint16)), bits | bits << 16
    given = all(program.count("fma") == 2 for program in programs)
    zeros = rng.integers(0, 16, COUNT) if given else np.full(COUNT, 8)
    for part, program in enumerate(programs):
        factor = pairs + int(LOW_SCALE if part % 2 == 0 else HIGH_SCALE)
        shift = (zeros | zeros << 16) << 4 * (part % 2) if given else (pairs ^ (int(SIGNS) & 0xFFFFFFFF)) - int(OFFSET)
        found = _halves(_run(program, {"$1": words, "$2": factor.astype(np.uint32), "$3": shift.astype(np.uint32)})["$0"])
        for half, own in enumerate(_halves(words)):
            exact = ((own >> 4 * part & 15).astype(np.float64) - zeros) * scale
            assert np.array_equal(_number(found[half]) * 256, _number(_rounded(exact))), program


def assert_each_number_has_its_own_operands(ttgir: str) -> None:
    """Every operand has 16 bits a number: its register holds those of both numbers of an instruction, whichever rows they are in.
    Of wider operands the instruction would read one register, that of the first number, for both."""
    found = re.findall(r'asm "[^"]*bf16x2[^"]*" \{constraints = "([^"]*)", packed_element = 2.*: (.*) ->', ttgir)
    assert found
    for constraints, operands in found:
        dtypes = re.findall(r"x([a-z]\w*), #", operands)
        assert set(dtypes) == {"i16"}, operands
        assert constraints == ",".join(["=r"] + ["r"] * len(dtypes)), constraints


def assert_pairs_are_neighbours(ttgir: str) -> None:
    """The two numbers of an instruction are in one row, in columns 2 i and 2 i + 1: all pairs of a row then share a register with
    its scale twice, and words come from shared memory, or those of MXFP4 from memory, as the tensor cores read the numbers."""
    layouts = set(re.findall(r"fma.rn.bf16x2.*-> tensor<\d+x(?:32|8)xbf16, (#\w+)>", ttgir))
    assert layouts
    for layout in layouts:
        linear, own = r"linear<\{register = \[\[0, 1\]", r"blocked<\{sizePerThread = \[1, 8\], .* order = \[1, 0\]"
        assert re.search(rf"^{layout} = #ttg\.(?:{linear}|{own})", ttgir, re.MULTILINE), layout


def assert_unpacks_nvfp4(programs: list[str], words: Words, bits: NDArray[np.int64]) -> None:
    """bits: those of bf16 of scales of NVFP4 * 2^118"""
    scale, factor = _number(bits.astype(np.uint16)) * 2.0**-118, (bits | bits << 16).astype(np.uint32)
    for program, places in zip(programs, PLACES, strict=True):
        found = _halves(_run(program, {"$1": words, "$2": factor, "$3": factor})["$0"])
        for half, own in enumerate(_halves(words)):
            code = sum((own >> place & 1).astype(np.int64) << 3 - bit for bit, place in enumerate(places))
            assert np.array_equal(_number(found[half]) * 256, np.array(VALUES)[code] * scale), program


def assert_rounds_to_the_bit(ttgir: str) -> None:
    """`as_stored`: random numbers of all exponents, and those in the middle between two numbers of bf16."""
    (program,) = {text.replace("\\0A", "") for text in re.findall(r'elementwise_inline_asm "([^"]*rn.bf16x2.f32[^"]*)"', ttgir)}
    bits = np.random.default_rng(0).integers(0, 254 << 23, (2, COUNT)) | np.array([[0], [1 << 31]])
    bits[:, ::3] = bits[:, ::3] & 0xFFFF0000 | 0x8000
    low, high = bits.astype(np.uint32)
    registers = _run(program, {"$2": low, "$3": high})
    for name, own in (("$0", low), ("$1", high)):
        assert np.array_equal(registers[name], _rounded(own.view(np.float32).astype(np.float64)).astype(np.uint32) << 16), name


def _run(program: str, registers: dict[str, Words]) -> dict[str, Words]:
    """The registers after a program of PTX instructions."""

    def value(name: str) -> Words:
        return registers[name] if name in registers else np.full(COUNT, int(name, 0), np.uint32)

    for line in program.strip("{} ").split(";"):
        name, _, rest = line.strip().partition(" ")
        target, *inputs = [word.strip() for word in rest.split(",")]
        if name == "and.b32":
            registers[target] = value(inputs[0]) & value(inputs[1])
        elif name == "mov.b32":
            registers[target] = value(inputs[0])
        elif name == "shr.u32":
            registers[target] = value(inputs[0]) >> value(inputs[1])
        elif name == "shl.b32":
            registers[target] = value(inputs[0]) << value(inputs[1])
        elif name == "mul.lo.u32":
            registers[target] = value(inputs[0]) * value(inputs[1])
        elif name == "fma.rn.bf16x2":
            triples = zip(*(map(_number, _halves(value(one))) for one in inputs), strict=True)
            low, high = (_rounded(x * y + z).astype(np.uint32) for x, y, z in triples)
            registers[target] = low | high << np.uint32(16)
        elif name == "cvt.rn.bf16x2.f32":
            high, low = (_rounded(value(one).view(np.float32).astype(np.float64)).astype(np.uint32) for one in inputs)
            registers[target] = low | high << np.uint32(16)
        else:
            assert name in ("", ".reg"), line
    return registers


def _halves(words: Words) -> tuple[Bits, Bits]:
    return words.astype(np.uint16), (words >> np.uint32(16)).astype(np.uint16)


def _number(bits: Bits) -> NDArray[np.float64]:
    """The numbers of these bits of bf16."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def _rounded(exact: NDArray[np.float64]) -> Bits:
    """To the nearest number of bf16, of two the even one; subnormal ones too."""
    exponent = np.maximum(np.frexp(exact)[1] - 1, -126)
    steps = np.rint(np.ldexp(exact, 7 - exponent))
    found: Bits = (np.ldexp(steps, exponent - 7).astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return found
