"""Images of prompts on the host, without torch: what an encoded image is, and its pixels as the model's own processor makes them.

  header.py  size and format of an encoded image, without decoding it
  rule.py    preprocessor_config.json: the size to which an image is resized, its tokens, its digest
  decode.py  an encoded image as RGB of that size
  pixels.py  decoded images of a run, in an LRU cache
"""
