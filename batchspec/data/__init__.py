"""Data of a job, and where it is kept. Nothing here imports torch.

dataset/    formats of the input and of the output
storage/    one store interface: local, S3, Google, Azure
runstate/   the exactly-once state of runs
"""
