"""MLPs.

gated_mlp.py     dense
moe.py           experts, with or without a shared one; parallel_moe.py: experts beside a dense MLP
"""
