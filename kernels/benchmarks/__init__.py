"""Benchmarks of kernels: `python -m batchspec.kernels.benchmarks NAME...`. Nothing else imports this package.

case.py     an entry of the table: kernel, shapes, calls, bytes, operations
runner.py   checks and times the calls, and prints a line for each way
table.py    all entries, from: attention.py, experts.py with moe_weights.py, gated_delta.py, mamba2.py, products.py, routing.py,
            sampling.py, vision.py
recurrences.py  what those of recurrent layers share
exchange.py exchanges between GPUs, with processes of their own
"""
