"""
Layout of packed forwards: their tokens, the places of keys and values, and the columns that each token attends to.
"""
