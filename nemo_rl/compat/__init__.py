"""NeMo-RL's recipes, environments and Python names, read as this project's own.

A leaf: the core never imports it, but asks for its modules by dotted path (config/registries.py) and does without
absent ones. The modules at NeMo-RL's import paths find their names through python_names.py.
"""
