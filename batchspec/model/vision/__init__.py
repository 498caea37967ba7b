"""Parts of models that encode images (eyes), in plain torch.

  eye.py       what an eye is to the rest of the program
  blocks.py    attention within images, axial rotations, positions of a grid
  qwen3_vl.py  the eye of Qwen3-VL and of Qwen3.5 to 3.8
  registry.py  which models have one
"""
