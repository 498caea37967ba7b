"""The dataset: the content of input and output files. Changes when an input format, a column or the output schema changes.

Imports storage/ for bytes; knows nothing of claims, commits and retries.

Input:
  reader.py            the input as a stream of shards
  input_paths.py       the files that input.path names
    files.py             an input file as parts that can be read independently; Parquet
  json_lines.py        JSON lines as such a file
  csv_file.py          CSV as such a file
  formats.py           which files are data, by name; text files, compressed ones too
  untyped_columns.py   the type of a column of JSON lines or CSV, from all its cells
  json_text.py         JSON text as Python values
    columns.py           the meaning of each column, and the ids of the rows
    messages.py          a chat in the form that the template reads and in the form of the output
    openai.py            OpenAI's batch files, read and written
Output:
  schema.py            the columns of an output file
  writer.py            completions as a table, and the table as a Parquet file
"""
