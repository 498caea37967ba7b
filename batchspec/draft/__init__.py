"""Drafters: what proposes the tokens that a round verifies. registry.py lists them.

base.py        the protocol of all drafters
spec.py        a drafter before there is an engine: keys, checks, bytes, K/V layout, builder
shapes.py      what a round verifies of a row: a chain or a tree
none.py        no drafter
lookup.py      n-grams of the same row; corpus.py: of finished rows
eagle3.py      an EAGLE-3 or P-EAGLE head: chain.py, tree.py, parallel.py
hybrid.py      a head and a lookup together
pard.py        a small language model
window.py      the target itself, with a window
coupled.py     drafts that use the noise of the target's draws
Heads:
  formats.py   config.json of a published head; layouts.py: its two layouts
  weights.py   its tensors
  shard.py     the part of it that a rank holds
  head.py      its network
  reader.py    its K/V and its pass over positions with hidden states
"""
