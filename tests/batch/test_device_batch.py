"""The device's rows: what enters a slot is uploaded in one transfer, whatever the fields are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchspec.batch import device_batch
from batchspec.batch.device_batch import SLOT_FIELDS, DeviceBatch
from batchspec.batch.sampling_mode import SamplingMode
from batchspec.batch.upload import upload, upload_all
from batchspec.records import SamplingParams
from tests.helpers.engines import packed, request

CPU = torch.device("cpu")


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from([np.int32, np.int64, np.float32]), st.integers(0, 3), st.integers(0, 5)), max_size=6))
def test_arrays_of_several_types_and_shapes_arrive_as_they_left(shapes: list[tuple[type[np.generic], int, int]]) -> None:
    random = np.random.default_rng(0)
    arrays = [random.integers(-9, 9, (rows, columns)).astype(dtype) for dtype, rows, columns in shapes]
    arrays += [np.arange(5)[::2], np.array([1 << 40, -1])]
    for array, tensor in zip(arrays, upload_all(arrays, CPU), strict=True):
        assert tensor.numpy().dtype == array.dtype
        assert tensor.tolist() == array.tolist()


@pytest.mark.filterwarnings("error")
def test_an_uploaded_array_is_a_copy_even_of_one_that_is_read_only() -> None:
    """Prompts of an Arrow table are read-only; torch warns if it shares memory with such an array."""
    array = np.arange(3)
    tensor = upload(array, torch.int64, CPU)
    array[:] = 7
    assert tensor.tolist() == [0, 1, 2]
    array.flags.writeable = False
    assert upload(array, torch.int64, CPU).tolist() == [7, 7, 7]


SAMPLING = st.builds(
    SamplingParams, temperature=st.sampled_from([0.0, 0.7]), top_k=st.integers(0, 9), top_p=st.sampled_from([0.5, 1.0]),
    logit_bias=st.sampled_from([(), ((4, 2.0), (7, -1.5))]),
)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_every_field_of_a_slot_is_what_its_declaration_says(data: st.DataObject) -> None:
    """Of rows with and without output tokens, in any slots; other slots stay as they are."""
    rows = DeviceBatch.allocate(packed(5), vocab_size=31, device=CPU, num_groups=2)
    biased = data.draw(st.booleans())
    if biased:
        rows.provide(SamplingMode(options=frozenset({"logit_bias"})))
    for name in SLOT_FIELDS:
        for tensor in rows._tensors(name):
            tensor.fill_(5)
    slots = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True))
    requests, outputs = [], []
    for slot in slots:
        sampling = data.draw(SAMPLING) if biased else SamplingParams(temperature=0.5, min_p=0.1)
        prompt = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=9))
        requests.append(request(slot, prompt, cap=20, sampling=sampling, stop_ids=tuple(range(slot))))
        outputs.append(data.draw(st.lists(st.integers(0, 30), max_size=4)))
    rows.begin(slots, requests, outputs)
    for name, spec in SLOT_FIELDS.items():
        for tensor in rows._tensors(name):
            for slot in range(5):
                line = tensor[slot].tolist()
                if slot not in slots:
                    assert line == torch.full_like(tensor[slot], 5).tolist(), name
                    continue
                request_, output = requests[slots.index(slot)], outputs[slots.index(slot)]
                value = [] if spec.begin is None else spec.begin(request_, output)
                if not spec.width:
                    assert line == pytest.approx(spec.initial if spec.begin is None else value), name
                elif tensor.shape[1]:
                    given_ = np.asarray(value).tolist()
                    assert line[: len(given_)] == given_, name
                    written = max(len(one.prompt_ids) + len(out) for one, out in zip(requests, outputs, strict=True))
                    padding = line[len(given_) : written if spec.long else None]
                    assert padding == [spec.initial] * len(padding), name


def test_a_group_of_rows_takes_one_transfer_and_their_pages_another(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers: list[int] = []
    separate: list[object] = []

    def counted(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        transfers.append(len(arrays))
        return upload_all(arrays, device)

    monkeypatch.setattr(device_batch, "upload_all", counted)
    monkeypatch.setattr(device_batch, "upload", lambda *values: separate.append(values))
    rows = DeviceBatch.allocate(packed(4), vocab_size=31, device=CPU)
    rows.begin([0, 2], [request(0, [1, 2], cap=4), request(1, [3], cap=4)], [(), (7,)])
    rows.grant([(0, 0, ((5, 6),)), (2, 0, ((7,),))])
    assert (len(transfers), separate) == (2, [])


@settings(deadline=None)
@given(st.data())
def test_granted_pages_are_listed_in_the_table_of_their_group(data: st.DataObject) -> None:
    rows = DeviceBatch.allocate(packed(4), vocab_size=31, device=CPU, num_groups=2)
    expected = [[[0] * rows.page_tables[0].shape[1] for _ in range(4)] for _ in range(2)]
    grants = []
    for slot in data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)):
        first, count = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 6))
        pages = tuple(tuple(data.draw(st.lists(st.integers(1, 99), min_size=count, max_size=count))) for _ in range(2))
        grants.append((slot, first, pages))
        for group in range(2):
            expected[group][slot][first : first + count] = pages[group]
    rows.grant(grants)
    assert [table.tolist() for table in rows.page_tables] == expected
