"""How messages between processes of a model are encoded: typed, as MessagePack, with arrays as they are.

The leader of a group sends such messages to its ranks (`engine/ranks/messages.py`), and a warm engine and its leader send them to
each other (`warm/messages.py`). Nothing is pickled.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

M = TypeVar("M")


class Codec(Generic[M]):
    """Encodes messages of one type: a union of tagged `msgspec.Struct`s, whose fields may be dataclasses and arrays."""

    def __init__(self, messages: Any) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(messages, dec_hook=_array)

    def encode(self, message: M) -> bytes:
        return self._encoder.encode(message)

    def decode(self, data: bytes) -> M:
        return self._decoder.decode(data)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(type(value))


def _array(kind: type, value: Any) -> Any:
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape).copy()  # torch warns of arrays that cannot be written to
