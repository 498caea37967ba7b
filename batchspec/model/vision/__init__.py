"""Parts of models that encode images (vision encoders), in plain torch.

  spec.py      what a vision encoder is to the rest of the program
  blocks.py    attention within images, axial rotations, positions of a grid
  qwen3_vl.py  the vision encoder of Qwen3-VL and of Qwen3.5 to 3.8
  registry.py  which models have one
"""
