"""The ledger: every patch of vLLM and every private name that is used, why, and until when.

compat.NEEDED is checked at start-up: an upgrade that renames something in it fails with one sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

SUPPORTED = ("0.32", "0.33")


@dataclass(frozen=True)
class Patch:
    """A line of the ledger, which `vllm-kvq doctor` prints."""

    what: str
    why: str
    until: str
    """What would make it unnecessary, or the first version of vLLM that does not need it."""
    versions: tuple[str, ...] = SUPPORTED


LEDGER = (
    Patch("CacheDType literal widened", "0.32 has no way to add a KV cache dtype", "vLLM 0.33", ("0.32",)),
    Patch("register_kv_cache_dtype", "the official way", "stays", ("0.33",)),
    Patch(
        "choices of --kv-cache-dtype replaced",
        "test-only formats are accepted and not listed",
        "a dtype may be registered as hidden",
    ),
    Patch(
        "Platform.get_attn_backend_cls wrapped",
        "a dtype names no backend; the CPU platform ignores a requested one; and a layer that vLLM gives no dtype is "
        "found here",
        "a dtype may name its backend",
    ),
    Patch(
        "Platform.check_and_update_config wrapped",
        "refuse a model or option before weights load, in the process that the user sees; write what follows",
        "plugins may validate configs",
    ),
    Patch(
        "block_size, user_specified_block_size set (served.py)",
        "0.33 asks the backend for a block size once the model is loaded, when formats are bound to one already",
        "it asks before",
    ),
    Patch(
        "kv_transfer_config set and kv_offloading_size taken back (connectors.py)",
        "the connector that vLLM chooses for it knows vLLM's own kinds of layers alone",
        "OffloadingConnector takes registered kinds",
    ),
    Patch(
        "the list of skipped layers set (served.py)",
        "window layers are not in the user's list",
        "a backend may say which layers it does not serve",
    ),
    Patch(
        "Platform._align_heterogeneous_kv_block_size and _align_hybrid_block_size wrapped (layout.py)",
        "they pad the pages of skipped layers, states and packed layers to one size; side by side they need none",
        "it asks for the layout first",
    ),
    Patch(
        "CPUAttentionBackend and its builder subclassed (side_by_side.py)",
        "it does not say that it reads pages that lie side by side, and takes a model's dtype for every layer's",
        "it says so, and asks the layer",
    ),
    Patch(
        "CPUModelRunner._zero_block_ids wrapped (layout.py)",
        "it overlooks groups whose layers have one spec around them, where pages of several sizes lie side by side",
        "it looks into them",
    ),
    Patch(
        "add_kv_sharing_layers_to_kv_cache_groups wrapped in the model runners (sharing.py)",
        "a layer that shares a cache is put into its group, and not into the spec around the layers of that group",
        "it is put into both",
    ),
    Patch(
        "Attention.get_kv_cache_spec wrapped (windows.py)",
        "pages of a window have as many tokens as packed ones, and would leave most of a block unused",
        "a model's windows may have a block size of their own",
    ),
    Patch(
        "ChunkedLocalAttention.get_kv_cache_spec and the get_attn_backend of its module wrapped (windows.py)",
        "it asks for a backend of the whole model's dtype, and groups of such layers can't be cut; windows can",
        "it looks at the list of skipped layers, and its groups are cut",
    ),
    Patch(
        "mamba_block_size set (served.py)",
        "it is read from the block size before ours is known",
        "it is read later",
    ),
    Patch(
        "initialize_mamba_ssu_backend called (states.py)",
        "it overlooks groups whose layers have one spec around them",
        "it looks into them",
    ),
    Patch(
        "MambaMixer2.get_kv_cache_spec replaced on a CPU (states.py)",
        "it keeps states out of the middle of a prompt's chunk with a kernel that a CPU has not, and the engine ends",
        "a CPU has that kernel",
    ),
    Patch(
        'speculative_config.kv_cache_dtype set to "auto" (served.py)',
        "vLLM's proposer builds metadata for a draft's own layers alone, so a draft keeps 16 bits",
        "companions are handed on",
    ),
    Patch(
        "a packed layer moved to the front (layout.py)",
        "a group's first layer decides on its manager and on zeroing, and a draft model gets the first group's table",
        "every layer of a group is asked, and a draft's own table is handed over",
    ),
    Patch(
        "Scheduler.make_stats wrapped",
        "what is cached is known in the engine core alone, and a request's tokens to its scheduler",
        "a plugin may add to its statistics",
    ),
    Patch(
        "SimpleCPUOffloadScheduler.get_num_new_matched_tokens wrapped (connectors.py)",
        "it asks for what follows a hit as if that began a request, where no sinks are",
        "managers are told what comes before",
    ),
    Patch(
        "builtin specs registered first",
        "KVCacheSpecRegistry skips its builtin ones when it is not empty",
        "the registry merges",
    ),
    Patch(
        "rotary_embedding._ROPE_DICT read",
        "an attention layer can't see which channels RoPE pairs, and by which angles it turns them",
        "it can",
    ),
    Patch(
        "CPUModelRunner._sample and _bookkeeping_sync wrapped (seeds.py)",
        "a seeded request whose prompt comes in chunks ends the engine on a CPU",
        "vLLM rewinds a CPU's generator",
    ),
    Patch(
        "EngineCoreProc.run_engine_core and DPCoordinatorProc.run_coordinator wrapped (orphans.py)",
        "the engine stays when its server is killed",
        "vLLM's processes watch the one that made them",
    ),
    Patch(
        "vllm.v1.worker.gpu.warmup._warmup_block_counter wrapped (warmup.py)",
        "a GPU warms up with fewer blocks than a companion has, and with used ones",
        "it asks the spec, and hands out zeroed blocks",
    ),
    Patch("CircularBufferManager's hooks", "one more block than one per request, zeroed", "a public base"),
    Patch(
        'sys.modules["triton_kernels"] = None in a checkout',
        "Python takes our folder triton_kernels/ in a checkout for the package of that name that vLLM looks for",
        "it asks for a module in it",
    ),
    Patch(
        "vllm.entrypoints.cli.serve.cmd_init called (dry_start.py)",
        "`vllm-kvq check` takes the arguments of `vllm serve`",
        "a public parser",
    ),
)
