"""Text <-> tokens of a model folder: its tokenizer, its chat template, the tokens around a thought.

tokenizer.py          text <-> ids, chats -> ids; token_bytes.py: the bytes of each token; text_bytes.py: bounds of them
token_texts.py        the text and bytes of single tokens
text_growth.py        refuses a tokenizer that lets text grow without bounds
special_tokens.py     special and added tokens from tokenizer_config.json, which tokenizer.json may lack
templates.py          chat templates, rendered by template_process.py; row_values.py: the values of a row, for templates of rows
chat_templates.py     chats -> text; template_form.py: the form that a template wants; dropped_parts.py: what it leaves out
thinking.py           the tokens around a thought
"""
