"""What people read about a job: progress, status, statistics, the dataset card and report.html.

While it runs:
  progress_bar.py   a bar, or a line now and then
  start_up.py       the phases until the first token
  timeline.py       samples of a run over time
  summary.py        the last lines of a run
  status.py         a job over all its runs
Afterwards:
  stats.py          statistics of output and speculation
  trained_head.py   what the head brought that the job trained
  acceptance.py     how drafts were accepted, for stats and the card
  quality.py        is the data good: lengths, empty answers, loops, distinct answers, random samples
  scores.py         scores of a model's labels
  labels.py         what answers are: labels; json_answers.py: fields of JSON objects; calls.py: tool calls
  texts.py          requests that are shown, with their texts
  about.py          short facts about a job
  card.py           README.md; columns.py: what each column means; push.py: rows and card to the hub
  answers.py        the rows as OpenAI's response lines
  page.py           report.html
    answer_sections.py  labels, scores, fields, tool calls
    figures.py      pictures of lengths and of the job over time; pictures.py: SVG
    error_rows.py   the first error rows of each code
    thumbnails.py   images of the rows that are shown
    html.py         pieces of HTML; style.py: CSS
"""
