"""The dataset: the content of input and output files. Changes when an input format, a column or the output schema changes.

Imports storage/ for bytes; knows nothing of claims, commits and retries.

Input:
  reader.py            the input as a stream of shards
  shard_layout.py      which input rows each shard holds
  input_paths.py       the files that input.path names
  dataset_folders.py   which files of a folder are its data
  hub_splits.py        which files of a hub dataset belong to a split
  in_memory.py         rows in memory as a table
  image_files.py       images that rows name by a path
  files.py             an input file as parts that can be read independently; Parquet
  decoding.py          how a row group of Parquet is decoded in bounded memory
  arrow_file.py        Arrow IPC files and streams as such files
  json_lines.py        JSON lines as such a file
  csv_file.py          CSV as such a file
  pdf_file.py          PDFs as such files, a page a row
  common_schema.py     the columns of files that differ without loss; wider_type.py: the type that holds those of both
  partitions.py        Hive partitions as columns
  formats.py           which files are data, by name; text files, compressed ones too
  lines.py             the lines of a text; one that is too long is skipped
  untyped_columns.py   the type of a column of JSON lines or CSV, from all its cells
  json_text.py         JSON text as Python values, and values as JSON text
  columns.py           the meaning of each column; column_types.py: the types that it may have
  row_ids.py           the ids of the rows
  job_rows.py          the output of an earlier job as an input; job_file.py: one of its files as a file of the input
  row_expressions.py   SQL expressions over the rows of an output
  messages.py          a chat in the form that the template reads and in the form of the output
  openai_requests.py   requests of OpenAI's batch files as rows; openai_keys.py: their keys, openai_values.py: their values
Output:
  schema.py            the columns of an output file
  plain_types.py       types of copied columns
  chats.py             the column `messages`
  valid_text.py        text of columns whose bytes may not be UTF-8
  writer.py            completions as a table, and the table as a Parquet file
  openai_responses.py  output rows as responses of OpenAI's batch files
"""
