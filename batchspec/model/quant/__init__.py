"""Weight formats: how a projection is stored in files and in memory, how it is multiplied, and how ranks divide it.

base.py                  what a format says
registry.py              quantization_config -> the format of each module; module_names.py: how it names modules
formats.py               all formats of one model
plain.py                 the model's own dtype; ordered.py: with sums of one order
grouped.py               products of experts
fp8.py                   FP8 weights; fp8_products.py: with FP8 activations; fp8_at_load.py: of plain files
int4_format.py           what layouts of INT4 have in common; nvfp4_format.py: NVFP4
four_bit.py              products of both; four_bit_experts.py: of experts; nvfp4.py, dequantised.py: in plain torch
mxfp4.py                 experts of gpt-oss
Values of quant_method:
fp8_block.py, compressed_tensors.py, modelopt.py, gptq.py, awq.py
pack_quantized.py        INT4 of compressed-tensors; dynamic.py: keys that GPTQ and AWQ share
"""
