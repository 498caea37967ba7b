"""The training loop: batches, learning rate, checkpoints, acceptance curves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from batchspec.config.train_schema import TrainConfig
from batchspec.errors import Interrupted
from batchspec.heads.data import Numbers, Row
from batchspec.heads.draft_network import DraftNetwork
from batchspec.heads.evaluate import Acceptance, acceptance
from batchspec.heads.folder import HeadFolder
from batchspec.heads.optimise import Optimiser
from batchspec.heads.teacher import Teacher

_WARM = 0.02
_POINTS = 200
"""Number of points of the loss curve."""
_LINE_S = 10.0


def learning_rate(step: int, steps: int, highest: float, spent: float = 0.0) -> float:
    """The learning rate of batch `step`, from 0: a linear rise over the first 2 % of the steps, then a linear fall to zero.

    spent  share of train.minutes that is over: rise and fall follow it where it is ahead of the steps
    """
    warm = max(1, round(_WARM * steps))
    rise, fall = max((step + 1) / warm, spent / _WARM), (steps - step) / max(1, steps - warm)
    return highest * min(rise, fall, max(0.0, 1.0 - spent) / (1.0 - _WARM))


@dataclass(slots=True, kw_only=True)
class Course:
    """A training. `run` does the work; `say` prints its progress."""

    config: TrainConfig
    lr: float
    """Highest learning rate."""
    network: DraftNetwork
    teacher: Teacher
    rows: Sequence[Row]
    held_out: Sequence[Row]
    batches: Sequence[Numbers]
    draft_len: int
    folder: HeadFolder
    say: Callable[[str], None]
    curves: dict[str, list[dict[str, Any]]]
    seconds: float = field(default=0.0, init=False)
    """How long it has trained, earlier runs up to their last checkpoint included."""

    def run(self, asked: Callable[[], str | None]) -> Acceptance | None:
        """Train to the end, or until train.minutes are over; returns the acceptance on the held-out rows, None without any.

        asked  returns the name of the signal that asks to end, or None. After a signal the present batch is finished, a
               checkpoint is written and Interrupted is raised
        """
        optimiser = Optimiser(self.network, lr=self.lr, muon=self.config.muon, fused=self._on_gpu)
        first = self._resume(optimiser)
        total, done_tokens = len(self.batches), 0
        begun = said = saved = time.monotonic()
        before = self.seconds
        for step in range(first, total):
            if self._spent >= 1.0 and step:
                self.say(f"train.minutes={self.config.minutes:g} are over after {step:,} of {total:,} batches")
                total = step
                break
            batch = [self.rows[i] for i in self.batches[step]]
            loss, matches = self._step(step, batch, optimiser)
            done_tokens += sum(len(row.ids) for row in batch)
            if (step + 1) % max(1, total // _POINTS) == 0:
                point = {"step": step + 1, "loss": round(loss.item(), 4), "match": [round(x, 4) for x in matches.tolist()]}
                self.curves["loss"].append(point)
            if self.config.eval_steps and (step + 1) % self.config.eval_steps == 0 and step + 1 < total:
                self.measure(step + 1)
            now = time.monotonic()
            self.seconds = before + now - begun
            if now - said >= _LINE_S or step + 1 == total:
                said = now
                self._say_step(step, loss, matches, done_tokens / (now - begun), (now - begun) / (step + 1 - first))
            signal = asked()
            if signal or now - saved >= self.config.save_s:
                saved = now
                self.folder.save_state(self._state(step + 1, optimiser))
            if signal:
                raise Interrupted(f"{signal}: {step + 1} of {total} batches are trained; run the same command again to go on")
        return self.measure(total)

    @property
    def _on_gpu(self) -> bool:
        return self.teacher.target.device.type == "cuda"

    def _cast(self) -> AbstractContextManager[object]:
        """Autocast to bf16 on a GPU with a bf16 target; the trained weights stay fp32."""
        narrow = self._on_gpu and self.teacher.target.dtype is torch.bfloat16
        return torch.autocast(self.teacher.target.device.type, dtype=torch.bfloat16, enabled=narrow)

    @property
    def _spent(self) -> float:
        """The share of train.minutes that is over; 0 without a limit."""
        return 0.0 if self.config.minutes is None else self.seconds / (60.0 * self.config.minutes)

    def _step(self, step: int, batch: Sequence[Row], optimiser: Optimiser) -> tuple[Tensor, Tensor]:
        data = self.teacher.training_batch(batch)
        with self._cast():
            loss, matches = self.network.loss(data, self.config, step)
        optimiser.step(loss, learning_rate(step, len(self.batches), self.lr, self._spent), self.config.clip)
        return loss.detach(), matches

    def measure(self, step: int) -> Acceptance | None:
        """Measure acceptance: add a point to the curves and print it."""
        if not self.held_out:
            return None
        found = acceptance(
            self.network, self.teacher, self.held_out, draft_len=self.draft_len, batch_tokens=self.config.batch_tokens,
            cast=self._cast(),
        )
        positions = [round(x, 4) for x in found.by_position]
        self.curves["acceptance"].append({"step": step, "mean_length": round(found.mean_length, 4), "by_position": positions})
        self.say(
            f"after {step:,} batches {found.mean_length:.2f} tokens per round with K={self.draft_len} on {len(self.held_out)} "
            f"held-out completions; accepted by position {' '.join(f'{x:.2f}' for x in found.by_position)}"
        )
        return found

    def _say_step(self, step: int, loss: Tensor, matches: Tensor, speed: float, step_s: float) -> None:
        left = (len(self.batches) - step - 1) * step_s
        agree = " ".join(f"{x:.2f}" for x in matches.tolist())
        self.say(
            f"{step + 1:,} of {len(self.batches):,} batches, loss {loss.item():.3f}, right by draft step {agree}, "
            f"{speed:,.0f} tok/s, {left:,.0f} s left"
        )

    def _state(self, step: int, optimiser: Optimiser) -> dict[str, Any]:
        return {
            "step": step, "network": self.network.state_dict(), "optimiser": optimiser.state_dict(), "curves": self.curves,
            "seconds": self.seconds,
        }

    def _resume(self, optimiser: Optimiser) -> int:
        """Load the checkpoint if there is one; returns the number of trained batches."""
        state = self.folder.load_state(self.teacher.target.device)
        if state is None:
            return 0
        self.network.load_state_dict(state["network"])
        optimiser.load_state_dict(state["optimiser"])
        self.curves, self.seconds = state["curves"], state["seconds"]
        self.say(f"continuing after {state['step']:,} of {len(self.batches):,} batches")
        return int(state["step"])
