"""Prefill: passes over known tokens.

  passes.py            a pass, launched kernel by kernel
  graphs.py            short passes as CUDA graphs; shapes.py: which ones; padded.py: what they launch, and their inputs
  cost.py              the time of a pass
  expected_passes.py   the shapes that passes of the surveyed rows will most likely have
"""
