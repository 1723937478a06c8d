"""Forks one pytest after the other from a process that has already imported what most tests import of other projects.

A script, not a module: it is started in a copy of the checkout and must import nothing of it, because the fault may be
there. Its arguments are the modules to begin with. For each line that it reads (in JSON: pytest's arguments, and
variables to set) it writes two: the process of this pytest, then its exit status.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import sys

AFRESH = {"__main__", "vllm", "vllm_kvq", "proof", "triton"}
"""Imported by each pytest for itself: the code under test, and what reads variables that tests set before."""


def third_parties(names: list[str]) -> list[str]:
    """What is imported with these modules, except for AFRESH. A child process imports them to find out."""
    read, write = os.pipe()
    if os.fork() == 0:
        os.close(read)
        for name in names:
            importlib.import_module(name)
        found = [name for name in sys.modules if name.partition(".")[0] not in AFRESH]
        with os.fdopen(write, "w") as answer:
            json.dump(found, answer)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.wait()
    return json.loads(text) if text else []


def main() -> None:
    orders, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    sys.path[0] = os.getcwd()
    for name in third_parties(sys.argv[1:]):
        with contextlib.suppress(Exception):  # each pytest imports it again, and will say what is wrong with it
            importlib.import_module(name)
    for line in orders:
        child = os.fork()
        if child == 0:
            os.close(orders.fileno())
            os.close(answers.fileno())
            os.setpgid(0, 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
            arguments, variables = json.loads(line)
            os.environ.update(variables)
            sys.argv = ["pytest", *arguments]
            runpy.run_module("pytest", run_name="__main__", alter_sys=True)
            return
        print(child, file=answers, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    main()
