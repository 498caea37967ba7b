"""The benchmark of the host's time (tests/host_time.py) decodes all rows, with rounds that drafts shorten."""

from __future__ import annotations

from tests.host_time import MAX_NEW_TOKENS, SYSTEM_TOKENS, StandInEngine, measure, some_requests


def test_all_rows_are_decoded_and_the_parts_add_up() -> None:
    requests = list(some_requests(30, 20))
    found = measure(StandInEngine(8, SYSTEM_TOKENS + 40 + MAX_NEW_TOKENS), requests)
    assert (found["rows"], found["tokens"]) == (30, sum(request.synthetic_len or 0 for request in requests))
    assert found["tokens"] / 8 / 4 <= found["rounds"] < found["tokens"] / 2, "8 rows a round, 1 to 4 tokens each"
    parts = [found[part] for part in ("schedule", "launch", "process")]
    assert min(parts) > 0
    assert abs(sum(parts) - found["us_a_row"]) <= 0.2, "rounded"
