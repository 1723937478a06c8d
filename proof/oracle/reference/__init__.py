"""What an engine must have answered: a model over a cache that is known from positions only.

lives.py      the scheduler's steps as what each request computed
reference.py  the cache: attention over a format's pages
replay.py     a model over it, step by step
whole.py      the same for all steps at once; plan.py determines what each token reads
attention.py  how both replace the attention of a Transformers model, whose layers kinds.py describes
constants.py  what calibrated formats know of each layer
"""
