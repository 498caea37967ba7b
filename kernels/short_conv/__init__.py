"""Layers with short convolutions (LFM2)."""
