"""Faults in vllm_kvq/integration: what is served, said and refused."""

from __future__ import annotations

from proof.mutants.fault import Fault

ROOM = "vllm_kvq/integration"
SERVED = "tests/engine/test_served.py"
CAPACITY = "tests/engine/test_capacity.py -k vllms_count"
REFUSALS = "tests/engine/test_refusals.py"
COMPAT = "tests/engine/test_compat.py -k 'not vllm_starts'"
REPLICAS = "tests/engine/test_replicas.py"
ORPHANS = "tests/engine/test_orphans.py -k 'not spawned'"
SETUP = "tests/engine/test_setup.py"

FAULTS: tuple[Fault, ...] = (
    # -- what is served, and what users are told
    Fault(
        "the announced capacity is doubled",
        f"{ROOM}/report.py",
        "tokens = blocks / per_request * served.max_len",
        "tokens = 2 * blocks / per_request * served.max_len",
        CAPACITY,
    ),
    Fault(
        "the announced capacity forgets skipped layers",
        f"{ROOM}/served.py",
        "if skipped := len(self.layers.skipped):",
        "if (skipped := len(self.layers.skipped)) > self.layers.total:",
        CAPACITY,
    ),
    Fault(
        "the announced capacity forgets sidecars",
        f"{ROOM}/served.py",
        "packed = whole + self.sidecar_blocks + self.sink_blocks",
        "packed = whole",
        CAPACITY,
    ),
    Fault(
        "a window counts one batch in flight whatever the number of stages",
        f"{ROOM}/served.py",
        "window - 1 + vllm_config.max_in_flight_tokens",
        "window - 1 + vllm_config.scheduler_config.max_num_batched_tokens",
        CAPACITY,
    ),
    Fault(
        "the 16-bit cache of the same bytes counts a rank's blocks for a group of one layer",
        f"{ROOM}/report.py",
        "plain = blocks * size / sum",
        "plain = blocks * served.page_bytes / sum",
        CAPACITY,
    ),
    Fault(
        "every rank prints the start line",
        f"{ROOM}/report.py",
        "    if not is_global_first_rank():\n        return\n",
        "    is_global_first_rank()\n",
        SERVED,
    ),
    Fault(
        "the start line keeps the length from before vLLM chose it",
        f"{ROOM}/report.py",
        "    served = replace(served, max_len=vllm_config.model_config.max_model_len)\n",
        "    served = replace(served, max_len=served.max_len)\n",
        SERVED,
    ),
    Fault(
        "columns of the table of formats are swapped",
        "vllm_kvq/cli/formats.py",
        "{fmt.bits_per_element(d, n):.4f}  {fmt.capacity_factor(d, n):5.2f}x",
        "{fmt.capacity_factor(d, n):.4f}  {fmt.bits_per_element(d, n):5.2f}x",
        "tests/test_cli.py",
    ),
    Fault(
        "head sizes and block sizes are mixed up in the table of formats",
        "vllm_kvq/cli/formats.py",
        "{fmt.bits_per_element(d, n):.4f}",
        "{fmt.bits_per_element(n, d):.4f}",
        "tests/test_cli.py",
    ),
    Fault(
        "hits beside windows leave the window to be computed",
        f"{ROOM}/served.py",
        "return 0 if layers.windows else fmt.W",
        "return fmt.W",
        SERVED,
    ),
    Fault(
        "window layers are not handed to vLLM as skipped",
        f"{ROOM}/served.py",
        "cache.kv_cache_dtype_skip_layers = list(served.layers.kept)",
        "cache.kv_cache_dtype_skip_layers = [i for i in served.layers.kept if i.isdigit()]",
        SERVED,
    ),
    Fault(
        "a window layer that is skipped, too, is counted twice",
        f"{ROOM}/kept.py",
        "return cls(model.get_total_num_hidden_layers(), windows, named - windows, tuple(sorted(kept)))",
        "return cls(model.get_total_num_hidden_layers(), windows, named, tuple(sorted(kept)))",
        SERVED,
    ),
    Fault(
        "the draft takes the target's dtype",
        f"{ROOM}/served.py",
        'vllm_config.speculative_config.kv_cache_dtype = "auto"',
        "vllm_config.speculative_config.kv_cache_dtype = cache.cache_dtype",
        SERVED,
    ),
    Fault(
        "window layers make one group however wide",
        f"{ROOM}/report.py",
        "return -(-windows.layers // max(_full_bytes(served) // windows.page_bytes, 1))",
        "return 1",
        CAPACITY,
    ),
    Fault(
        "a pattern of layers is not seen",
        f"{ROOM}/report.py",
        "if any(len(counts) > 1 for counts in alike):",
        "if not served.kinds:",
        CAPACITY,
    ),
    Fault(
        "a group begins with a layer in 16 bits",
        f"{ROOM}/layer.py",
        "            put_first(name, layers)\n",
        "            pass\n",
        "tests/models/test_hits.py",
        slow=True,
    ),
    # -- refusals
    Fault(
        "KV connectors are served by an offloading size",
        f"{ROOM}/validate.py",
        "vllm_config.kv_transfer_config is not None or vllm_config.cache_config.kv_offloading_size",
        "vllm_config.kv_transfer_config is not None",
        REFUSALS,
    ),
    Fault(
        "N and --block-size may disagree",
        f"{ROOM}/validate.py",
        "if settings.N is not None and cache.user_specified_block_size and cache.block_size != settings.N:",
        "if settings.N is not None and not cache.user_specified_block_size and cache.block_size != settings.N:",
        REFUSALS,
    ),
    Fault(
        "a layer beyond the model's last may be skipped",
        f"{ROOM}/kept.py",
        "beyond = sorted(i for i in self.skipped if i >= self.total)",
        "beyond = sorted(i for i in self.skipped if i > self.total)",
        REFUSALS,
    ),
    Fault(
        "a layer without its companion runs without it",
        f"{ROOM}/backend.py",
        "        if packed is None:\n            raise RuntimeError(\n",
        "        if packed is None:\n            return output.fill_(0)\n            raise RuntimeError(\n",
        REFUSALS,
    ),
    # -- the ledger
    Fault(
        "a missing member is not noticed",
        f"{ROOM}/compat.py",
        "    if found is None or not member:\n        return found is not None\n",
        "    if found is None or member:\n        return found is not None\n",
        COMPAT,
    ),
    Fault(
        "a private name is used and not in the ledger",
        f"{ROOM}/compat.py",
        '    "vllm.v1.core.kv_cache_utils": (\n',
        '    "vllm.v1.core.kv_cache_util": (\n',
        COMPAT,
    ),
    Fault(
        "the plugin registers although vLLM lacks a name",
        f"{ROOM}/plugin.py",
        'init_logger("vllm.kvq").error("%s", problem)\n        return\n',
        'init_logger("vllm.kvq").error("%s", problem)\n',
        COMPAT,
    ),
    # -- copies of KV heads
    Fault(
        "every rank takes the queries of the first ones",
        f"{ROOM}/replicas.py",
        "first = group.rank_in_group // copies * copies",
        "first = 0",
        REPLICAS,
    ),
    Fault(
        "the ranks that share a head are taken for every n-th",
        f"{ROOM}/replicas.py",
        "return every[:, first : first + copies].flatten(1, 2)",
        "return every[:, group.rank_in_group % copies :: copies].flatten(1, 2)",
        REPLICAS,
    ),
    Fault(
        "copies are counted as if each rank had a head of its own",
        f"{ROOM}/replicas.py",
        "return None if copies == 1 else _gatherer(copies)",
        "return None if copies <= 2 else _gatherer(copies)",
        REPLICAS,
    ),
    # -- prompts and setup
    Fault(
        "vLLM's CPU attention serves where its log-sum-exp is needed",
        f"{ROOM}/prompts.py",
        'return "it returns no log-sum-exp" if asked.merged else None',
        "return None",
        "tests/engine/test_gpu_path.py -k by_sdpa",
    ),
    Fault(
        "a longer prompt's blocks are taken for the next request's",
        f"{ROOM}/prompts.py",
        "slots = (BLOCK * blocks * torch.arange(n)[:, None] + torch.arange(q)).flatten()",
        "slots = (q * torch.arange(n)[:, None] + torch.arange(q)).flatten()",
        "tests/engine/test_prompt.py",
    ),
    Fault(
        "a layer's number is the first one's for all",
        f"{ROOM}/setup.py",
        "Geometry(head_size, vllm_config.cache_config.block_size, dtype, layer, pairing, rotary)",
        "Geometry(head_size, vllm_config.cache_config.block_size, dtype, 0, pairing, rotary)",
        SETUP,
    ),
    Fault(
        "the user's pairing is overruled by the model's",
        f"{ROOM}/setup.py",
        "    if wanted is not None:\n",
        "    if wanted is not None and not styles:\n",
        SETUP,
    ),
    # -- engines without a server
    Fault(
        "an engine stays when its server is gone",
        f"{ROOM}/orphans.py",
        "while os.getppid() == parent:",
        "while parent:",
        ORPHANS,
    ),
    Fault(
        "an engine ends beside its server",
        f"{ROOM}/orphans.py",
        "while os.getppid() == parent:",
        "while os.getppid() != parent:",
        ORPHANS,
    ),
    Fault(
        "an engine that warms up stays when its server is gone",
        f"{ROOM}/orphans.py",
        "    os.kill(os.getpid(), signal.SIGKILL)\n",
        "",
        ORPHANS,
    ),
    Fault(
        "engines of vLLM's own cache are watched, too",
        f"{ROOM}/platform.py",
        "    cache = vllm_config.cache_config\n",
        "    cache = vllm_config.cache_config\n    guard()\n",
        ORPHANS,
    ),
    Fault(
        "one of several API servers stays when its server is gone",
        f"{ROOM}/orphans.py",
        "if current_process().name.startswith(API_SERVER):",
        "if not API_SERVER:",
        ORPHANS,
    ),
    Fault("no engine is watched", f"{ROOM}/platform.py", "    guard()\n", "", ORPHANS),
    # -- the start
    Fault(
        "a refusal inside LLM() is wrapped by pydantic",
        f"{ROOM}/validate.py",
        "class Refused(Exception):",
        "class Refused(ValueError):",
        REFUSALS,
    ),
    Fault(
        "options outside of 'kvq' are ignored",
        f"{ROOM}/setup.py",
        "        if key in readers():",
        "        if key not in extra:",
        REFUSALS,
    ),
    Fault(
        "options under another dtype are ignored",
        f"{ROOM}/setup.py",
        'return _without_format(dtype) if "kvq" in extra else None',
        "return None",
        REFUSALS,
    ),
    Fault(
        "memory that is not free is vLLM's problem",
        f"{ROOM}/memory.py",
        "        if wanted <= self.available:",
        "        if wanted <= self.total:",
        REFUSALS,
    ),
    Fault(
        "blocks may be larger than the documents say",
        "vllm_kvq/formats/codec.py",
        "LARGEST_BLOCK = 1024",
        "LARGEST_BLOCK = 1536",
        "tests/formats/test_page.py -k too_large",
    ),
    Fault(
        "a chunk of a seeded prompt ends the engine",
        f"{ROOM}/seeds.py",
        "            del self.input_batch.generators[i]",
        "            pass",
        "tests/engine/test_seeds.py",
        slow=True,
    ),
    Fault(
        "a chunk of a seeded prompt draws a number",
        f"{ROOM}/seeds.py",
        "            self.input_batch.generators[i].set_state(state)",
        "            pass",
        "tests/engine/test_seeds.py",
        slow=True,
    ),
)
