"""Tool calls in the text of an answer, in the form in which the model's chat template writes them.

A form finds calls in text; what becomes of them is the same for all forms. gpt-oss writes calls as messages of their own, which
are found by their tokens (engine.channel_calls). This package does not import torch.

  form.py        the interface of a form, and what forms share: JSON text, the tools of a row
  registry.py    the forms by name, and which one a model writes; probe.py: a call that templates write, to see that
  marks.py       marks of forms that are tokens of their own
  split.py       an answer as its content and its calls; their ids and OpenAI's form
Forms:
  marked_json.py   JSON between two marks (Hermes, Qwen, Granite, Phi-4-mini), and Mistral's
  llama_json.py    JSON as the whole answer (Llama 3); glm4.py: after a line with the name (GLM-4-0414)
  deepseek.py      JSON between DeepSeek's marks
  gemma4.py        Gemma 4's own notation between its marks
  tagged.py        a tag for each argument (Qwen3-Coder, Seed-OSS, GLM, MiniMax-M2)
  pythonic.py      a list of Python calls (Llama 4, LFM2, OLMo 3)
"""
