"""A server without one of our formats: the installed plugin changes nothing that it does or allocates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

SERVE = """
import gc, json, os, sys
from vllm import LLM, SamplingParams

# an engine's garbage collections would visit, and so copy, all objects of these modules
gc.collect()
gc.freeze()
# vLLM loads plugins later: the two servers have in common only what it has imported by now
if os.fork():
    os.environ["VLLM_PLUGINS"] = "another"
    sys.stdout = open(sys.argv[4], "w")
else:
    sys.stdout = open(sys.argv[3], "w")
llm = LLM(sys.argv[1], dtype="float32", max_model_len=1024, max_num_batched_tokens=256, seed=1,
          **json.loads(sys.argv[2]))
words = [[5 + (i + j) % 200 for j in range(n)] for i, n in enumerate((3, 70, 300, 300, 511))]
words.append(words[2] + [7, 8, 9])  # hits the prefix cache
greedy = SamplingParams(temperature=0.0, max_tokens=20, logprobs=0, ignore_eos=True, detokenize=False)
drawn = SamplingParams(temperature=1.0, max_tokens=20, logprobs=0, ignore_eos=True, detokenize=False)
said = []
for sampling in (greedy, greedy, drawn):
    for answer in llm.generate([{"prompt_token_ids": w} for w in words], sampling, use_tqdm=False):
        best = answer.outputs[0]
        said.append([list(best.token_ids), best.cumulative_logprob, answer.num_cached_tokens])
config = llm.llm_engine.vllm_config
cache, layers = config.cache_config, config.compilation_config.static_forward_context
found = {
    "answers": said,
    "blocks": [cache.num_gpu_blocks, cache.block_size, cache.cache_dtype],
    "layers": {name: [x.attn_backend.get_name(), repr(x.get_kv_cache_spec(config)), list(x.kv_cache.shape)]
               for name, x in layers.items()},
}
loaded = [name for name in sys.modules if name.startswith("vllm_kvq.integration")]
found["plugin"] = bool(loaded)
if loaded:
    from vllm_kvq.integration.patches.patch import Moment
    from vllm_kvq.integration.patches.registry import PATCHES
    found["installed"] = [p.what for p in PATCHES if p.install and p.moment is not Moment.REGISTERED and p.in_effect()]
print(json.dumps(found), flush=True)
if "VLLM_PLUGINS" in os.environ:
    assert os.wait()[1] == 0, "the server with the plugin failed"
"""


def served(model: Path, folder: Path, **arguments: Any) -> list[Any]:
    """What a server with the plugin did, and one for which VLLM_PLUGINS leaves it out."""
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_PLUGINS"}
    environment |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    files = [folder / "with", folder / "without"]
    if arguments["enforce_eager"]:  # vLLM would compile its sampler all the same
        environment["TORCHDYNAMO_DISABLE"] = "1"
    command = [sys.executable, "-c", SERVE, str(model), json.dumps(arguments), *map(str, files)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(file.read_text().splitlines()[-1]) for file in files]


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.wide)])
def test_the_plugin_changes_nothing(eager: bool, model: Path, tmp_path: Path) -> None:
    """Tokens, their probabilities, prefix hits, blocks, backends and caches are those of vLLM by itself."""
    with_plugin, without = served(model, tmp_path, enforce_eager=eager)
    assert (with_plugin.pop("plugin"), without.pop("plugin")) == (True, False)
    assert with_plugin.pop("installed") == [], "patches for our formats only"
    assert any(cached for _, _, cached in without["answers"])
    assert with_plugin == without
