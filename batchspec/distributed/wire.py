"""How messages between processes of a model are encoded: typed, as MessagePack, with arrays as they are.

The leader of a group sends such messages to its ranks (`engine/ranks/messages.py`), and a warm engine and its leader send them to
each other (`warm/messages.py`). Nothing is pickled.

Python's strings may hold half of a surrogate pair, such as a row's stop string, or a path in an error. The text of MessagePack is
UTF-8, which cannot. A message with such a string begins with HALVES, and has it as an extension.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

M = TypeVar("M")
HALVES = b"\xc1"
"""A byte with which no MessagePack begins."""
HALF = 1
"""Number of the extension: UTF-8, in which halves of surrogate pairs are written as if they were characters."""


class Codec(Generic[M]):
    """Encodes messages of one type: a union of tagged `msgspec.Struct`s, whose fields may be dataclasses and arrays."""

    def __init__(self, messages: Any) -> None:
        self._messages, self._encoder = messages, msgspec.msgpack.Encoder(enc_hook=_plain)
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages, dec_hook=_array)

    def encode(self, message: M) -> bytes:
        try:
            return self._encoder.encode(message)
        except UnicodeEncodeError:
            values = msgspec.to_builtins(message, builtin_types=(bytes,), enc_hook=_plain)
            return HALVES + msgspec.msgpack.encode(_with_halves(values))

    def decode(self, data: bytes) -> M:
        if not data.startswith(HALVES):
            return self._decoder.decode(data)
        values = msgspec.msgpack.decode(data[len(HALVES) :], ext_hook=_half)
        found: M = msgspec.convert(values, self._messages, dec_hook=_array)
        return found


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(type(value))


def _array(kind: type, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape).copy()  # torch warns of arrays that cannot be written to


def _with_halves(value: Any) -> Any:
    """The value with extensions in place of strings that are not text."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return msgspec.msgpack.Ext(HALF, value.encode("utf-8", "surrogatepass"))
    if isinstance(value, dict):
        return {_with_halves(key): _with_halves(item) for key, item in value.items()}
    return [*map(_with_halves, value)] if isinstance(value, list | tuple) else value


def _half(number: int, data: memoryview) -> str:
    assert number == HALF, number
    return bytes(data).decode("utf-8", "surrogatepass")
