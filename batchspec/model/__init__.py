"""The model: config.json and safetensors in, a forward pass over a flat batch out. Begin with target.py.

families/ has one file a model family, blocks/ the parts of a decoder layer, quant/ the weight formats.

From config to weights:
  spec.py               config.json -> ModelSpec; config_values.py: checked values; rope_config.py: rotary embedding
  checkpoint_part.py    what is loaded by itself: the model, or its MTP layer
  mtp.py                the layer that predicts one token further; assistant.py: a small model that reads another one's K and V
  shapes.py             configs of known models by name, to measure and tune without a checkpoint; family_shapes.py: more
  unread_keys.py        keys of config.json that nothing reads; generation_config.py: recommended sampling
  files.py              the files of a checkpoint; weight_files.py: digests of them; hub.py, packaged.py: where they come from
  weight_checks.py      names, shapes and dtypes of tensors, before one is read
  weights.py            the tensors; given.py: tensors in memory; from_gguf.py: a GGUF file
  wrapped.py            names of the language model in a checkpoint that reads images too
  fused_experts.py      experts that a file holds in one tensor
  weight_sums.py        sha256 of every tensor
  dtype.py              the data type in which the model computes
  shard.py              the part of each tensor that a rank holds
  rewrite.py            new weights in the place of the old ones
Forward pass:
  target.py             the target
  mixer_inputs.py       what its layers read of the rows
  decoder.py            its layers; fused.py: elementwise operations
  rope.py               rotary embedding
  output_head.py        logits and greedy tokens; vocabulary.py: of several ranks
  single_row.py         one row in one pass, for calibration and comparisons
  products.py           matrix products worth timing
  deterministic.py      batch-invariant sums: which models support them
LoRA:
  name_patterns.py      regular expressions of a folder, for names of modules; position_sets.py: matches them without backtracking
  lora.py               an adapter merged into the weights; adapter_config.py: its config.json
  lora_products.py      adapters that are not merged; lora_shape.py: their sizes
Scales of an FP8 K/V cache:
  kv_scales.py          one for K and one for V of each layer and head
  kv_calibration.py     from fixed texts; calibration_texts.py: the texts
Text:
  tokenizer.py          text <-> ids, chats -> ids; token_bytes.py: the bytes of each token; text_bytes.py: bounds of them
  token_texts.py        the text and bytes of single tokens
  text_growth.py        refuses a tokenizer that lets text grow without bounds
  special_tokens.py     special and added tokens from tokenizer_config.json, which tokenizer.json may lack
  templates.py          chat templates, rendered by template_process.py
  chat_templates.py     chats -> text; template_form.py: the form that a template wants; dropped_parts.py: what it leaves out
  thinking.py           the tokens around a thought
"""
