"""The model: config.json and safetensors in, a forward pass over a flat batch out. Begin with target.py.

families/ has one file per model family, and configs of known models by name; layers/ has the kinds of layers and their blocks,
quant/ the weight formats.

From config to weights:
  spec.py               config.json -> ModelSpec
  checkpoint_part.py    what is loaded by itself: the model, or its MTP layer
  mtp.py                the layer that predicts one token further
  weight_checks.py      names, shapes and dtypes of tensors, before one is read
  weights.py            the tensors; given.py: tensors in memory
  fused_experts.py      experts that a file holds in one tensor
  dtype.py              the data type in which the model computes
  shard.py              the part of each tensor that a rank holds
  rewrite.py            new weights in the place of the old ones
Forward pass:
  target.py             the target
  decoder.py            its layers; fused.py: elementwise operations
  output_head.py        logits and greedy tokens; vocabulary.py: of several ranks
  single_row.py         one row in one pass, for calibration and comparisons
  products.py           matrix products worth timing
  deterministic.py      batch-invariant sums: which models support them
LoRA:
  lora.py               an adapter merged into the weights; adapter_config.py: its config.json
  lora_products.py      adapters that are not merged; lora_shape.py: their sizes
Scales of an FP8 K/V cache:
  kv_calibration.py     from fixed texts; calibration_texts.py: the texts
"""
