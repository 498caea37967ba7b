"""Rounds on the device: draft, verify, accept, commit, catch up. Begin with round.py.

  round.py                 a round; records.py: what rounds are given and give, also on the host;
                           verify_inputs.py: what they verify; tree_round.py: a round of trees
  vocabulary.py            the target's choice of tokens by its logits; vocabulary_of_ranks.py: each rank has a part of it;
                           cutoff_of_ranks.py: top-k, top-p, min-p of these; ablation.py: a variant
  graphs.py                rounds as CUDA graphs, and their capture
  prefix_tables.py         groups of rows that share a prefix
  draft_chances.py         how likely drafts are accepted, and which of them are verified; simulated_acceptance.py: made-up ones
  draft_lengths.py         the numbers of drafts that pay: round_widths.py: those that may be chosen; round_times.py: seconds of a
                           round; survival.py: tokens of a round; expert_reads.py: the experts that a round reads;
                           part_trial.py: whether it pays that rows have lengths of their own
"""
