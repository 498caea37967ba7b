"""The state of a job's runs: everything in an output folder except the rows, and the exactly-once commit of shards.

Changes when a rule of resuming, retrying or committing changes, or a file under _batchspec/. Imports storage/ for files and
dataset/ for the shard's Parquet file.

  output_folder.py   the job's folder for a run: commits shards, writes card and report (`OutputFolder`)
  run_folder.py      files of a job that are not shards: K/V scales, sums of weights, logs, the journal, attempts
  job_folder.py      which job the folder holds: created once, compared, joined, overwritten (`JobFolder`)
  job_state.py       what the job is now: manifest, retries, extensions, shards that are done (`JobState`)
  finished_job.py    a job whose output is the input of another: it must be complete, and stay as it is (`FinishedJob`)
  manifest.py        what a job is: its fingerprint, configuration and shards, and how many rows a shard has
  overwrite.py       output.overwrite: which process deletes the old job, and how a run notices that its job is gone
  footers.py         whether a shard is committed, by the footer of its file
  scan.py            the rows of committed shards as a polars frame
  shard_writer.py    writes a shard's file and reads it back before it gets its name
  shard_sums.py      the sha256 of each shard as a run committed it
  claims.py          leases on shards: which run works on which
  journal.py         finished rows, and tokens of unfinished ones, of shards that are not committed
  journal_rows.py    rows of the journal, as they are written in its files
  in_thread.py       runs an operation of a store in a thread, so that rounds do not wait for it
  attempts.py        what runs were computing when they crashed
  generations.py     how a job changed since: retries (resume.retry), and extensions in one order with them
  extensions.py      rows that were added to a job (resume=extend)
  heartbeats.py      what every run reports about itself, for `batchspec status`; heartbeat_writer.py writes it
"""
