"""Images of prompts on the host, without torch: what an encoded image is, and its pixels as the model's own processor makes them.

  header.py     size and format of an encoded image, without decoding it
  processor.py  preprocessor_config.json: the size to which an image is resized, its tokens, its digest
  pixtral_processor.py  the same of Pixtral's kind, whose images have a limit on the longer side
  glm_processor.py  the same of GLM-OCR's kind, whose limits count the pixels of several frames
  gemma4_processor.py   the same of Gemma 4, whose images get as many tokens as fit a limit, between two of text
  decode.py     an encoded image as RGB of that size
  encode.py     an image of Pillow as an encoded one
  pdf.py        pages of PDFs (pdf_page.py): their sizes, and RGB of that size; pdf_process.py: the process that lists them
  prepared_images.py  pixels of rows that will enter their slots soon; decode_process.py: the processes that make them;
                shared_blocks.py: the memory that they share
"""
