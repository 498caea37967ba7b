"""Many runs of one job: processes of a machine, one a GPU, and tasks of a Slurm array."""
