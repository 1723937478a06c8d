"""A server under mixed load for minutes.

    main.py     the command: starts the server and the clients, and stops them
    load.py     what a client asks for, drawn at random
    client.py   one request over HTTP, and what is wrong with its answer
    watch.py    the server's memory and metrics
    pool.py     the blocks of its cache
    report.py   counts, and the verdict

It passes with no errors, flat memory, and every block free at the end.
"""
