"""What each instruction does, by kind.

arithmetic.py  from registers to registers; functions.py and integers.py have the functions themselves
accesses.py    memory
collective.py  a warp together: warp.py; wgmma.py, a warp group
operands.py    registers, constants and addresses, looked up once
"""
