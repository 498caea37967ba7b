"""`python -m tests.recording` writes the same twice and tells in which step a planted change shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.recorded_jobs import FEW_PAGES, JOBS, Job
from tests.recording import Record, difference, record, report

JOB = "lookup"


@pytest.fixture(scope="module")
def before() -> Record:
    return record(JOB, JOBS[JOB])


def changed(**changes: Any) -> Job:
    return replace(JOBS[JOB], **changes)


def test_a_job_is_recorded_the_same_twice(before: Record) -> None:
    assert before["steps"]
    assert sum(step["launches"] for step in before["steps"]) > len(before["steps"])
    assert report([before], [record(JOB, JOBS[JOB])]) == (["lookup: same"], True)


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (changed(drafter="window"), ("K ",)),
        (changed(batch={"prefill_tokens": 5}), ("step 0", "segments")),
        (changed(**FEW_PAGES), ("step 0", "pages 56 -> ")),
        (changed(options={"lengths": 1}), ("step 1", "K 4 -> 1")),
    ],
    ids=["another drafter", "shorter passes", "fewer pages", "fewer drafts verified"],
)
def test_another_step_is_told(before: Record, job: Job, words: tuple[str, ...]) -> None:
    lines, same = report([before], [record(JOB, job)])
    assert not same
    assert len(lines) == 1
    assert all(word in lines[0] for word in words), lines


def test_one_more_launch_is_told_with_its_step(before: Record) -> None:
    after = {**before, "steps": [dict(step) for step in before["steps"]]}
    after["steps"][2] |= {"launches": before["steps"][2]["launches"] + 1, "of_launches": "another"}
    found = difference(before, after)
    assert found is not None
    assert found.startswith("step 2 (")
    assert "launches" in found


def test_jobs_and_steps_that_only_one_commit_has_are_told(before: Record) -> None:
    shorter = {**before, "steps": before["steps"][:-1]}
    count = len(before["steps"])
    assert report([before], [shorter, {**before, "job": "new"}]) == (
        [f"lookup: {count} -> {count - 1} steps", "new: only after"], False,
    )


def test_rows_of_the_jobs_with_few_pages_are_preempted() -> None:
    found = record("few pages", JOBS["few pages, eagle3"])
    assert sum(step["refills"] for step in found["steps"]) > len(found["rows"])
