"""Faults in `vllm-kvq plan`: what a machine that is not here would hold."""

from __future__ import annotations

from proof.mutants.fault import Fault

PREVIEW = "vllm_kvq/integration/preview"
BUDGET = f"{PREVIEW}/budget.py"
PLAN_COMMAND = "tests/planning/preview/test_plan.py"
CACHES = "tests/planning/preview/test_plans_of_caches.py"
PLAN = f"{PLAN_COMMAND} {CACHES} -k 'not real'"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a plan gives each stage of a pipeline all layers",
        f"{BUDGET}::_tokens",
        "* wanted.stages",
        "",
        PLAN,
    ),
    Fault(
        "a token of a plan has the bytes of all ranks",
        f"{BUDGET}::_row",
        "=request",
        "=first",
        "tests/planning/preview/test_plan.py -k ranks_share_heads",
    ),
    Fault(
        "a plan is wider than a terminal",
        "vllm_kvq/cli/plan.py::_number",
        'f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"',
        'f"{value:,.2f}"',
        "tests/planning/preview/test_plan.py -k fits_the_terminal",
    ),
    Fault(
        "a plan hands out vLLM's own block",
        f"{BUDGET}::_row",
        "NULL_BLOCK * blocks.nbytes + first",
        "first",
        f"{CACHES} -k vllms_own",
    ),
    Fault(
        "a plan fills vLLM's own block with a request's tokens",
        f"{BUDGET}::_tokens",
        "pool - NULL_BLOCK < blocks.most",
        "pool < blocks.most",
        f"{CACHES} -k vllms_own",
    ),
    Fault(
        "a plan says of vLLM's line what ours says",
        f"{BUDGET}::_tokens",
        "int(pool / blocks.most * wanted.context)",
        "int(fit * wanted.context)",
        f"{CACHES} -k on_paper",
    ),
    Fault(
        "windows of a plain cache never free anything",
        f"{PREVIEW}/plain.py::plain_blocks",
        "sum(held) - sum(kept)",
        "0",
        f"{PLAN_COMMAND} -k windows_take_less",
    ),
    Fault(
        "a plain hybrid's blocks are as small as a dense model's",
        f"{PREVIEW}/plain.py::_whole_states",
        "block if served.states is None else",
        "block if served else",
        f"{CACHES} -k 'plain_cache and hybrid'",
    ),
    Fault(
        "vLLM keeps no state more of Mamba-2 while it computes a prompt",
        f"{PREVIEW}/plain.py::_specs",
        "int(HYBRIDS.get(model.hf_text_config.model_type) == MAMBA_2)",
        "0",
        f"{CACHES} -k 'plain_cache and hybrid'",
    ),
    Fault(
        "layers with chunks are windows to plain vLLM",
        f"{PREVIEW}/plain.py::_specs",
        "elif model.attention_chunk_size:",
        "elif not model.attention_chunk_size:",
        f"{CACHES} -k 'plain_cache and chunks'",
    ),
    Fault(
        "layers that share caches are counted in a plain cache",
        f"{PREVIEW}/plain.py::_specs",
        "layers.attention - layers.sharing",
        "layers.attention",
        f"{CACHES} -k 'plain_cache and sharing'",
    ),
    Fault(
        "a draft's plain layers are forgotten",
        f"{PREVIEW}/plain.py::_specs",
        "range(served.draft.layers if served.draft else 0)",
        "range(0)",
        f"{CACHES} -k 'plain_cache and draft'",
    ),
    Fault(
        "a plain cache on a GPU has a CPU's blocks",
        "vllm_kvq/cli/plan.py::_plain_block",
        "USUAL_BLOCK if options.gpu_memory else None",
        "None",
        f"{PLAN_COMMAND} -k blocks_of_a_plain",
    ),
    Fault(
        "a plain cache knows no block size of a file",
        "vllm_kvq/cli/plan.py::_plain_block",
        "values(all_words(more)",
        "values(more",
        f"{PLAN_COMMAND} -k block_size_in_a_file",
    ),
    Fault(
        "ranks of a file are not planned",
        "vllm_kvq/cli/plan.py::ignored",
        "and not values(given, own)",
        "and False",
        f"{PLAN_COMMAND} -k ranks_in_a_file",
    ),
    Fault(
        "a table does not say that vLLM's line will differ",
        "vllm_kvq/cli/plan.py::_vllms_words",
        "[counted] * bool(others)",
        "[]",
        f"{PLAN_COMMAND} -k own_line",
    ),
    Fault(
        "a table does not say that vLLM will not start",
        "vllm_kvq/cli/plan.py::_vllms_words",
        "[refused] * bool(short)",
        "[]",
        f"{PLAN_COMMAND} -k keeps_a_block",
    ),
    Fault(
        "a plan does not say what it refuses",
        "vllm_kvq/cli/plan.py::Outcome.document",
        '"refused": dict(self.refused)',
        '"refused": {}',
        f"{PLAN_COMMAND} -k refused_and_why",
    ),
    Fault(
        "a plan puts all weights on each GPU",
        f"{BUDGET}::cache_of",
        "// ranks -",
        "-",
        PLAN,
    ),
    Fault(
        "a Qwen2 whose weights are not here has no key biases",
        "vllm_kvq/integration/advice/losses.py::nearest",
        "usually_biased(vllm_config)",
        "False",
        PLAN,
    ),
)
