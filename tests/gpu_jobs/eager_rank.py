"""`python -m tests.gpu_jobs.eager_rank SEAT [PIPE]`: a rank of a warm engine, where requests enter slots early (`Case.eager`)."""

import pytest

from batchspec.cli import guarded
from batchspec.process.program import end_program
from batchspec.warm import rank_process
from tests.gpu_jobs.entry_points import enter_early

if __name__ == "__main__":
    enter_early(pytest.MonkeyPatch())
    end_program(guarded(rank_process.main))
