"""Drafters: what proposes the tokens that a round verifies. `config.drafters` lists them.

base.py        the protocol of all drafters
spec.py        a drafter before there is an engine: keys, checks, bytes, K/V layout, builder
shapes.py      what a round verifies of a row: a chain or a tree
none.py        no drafter
lookup.py      n-grams of the same row; corpus.py: of finished rows
eagle3.py      an EAGLE-3 or P-EAGLE head: chain.py, tree.py, parallel.py
block.py       a DFlash, DFlash2 or DSpark head: K tokens at once; waiting_states.py: what rounds without drafts put off
mtp.py         the MTP layer of the model's own checkpoint; assistant.py: a small model that reads the target's K and V
hybrid.py      a head and a lookup together
pard.py        a small language model
window.py      the target itself, with a window
coupled.py     drafts that use the noise of the target's draws
Heads:
  bound_head.py    the network of any head, bound to a target; output.py: chooses tokens from what it computes
  reader.py        its K/V and its pass over positions with hidden states
  head.py          an EAGLE-3 head; head_tensors.py: its tensors and layers
  weights.py       reads one, or makes a random one
  formats.py       config.json of a published one; layouts.py: its two layouts
  shard.py         the part of it that a rank holds
  block_spec.py    config.json of a head for blocks; block_keys.py: its keys; block_parts.py: what its tensors decide
  block_tensors.py its tensors and layers; block_conv.py: convolutions within a block (DFlash2)
  block_head.py    its weights and network; markov.py: chooses its drafts
  mtp_head.py      an MTP layer as a head; frequent_tokens.py: a smaller vocabulary for it
  assistant_spec.py  the shape of an assistant; assistant_head.py: its weights and its network
"""
