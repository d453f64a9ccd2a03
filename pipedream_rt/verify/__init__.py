"""The user's own program in plain PyTorch beside the stages: whether they part, where, and why.

`plain.py` trains a copy of the unsplit model on the same mini-batches, with the random numbers that
each layer gets in the stages. `compare.py` compares what both have computed, and says what may be
the cause. `run.py` asks: for a pipeline at any time, and by itself for the first mini-batch.
"""
