"""Contexts of 8k to 32k tokens on real engines, each token judged by the oracle.

cases.py     the engines and their traces
main.py      the command
"""
