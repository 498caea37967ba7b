"""State-space layers (Mamba2): Nemotron, Granite 4 H, Bamba, Falcon-H1.

block.py  shape, weights, forward pass
"""
