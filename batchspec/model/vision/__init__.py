"""Parts of models that encode images (vision encoders), in plain torch.

  spec.py      what a vision encoder is to the rest of the program
  blocks.py    attention within images, axial rotations, positions of a grid
  encoder.py   images of a call grouped by size, cut into patches and encoded in passes
  of_ranks.py  images divided between the ranks of a model
  qwen3_vl.py  the vision encoder of Qwen3-VL and of Qwen3.5 to 3.8
  qwen2_5_vl.py  that of Qwen2.5-VL
  pixtral.py   that of Mistral Small 3.1 and 3.2 and of Ministral 3
  lighton_ocr.py  that of LightOnOCR
  glm_ocr.py   that of GLM-OCR
  gemma4.py    that of Gemma 4; gemma4_unified.py: what the 12B has in place of one
  registry.py  which models have one
"""
