"""The keys of a drafter, `draft.*`: see `schema.py` for how their documentation is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from batchspec.config.drafters import DRAFTERS
from batchspec.config.key import ABOVE_0, key

MAX_TREE_NODES, MAX_TREE_PLACES = 63, 64
"""Maximum number of tree nodes that a round verifies per request besides the newest token, and of positions while a tree is
grown: attention masks of trees have 64 bits."""
MOST_AHEAD = 16
"""Maximum number of draft steps that a training trains, and so the largest block of a head."""


@dataclass(slots=True, kw_only=True)
class TreeConfig:
    topk: int = key(1, low=1, high=64, advice="1 drafts a chain; 4 to 10 works well for a tree", advanced=True)
    """Branches of each node of a draft tree. At each level the topk best nodes branch; 1 drafts a chain."""
    depth: int | None = key(None, low=1, high=64, advice="4 to 6 works well", advanced=True)
    """Levels of a draft tree. null is draft.num_speculative_tokens."""
    nodes: int | None = key(
        None, low=1, high=MAX_TREE_NODES, advice=f"a round verifies the newest token and at most {MAX_TREE_NODES} nodes of a row",
        advanced=True,
    )
    """Maximum number of tree nodes that a round verifies per request, the newest token not counted. null is 60, or all nodes
    that are grown if they are fewer."""


@dataclass(slots=True, kw_only=True)
class OwnHeadConfig:
    kind: str | None = key(None, choices=("eagle3", "block"))
    """The head that a job trains for its model on its own first answers, and then drafts with. `draft=trained` is eagle3; block
    is a DSpark head. null trains none. A head of the same model that an earlier job trained is used at once."""
    minutes: float = key(20.0, low=ABOVE_0, advice="20 is usual")
    """Most minutes that the head trains, on the GPU of the run, which decodes nothing meanwhile. A job trains none if it is
    predicted to end sooner without (`batchspec plan`)."""
    tokens: int = key(4_000_000, low=1_000, advice="4000000 is usual", advanced=True)
    """Tokens of answers that a run decodes before it trains a head on them."""
    store: str | None = key(None, path=True, advanced=True)
    """Local folder of the heads, each below the identity of its model: jobs and tasks that name it share them. null is `heads` in
    batchspec's cache folder ($BATCHSPEC_CACHE). Heads and logs stay; the answers lie there until the training has ended."""


@dataclass(slots=True, kw_only=True)
class DraftConfig:
    """The drafter. The output of a job does not depend on it."""

    name: str = key("auto", choices=tuple(DRAFTERS), names=("speculative_config", "speculative_algorithm"))
    """The kind of drafter. `draft=NAME` sets it together with the usual values of its other keys. auto is mtp if the checkpoint
    has an MTP layer, else lookup; none in a job on a GPU that is too short for them to pay."""
    num_speculative_tokens: int | None = key(
        None, low=1, high=64, advice="give the draft tokens per round, or draft=none for no speculation"
    )
    """K: maximum number of draft tokens per request and round. null is the usual number of the drafter, that of its file in
    conf/draft. With draft.adaptive it is the largest K that is tried."""
    prompt_lookup_min: int = key(2, low=1, high=16, advice="1 or 2 works well", advanced=True)
    """Shortest n-gram that must repeat for a draft, in tokens."""
    prompt_lookup_max: int = key(6, low=1, high=16, advice="3 to 8 works well", advanced=True)
    """Longest n-gram that is searched for, in tokens. The longest match wins."""
    corpus_tokens: int = key(0, low=0, high=2**28, advice="0 is off; 1000000 take 72 MB")
    """Size of the corpus of finished requests that drafts are copied from, in tokens. It holds the newest tokens of prompts and
    outputs; 0 looks in the request's own tokens only. 1,000,000 tokens take 72 MB."""
    coupled: Any = key("auto", form="auto, true, false", advanced=True)
    """Whether drafts of sampled requests use the noise that the target samples with, so that more of them are accepted. auto
    and true do; false drafts the most likely tokens (for comparison). No output token depends on it."""
    synthetic: list[float] | None = key(None, example="[0.8,0.6]", advanced=True)
    """Benchmarks only: accept draft position j with this probability, whatever the tokens. The probabilities are unconditional
    and must not increase. Those of several kinds of rows, which rows take in turn, follow each other: 2 K numbers for two."""
    path: str | None = key(None, names=("speculative_model",), path=True)
    """Folder or hub id of the draft head (eagle3, hybrid, block), small draft model (pard), tuned MTP layer or assistant (mtp).
    null is the layer of the model's own checkpoint (mtp); for a head it is allowed only with model.load_format=dummy, which makes
    a random one."""
    vocab_size: int | None = key(
        None, low=64, high=2**31 - 1, advice="null is the whole vocabulary; 32768 works well for large ones", advanced=True
    )
    """Number of tokens that drafts are chosen from: the most frequent ones of the prompts and outputs that have ended. null is
    all of them. Fewer make a draft step cheaper, which reads one row of the output matrix for each."""
    aux_layers: str = key("auto", choices=("auto", "input", "output"), advanced=True)
    """What the layer ids in the head's config mean. input is the hidden state that enters the layer, output the one that leaves
    it; auto is input, and output for a head in the flat layout whose first id is 1. With draft=block auto is output for
    target_layer_ids and input for aux_hidden_state_layer_ids."""
    adaptive: bool | None = key(None, advanced=True)
    """Whether K of each round, 0 included, is chosen from measured times and acceptance. null is true on a GPU and false on a
    CPU."""
    lengths: str = key("auto", choices=("auto", "fixed"), advanced=True)
    """Whether rows of a round may verify different numbers of drafts. auto spends the positions of a round on the drafts that are
    most likely to be accepted, where measured times say that it pays; fixed verifies all drafts of every row. Only with
    draft.adaptive, and not of trees."""
    parallel: Any = key("auto", form="auto, true, false", advanced=True)
    """Whether all K draft tokens come from one forward pass. auto is true if the head or draft model was trained for it."""
    tree: TreeConfig = field(default_factory=TreeConfig)
    train: OwnHeadConfig = field(default_factory=OwnHeadConfig)
    window: int | None = key(None, low=1, advice="null reads all keys", advanced=True)
    """Number of newest keys that the drafter's attention reads. null is all of them; draft=window needs a number."""
    sink_tokens: int | None = key(None, low=0, advice="4 works well with a window", advanced=True)
    """Number of first keys that the drafter's attention reads besides the window."""
    cache_dtype: str = key("auto", choices=("auto", "fp8"), advanced=True)
    """Data type of the K and V that a head keeps of its own. auto is the model's. fp8 is e4m3: drafting reads half as many
    bytes, and a few drafts may differ; output tokens do not. On a GPU it needs compute capability 8.9 (Ada, Hopper)
    or newer."""

    @property
    def draft_len(self) -> int:
        """K, which is set once the drafter is chosen (`draft_auto.py`) and unless it is none."""
        assert self.num_speculative_tokens is not None, self.name
        return self.num_speculative_tokens

    @property
    def synthetic_kinds(self) -> tuple[tuple[float, ...], ...] | None:
        """`synthetic` of each kind of row."""
        if self.synthetic is None:
            return None
        depth = self.tree.depth or self.draft_len
        return tuple(tuple(self.synthetic[i : i + depth]) for i in range(0, len(self.synthetic), depth))
