"""Every prompt length modulo the page, by every way in which a prompt can be cut, each token judged by the oracle.

sweep.py     the engines and their traces
main.py      the command
"""
