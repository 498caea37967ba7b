"""Trains a model of 6 million weights to read lines of text: a Qwen3.5 with vision and an MTP layer, from nothing.

    python jobs/examples/reader/train_reader.py OUT --fonts FOLDER [--minutes 13] [--processes 14] [--resume]

FOLDER has .ttf and .otf files, of which --unseen is left out and only tested. OUT becomes a model folder that batchspec and
transformers read; it is written every other minute, with what --resume needs in OUT/state.pt. Each minute prints the share of
lines of 10 to 40 characters that are read without any mistake.

Lines are short and clean at first and become harder when most are read, or when their time is over. Two outputs that the
checkpoint does not have guide training: which character stands in each column of a picture, and where the next character is.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from reader_feed import LEVELS, Batch, Feed
from reader_folder import IM_END, prompt_of, save
from reader_lines import UNSEEN, find_fonts, lines_to_test
from reader_model import Reader
from reader_pictures import pictures
from reader_vision import Shape
from reader_weights import Weights
from torch import Tensor

QUESTIONS = ("", "Read.", "Read the line.")
UNTIL = (0.06, 0.12, 0.2, 0.3)
"""Shares of the time after which the next level begins at the latest."""
ENOUGH = 0.6
"""Lines read without a mistake, a share, from which on the next level begins."""
WARM, COOL = 0.02, 0.5
"""Shares of the time: the learning rate rises before the first, and falls to 0 after the second."""
PIXELS = 256 * 64 * 448
"""Of a batch at most."""


@cache
def _prompt(question: str, device: torch.device) -> tuple[Tensor, Tensor]:
    before, after = (torch.tensor(ids, device=device) for ids in prompt_of(question))
    return before, after


def tokens_of(batch: Batch, question: str) -> tuple[Tensor, Tensor, int]:
    """Tokens before and after the picture [B, n], [B, T], and at which of the latter the answer begins."""
    device, rows = batch.chars.device, len(batch.chars)
    before, prompt = (own.expand(rows, -1) for own in _prompt(question, device))
    answer = F.pad(batch.chars[:, : batch.longest], (0, 1)).long()
    return before, torch.cat((prompt, answer.masked_fill(answer == 0, IM_END)), 1), prompt.shape[1]


def labels_of(batch: Batch, after: Tensor, begin: int) -> tuple[Tensor, Tensor, Tensor]:
    """[B, T] the next token of the answer and where it stands, in 8 pixels; [B, W / 8] the character of each 8 pixels, 0: none.
    -100 is no label."""
    lengths = (batch.chars > 0).sum(1, keepdim=True)
    place = torch.arange(after.shape[1], device=after.device)[None] + 1 - begin  # which character comes next
    valid = (place >= 0) & (place <= lengths)
    following = F.pad(after[:, 1:], (0, 1), value=IM_END).masked_fill(~valid, -100)
    edges = batch.edges.long()
    index = place.clamp(min=0).expand_as(after).minimum(lengths)
    middle = (edges.gather(1, index) + edges.gather(1, (index + 1).minimum(lengths))) // 16
    x = torch.arange(4, batch.masks.shape[2], 8, device=after.device)
    covers = ((edges[:, :, None] <= x) & (edges[:, :, None] >= 0)).sum(1) - 1
    chars = batch.chars.long().gather(1, covers.clamp(0, batch.chars.shape[1] - 1))
    return following, middle.clamp(0, 95).masked_fill(~valid, -100), chars.masked_fill((covers < 0) | (covers >= lengths), 0)


@dataclass(frozen=True, slots=True)
class Losses:
    """Of a batch, fp32 on its device."""

    text: Tensor
    mtp: Tensor
    place: Tensor
    guide: Tensor
    exact: Tensor
    """Share of lines whose every token is the likeliest one: what greedy decoding gives."""

    def total(self, share: float) -> Tensor:
        """share: of the time that is over; the guides count less and less."""
        guides = max(0.1, 1 - 2 * share)
        return self.text + 0.2 * self.mtp + guides * (0.2 * self.place + 0.5 * self.guide)


def losses_of(model: Reader, batch: Batch, strength: float, question: str, generator: torch.Generator | None = None) -> Losses:
    images = pictures(batch.masks, batch.room, strength, generator)
    before, after, begin = tokens_of(batch, question)
    logits, ahead, place, guide = model(images, before, after)
    following, middle, chars = labels_of(batch, after, begin)
    later = torch.where(following[:, :-1] == -100, -100, following[:, 1:])

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)

    right = (logits.argmax(-1) == following) | (following == -100)
    texts = loss(logits, following), loss(ahead, later)
    return Losses(*texts, loss(place, middle), loss(guide, chars), right.all(1).float().mean())


@torch.no_grad()
def exact_share(model: Reader, batches: Sequence[Batch]) -> float:
    """The share of these lines that is read without a mistake. The same pictures each time."""
    device = batches[0].masks.device
    generator = torch.Generator(device).manual_seed(0)
    found = [losses_of(model, batch, 1.0, QUESTIONS[0], generator).exact * len(batch.masks) for batch in batches]
    return float(sum(found)) / sum(len(batch.masks) for batch in batches)


def rate_at(share: float) -> float:
    """The factor of the learning rate when this share of the time is over."""
    return min(1.0, share / WARM + 0.01, max(0.0, (1 - share) / (1 - COOL)))


def train(options: argparse.Namespace) -> float:
    """Trains, prints and writes OUT. Returns the share of seen fonts' lines that is read without a mistake."""
    seen, unseen = find_fonts(options.fonts, options.unseen)
    out, device = Path(options.out), torch.device(options.device)
    feed = Feed(seen, processes=options.processes, pixels=options.pixels, seed=options.seed)
    torch.manual_seed(options.seed)
    model = Reader(Shape()).to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    weights = Weights(model, options.rate, dtype)
    if options.compile:
        torch._dynamo.config.suppress_errors = True  # what does not compile runs as it is
        for block in model.model.visual.blocks:
            block.compile(dynamic=True)
    print(f"{sum(own.numel() for own in weights.named.values()) / 1e6:.2f} M weights, {len(seen)} fonts", flush=True)
    tests = {
        name: [Batch.of(lines, len(LEVELS) - 1, device) for lines in lines_to_test(Random(7), fonts, options.tests)]
        for name, fonts in (("seen", seen), ("unseen", unseen))
    }
    state: dict[str, Any] = {"share": 0.0, "steps": 0, "level": 0}
    if options.resume:
        state = torch.load(out / "state.pt", map_location=device, weights_only=True)
        weights.load(state)
    return Loop(model, weights, feed, tests, options, state).run(device, out)


