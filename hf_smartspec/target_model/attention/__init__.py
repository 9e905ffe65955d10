"""
Attention of packed rows and draft trees: by masks, in compiled code, over shared prefixes, of variable lengths on CUDA.
"""
