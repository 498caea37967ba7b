"""Layers with a state space (Mamba2)."""
