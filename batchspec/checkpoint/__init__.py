"""A model folder as files: where it comes from, what it must hold, checked values of its config.json. Nothing here knows a layer.

files.py              the files of a checkpoint; weight_files.py: digests of them; weight_sums.py: sha256 of every tensor
hub.py                a model of the hub; packaged.py: of a Python package, or one GGUF file, which from_gguf.py reads
config_values.py      checked values; unread_keys.py: keys of config.json that nothing reads
generation_config.py  recommended sampling
wrapped.py            names of the language model in a checkpoint that reads images too, or has no output matrix
sentence_transformers.py  how embeddings are made of states; reranker.py: which two tokens score a document
name_patterns.py      regular expressions of a folder, for names of modules; position_sets.py: matches them without backtracking
"""
