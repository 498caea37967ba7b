"""One run's part of a job: what it claims, decodes and commits, what watches over it, and what ends it."""
