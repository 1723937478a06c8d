"""Random combinations of options, each judged without an engine: `python -m proof options`.

case.py     one combination, as plain data that a JSON file can hold
draw.py     draws them from what the formats declare
judge.py    the properties that every combination must have
trace.py    a step of every path over it, against the reference cache
main.py     the command
"""
