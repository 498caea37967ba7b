"""Model families: which keys of config.json they read, and which layers they have. A file each, named as their model_type, and

base.py           what a family declares, and what most families read in the same way
registry.py       those that are supported
shapes.py         shapes that commands know by name; family_shapes.py: a published config.json of each family
"""
