"""Constants of calibrated formats, fitted to the loaded model before its cache is sized.

text.py        the bundled texts as pieces of tokens
attending.py   attention among a piece's tokens, in the place of every layer's own, which sums up what it sees
fitting.py     the run, the same constants on all ranks, and the layers that get them
"""