class Loop:
    """The steps, and what is printed and written between them."""

    def __init__(
        self, model: Reader, weights: Weights, feed: Feed, tests: dict[str, list[Batch]], options: argparse.Namespace,
        state: dict[str, Any],
    ) -> None:
        self._model, self._weights, self._feed, self._tests, self._options = model, weights, feed, tests, options
        self._begin, self._steps, self._level = state["share"], state["steps"], state["level"]
        self._lines, self._recent, self._good = 0, list[Tensor](), deepcopy(weights.state())
        feed.level = self._level

    def run(self, device: torch.device, out: Path) -> float:
        start = told = written = time.perf_counter()
        rng, share = Random(self._options.seed + self._steps), self._begin
        for batch in self._feed.batches(device):
            now = time.perf_counter()
            share = self._begin + (now - start) / (60 * self._options.minutes)
            if share >= 1 or self._steps == self._options.steps:
                break
            self._step(batch, share, rng)
            if now - told >= self._options.tell:
                told = now
                self._tell(share, now - start)
                if now - written >= 100:
                    written = now
                    self._write(out, share)
            elif self._steps % 50 == 0:
                self._look(share)
        exact = self._tell(share, time.perf_counter() - start)
        self._write(out, share)
        return exact

    def _step(self, batch: Batch, share: float, rng: Random) -> None:
        found = losses_of(self._model, batch, LEVELS[batch.level].strength, rng.choice(QUESTIONS))
        found.total(share).backward()
        self._weights.step(rate_at(share))
        self._steps, self._lines = self._steps + 1, self._lines + len(batch.masks)
        if batch.level == self._level:
            of_step = torch.stack((found.text, found.mtp, found.place, found.guide, found.exact)).detach()
            self._recent = [*self._recent[-99:], of_step]

    def _look(self, share: float) -> list[float]:
        """Means of the last steps. Goes to the next level if it is time, and back to good weights if a loss is not a number."""
        if not self._recent:
            return [math.nan] * 5
        means: list[float] = torch.stack(self._recent).mean(0).tolist()
        if not math.isfinite(sum(means)):
            self._weights.load(deepcopy(self._good))
            self._weights.rate *= 0.7
            self._recent = []
            print(f"step {self._steps}: a loss is not a number; back to the last test, rate {self._weights.rate:.1e}", flush=True)
        elif self._level < len(UNTIL) and (share > UNTIL[self._level] or (means[4] > ENOUGH and len(self._recent) == 100)):
            self._level += 1
            self._feed.level, self._recent = self._level, []
            said = " ".join(f"{one:.3f}" for one in means)
            print(f"step {self._steps}: level {self._level}, {share:.0%} of the time, losses {said}", flush=True)
        return means

    def _tell(self, share: float, seconds: float) -> float:
        """Prints, with the tests. Returns the share of seen fonts' lines that is read without a mistake."""
        text, mtp, place, guide, exact = self._look(share)
        if math.isfinite(text):
            self._good = deepcopy(self._weights.state())
        found = {name: exact_share(self._model, batches) for name, batches in self._tests.items()}
        print(
            f"{seconds:5.0f} s step {self._steps} level {self._level}: loss {text:.4f} mtp {mtp:.4f} place {place:.4f} "
            f"guide {guide:.4f} exact {exact:.3f}; " + " ".join(f"{name} {value:.4f}" for name, value in found.items())
            + f"; rate {self._weights.rate * rate_at(share):.1e}, {self._lines / seconds:.0f} lines/s, "
            f"waited {self._feed.waited_s():.1f} s", flush=True,
        )
        return found["seen"]

    def _write(self, out: Path, share: float) -> None:
        save(out, self._model, self._weights.named)
        state = {**self._weights.state(), "share": share, "steps": self._steps, "level": self._level}
        torch.save(state, out / "state.partial")
        (out / "state.partial").rename(out / "state.pt")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("out", help="the model folder to write")
    add("--fonts", type=Path, required=True, help="a folder of .ttf and .otf files")
    add("--unseen", default=UNSEEN, help="the font that is only tested: its file's name without suffix; default: %(default)s")
    add("--minutes", type=float, default=13.0, help="of training; default: %(default)s")
    add("--steps", type=int, default=-1, help="stop after so many steps; default: when the time is over")
    add("--processes", type=int, default=14, help="that draw lines; default: %(default)s")
    add("--pixels", type=int, default=PIXELS, help="of a batch at most; default: %(default)s")
    add("--rate", type=float, default=1e-2, help="learning rate at most; default: %(default)s")
    add("--tests", type=int, default=512, help="lines of each test; default: %(default)s")
    add("--tell", type=float, default=60.0, help="seconds between two tests; default: %(default)s")
    add("--seed", type=int, default=0)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--compile", action="store_true", help="compile the layers of the vision encoder, which may be faster on a GPU")
    add("--resume", action="store_true", help="go on from OUT/state.pt")
    train(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
