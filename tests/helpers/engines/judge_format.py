"""In a process of its own, with a format's package on its path: traces on the real engine, judged by the oracle.

python judge_format.py FORMAT MODEL    prints the verdict as JSON
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import traces

from proof.oracle.engines.forked import EngineProcess
from proof.oracle.judge import judge
from proof.oracle.reference.replay import ReplayModel

N = 64


def main() -> None:
    name, model = sys.argv[1:]
    todo = [traces.lengths(N, 20), *traces.prefixes(N)]
    with EngineProcess(
        model, {"kv_cache_dtype": name, "block_size": N, "max_num_batched_tokens": 200, "max_num_seqs": 16}, {}
    ) as engine:
        got = [engine.run(trace) for trace in todo]
    print(json.dumps(asdict(judge(ReplayModel(model, name, N), todo, got))))


# guarded: multiprocessing imports the main module again in its children
if __name__ == "__main__":
    main()
