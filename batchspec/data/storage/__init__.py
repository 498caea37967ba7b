"""Storage: files and objects by name, on this machine or in a bucket. Changes when a store or a remote file system is added.

Nothing here knows what a job, a shard or a row is; nothing here imports dataset/ or runstate/.

Where a job's output folder is (read and write; a name is published exactly once):
  store.py          what every store promises (`Store`), and what they share
  open_store.py     the store of an output.dir
  local_store.py    a folder of a local or shared file system
  local_tree.py     the files of a folder of this machine, or of a pattern
  object_store.py   a prefix of a bucket, whatever the service
  s3_store.py       its requests to S3, by boto3
  cloud_store.py    its requests to Google Cloud Storage and Azure, by obstore
Where input files are (read only):
  places.py         what an entry of input.path names: local or remote
  remote_files.py   what every remote file system offers (`RemoteFiles`), and those that Arrow reaches
  cloud_files.py    Google Cloud Storage and Azure
  hub_files.py      datasets of the Hugging Face hub
  exact_files.py    paths for Arrow and polars: no wildcards, URLs or partitions
  arrow_view.py     a remote file system in the form that Arrow's readers need
Where a finished job is pushed to:
  hub_push.py       files to a dataset of the Hugging Face hub
For all:
  new_file.py       local files that appear when they are complete
  s3_client.py      settings, clients and errors of S3
  cloud_client.py   URLs, clients and errors of Google Cloud Storage and Azure
  retry.py          how often and how long a request is repeated
"""
