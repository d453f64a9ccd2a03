"""The user's own program in plain PyTorch beside the stages: whether they part, where, and why.

`plain.py` trains a copy of the unsplit model on the same mini-batches, with the random numbers that
each layer gets in the stages, and `twin.py` copies of the stages. `cutting.py` finds what is other
because a mini-batch is cut. `isolation.py` keeps that from changing the script's process.
`compare.py` compares what both have computed, and names the likeliest cause. `run.py` verifies a
pipeline when asked, and the first mini-batch of a run by itself.
"""
