"""A C++ compiler that keeps its objects: CXX="python objects.py FOLDER g++".

A source that preprocesses to the same text, under the same flags, is not compiled again, wherever it is. Without `-c`
the compiler does what it is asked to do. A script, not a module, like warm.py.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path


def main() -> None:
    folder, *command = sys.argv[1:]
    if "-c" not in command:
        os.execvp(command[0], command)
    at = command.index("-o")
    target, line = command[at + 1], command[:at] + command[at + 2 :]
    source = line.index("-c") + 1
    preprocessed = subprocess.run([*line, "-E", "-P"], stdout=subprocess.PIPE)
    if preprocessed.returncode:
        sys.exit(preprocessed.returncode)
    flags = [*line[:source], *line[source + 1 :]]
    kept = Path(folder, hashlib.sha256(repr(flags).encode() + preprocessed.stdout).hexdigest() + ".o")
    if not kept.exists():
        unfinished = kept.with_suffix(f".{os.getpid()}")
        status = subprocess.run([*line, "-o", str(unfinished)]).returncode
        if status:
            sys.exit(status)
        unfinished.replace(kept)
    shutil.copyfile(kept, target)


if __name__ == "__main__":
    main()
