"""What the tables of the documents are printed from.

instructions.py    instructions of CPU attention per cached element
attended.py        which formats the GPU kernels attend, and which of them share a kernel
gpu/               registers, spills and inner loops of the GPU kernels, what they load, and the bounds that follow
transformed/       what transform coding gains, and what was tried for it
scheduler.py       the cost of KV cache groups
connectors.py      docs/results/connectors.md; patches.py: docs/compatibility.md
"""
