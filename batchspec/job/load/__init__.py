"""The engine of a checked job, in memory. Changes when what a job loads, or how its rows pass the engine, changes.

loaded_engine.py  `LoadedEngine`: loads an engine, or holds a built one, and runs rows
build.py          the weights, the engine that is built of them, the graphs that its rows will need
short_jobs.py     whether draft=auto drafts in a job of this length
memory.py         what weights and buffers take, what is free, the shape of the batch that fits
"""
