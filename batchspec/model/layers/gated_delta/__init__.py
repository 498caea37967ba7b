"""The gated delta rule (Qwen3.5, Qwen3-Next).

block.py  shape, weights, forward pass
"""
