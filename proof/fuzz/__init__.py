"""Random traces on the real engine, every token judged by the oracle.

    main.py      the command
    case.py      an engine's configuration and its traces, as JSON
    kinds.py     the models that engines have
    draw.py      random engines and traces
    attempt.py   runs a case and judges it
    session.py   many cases at a time, until time is up or one fails
    shrink.py    makes a failing case small

The same seed draws the same engines and traces.
"""
