"""Faults in vllm_kvq/integration: refusals, patches of vLLM, prompts, processes and the start."""

from __future__ import annotations

from proof.mutants.fault import Fault

ROOM = "vllm_kvq/integration"
PATCHES = f"{ROOM}/patches"
REFUSALS = "tests/planning/plan/test_refusals.py"
IMAGES = "tests/models/test_refused.py -k text_alone"
COMPAT = "tests/planning/test_compat.py -k 'not vllm_starts'"
PATCHED = "tests/planning/test_compat.py"
IN_EFFECT = "tests/engine/test_patches_in_effect.py"
REPLICAS = "tests/engine/worker/test_replicas.py"
ORPHANS = "tests/servers/test_orphans.py -k 'not spawned'"
SETUP = "tests/planning/plan/test_setup.py"
ROPE = "tests/planning/plan/test_rope_tables.py"
WARM = "tests/engine/test_v2.py -k warm_up"

FAULTS: tuple[Fault, ...] = (
    # -- refusals
    Fault(
        "another backend's offloading is taken for vLLM's own",
        f"{ROOM}/plan/connectors.py::connector_problem",
        'cache.kv_offloading_backend != "native"',
        "False",
        REFUSALS,
    ),
    Fault(
        "N and --block-size may disagree",
        f"{ROOM}/plan/refusals.py::check",
        "None and",
        "None and not",
        REFUSALS,
    ),
    Fault(
        "using only text is no way out of attention among image tokens",
        f"{ROOM}/plan/refusals.py::_problems",
        "_only_text(model)",
        "plain",
        IMAGES,
    ),
    Fault(
        "the way out is using only text although embeddings of images are accepted",
        f"{ROOM}/plan/refusals.py::_only_text",
        "not None and config.enable_mm_embeds",
        "None",
        IMAGES,
    ),
    Fault(
        "the kinds of layers are asked of the whole checkpoint, not of its text part",
        f"{ROOM}/plan/model/layers.py::layer_types",
        "hf_text_config",
        "hf_config",
        "tests/models/test_works.py -k 'Gemma-3 and vision'",
    ),
    Fault(
        "a layer beyond the model's last may be skipped",
        f"{ROOM}/plan/model/layers.py::Layers.check",
        ">=",
        ">",
        REFUSALS,
    ),
    Fault(
        "a layer without its companion runs without it",
        f"{ROOM}/worker/backend.py::KVQImpl.forward",
        "if packed is None:\n            raise RuntimeError(",
        "if packed is None:\n            return output.fill_(0)\n            raise RuntimeError(",
        REFUSALS,
    ),
    # -- patches and private names
    Fault(
        "a missing name of a patch is not noticed",
        f"{PATCHES}/patch.py::Patch.problem",
        "(*self.needs, *filter(is_loaded, self.replaces))",
        "filter(is_loaded, self.replaces)",
        f"{PATCHED} -k name_of_a_patch",
    ),
    Fault(
        "a missing name that only some servers need stops every server",
        f"{PATCHES}/registry.py::registration_problem",
        "(patch for patch in at(Moment.REGISTERED) if patch.only is None)",
        "at(Moment.REGISTERED)",
        f"{PATCHED} -k only_some",
    ),
    Fault(
        "a patch is installed although only some servers need it and its names are missing",
        f"{PATCHES}/registry.py::register",
        "(patch.only is None or patch.problem() is None)",
        "patch.only is not patch",
        f"{PATCHED} -k only_some",
    ),
    Fault(
        "a worker does not look for names",
        f"{ROOM}/worker/backend.py::KVQImpl.__init__",
        "if problem := compat.worker_problem(self.vllm_config):\n            raise Refused(str(problem))",
        "",
        f"{PATCHED} -k worker_is",
    ),
    Fault(
        "a server does not look for names",
        f"{ROOM}/platform.py::configure",
        "check_patches(vllm_config)",
        "",
        f"{PATCHED} -k server_is",
    ),
    Fault(
        "vLLM's compile cache depends on variables that are not set",
        f"{PATCHES}/registered/variables.py::make_known",
        ".keys() & os.environ.keys()",
        "",
        f"{IN_EFFECT} -k known_to_vllm",
    ),
    Fault(
        "a function is wrapped again each time",
        f"{PATCHES}/once.py::once",
        "if hasattr(found, MARK):\n        return",
        "",
        f"{IN_EFFECT} -k wraps_once",
    ),
    Fault(
        "one wrapper of several is enough to be in effect",
        f"{PATCHES}/patch.py::Patch.in_effect",
        "all",
        "any",
        f"{IN_EFFECT} -k undoes",
    ),
    Fault(
        "a patch is listed and not installed",
        f"{PATCHES}/registry.py::install",
        "not",
        "",
        f"{IN_EFFECT} -k in_an_engine",
        slow=True,
    ),
    Fault(
        "doctor does not see that a patch is undone",
        f"{ROOM}/preview/environment.py::_of_patch",
        ".in_effect()",
        "",
        "tests/planning/preview/test_doctor.py -k not_installed",
    ),
    Fault(
        "a release that is only tried is served in silence",
        f"{ROOM}/plugin.py::register",
        'init_logger("vllm.kvq").error("%s", trial)',
        "pass",
        f"{PATCHED} -k only_tried",
    ),
    Fault(
        "any release may be tried",
        f"{PATCHES}/names.py::version_problem",
        "(named != installed() or named in SUPPORTED)",
        "named in SUPPORTED",
        f"{PATCHED} -k only_tried",
    ),
    Fault(
        "a missing member is not noticed",
        f"{PATCHES}/names.py::_has",
        "or not",
        "or",
        COMPAT,
    ),
    Fault(
        "a private name is used and not listed",
        f"{ROOM}/compat.py",
        '"vllm.v1.core.kv_cache_utils": ("KVCacheBlock.block_id"',
        '"vllm.v1.core.kv_cache_util": ("KVCacheBlock.block_id"',
        COMPAT,
    ),
    Fault(
        "the plugin registers although vLLM lacks a name",
        f"{ROOM}/plugin.py::register",
        "return",
        "",
        COMPAT,
    ),
    # -- copies of KV heads
    Fault(
        "every rank takes the queries of the first ones",
        f"{ROOM}/worker/replicas.py::queries_of_all_copies",
        "first = group.rank_in_group // copies * copies",
        "first = 0",
        REPLICAS,
    ),
    Fault(
        "the ranks that share a head are taken for every n-th",
        f"{ROOM}/worker/replicas.py::queries_of_all_copies",
        "first : first +",
        "group.rank_in_group % copies ::",
        REPLICAS,
    ),
    Fault(
        "copies are counted as if each rank had a head of its own",
        f"{ROOM}/worker/replicas.py::all_queries_of",
        "== 1",
        "<= 2",
        REPLICAS,
    ),
    # -- prompts and setup
    Fault(
        "vLLM's CPU attention serves where its log-sum-exp is needed",
        f"{ROOM}/worker/prompts.py::_cpu_why_not",
        '"it returns no log-sum-exp" if asked.merged else',
        "",
        "tests/engine/test_gpu_path.py -k by_sdpa",
    ),
    Fault(
        "a longer prompt's blocks are taken for the next request's",
        f"{ROOM}/worker/prompts.py::_cpu",
        "BLOCK * blocks",
        "q",
        "tests/planning/test_prompt.py",
    ),
    Fault(
        "a layer's options are the first one's for all",
        f"{ROOM}/plan/options.py::Options.bind",
        "geometry.layer",
        "0",
        "tests/engine/oracle/test_by_layer.py",
    ),
    Fault(
        "a plan is remembered whatever the environment says",
        f"{ROOM}/plan/plan.py::plan",
        "and known[0] == basis",
        "",
        "tests/planning/plan/test_served.py -k once",
    ),
    Fault(
        "a shorter window of keys is ignored",
        "vllm_kvq/formats/page.py::PageFormat.reference_only",
        "self.W_keys < self.W",
        "False",
        REFUSALS,
    ),
    Fault(
        "a scale per token is served, by PyTorch",
        "vllm_kvq/formats/methods/kivi.py::TokenScaled",
        "reference_only = (",
        "refused = (",
        "tests/kernels/test_slow.py -k every_one",
    ),
    Fault(
        "another table than the one by which the model turns keys",
        f"{ROOM}/worker/binding.py::table_of",
        "if (rope.apply(key, position) - turned).abs().max() <= near else None",
        "if turned is not None else None",
        ROPE,
    ),
    Fault(
        "the user's pairing is overruled by the model's",
        f"{ROOM}/worker/binding.py::_pairing",
        "wanted is not None",
        "wanted is not None and not styles",
        SETUP,
    ),
    # -- engines without a server
    Fault(
        "an engine stays when its server is gone",
        f"{PATCHES}/served/orphans.py::end_after",
        "os.getppid() ==",
        "",
        ORPHANS,
    ),
    Fault(
        "an engine exits although its server is running",
        f"{PATCHES}/served/orphans.py::end_after",
        "==",
        "!=",
        ORPHANS,
    ),
    Fault(
        "an engine that warms up stays when its server is gone",
        f"{PATCHES}/served/orphans.py::end_after",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "",
        ORPHANS,
    ),
    Fault(
        "engines of vLLM's own cache are watched, too",
        f"{ROOM}/platform.py::configure",
        "cache = vllm_config.cache_config",
        "cache = vllm_config.cache_config\n    registry.install(Moment.CONFIGURED, vllm_config)",
        ORPHANS,
    ),
    Fault(
        "one of several API servers stays when its server is gone",
        f"{PATCHES}/served/orphans.py::guard",
        "if current_process().name.startswith(API_SERVER):",
        "if not API_SERVER:",
        ORPHANS,
    ),
    Fault(
        "no engine is watched",
        f"{ROOM}/platform.py::configure",
        "registry.install(Moment.CONFIGURED, vllm_config)",
        "",
        ORPHANS,
    ),
    # -- the start
    Fault(
        "a refusal inside LLM() is wrapped by pydantic",
        "vllm_kvq/problem.py::Refused",
        "Exception",
        "ValueError",
        REFUSALS,
    ),
    Fault(
        "options outside of 'kvq' are ignored",
        f"{ROOM}/plan/options.py::unread_options",
        "in readers()",
        "not in extra",
        REFUSALS,
    ),
    Fault(
        "options under another dtype are ignored",
        f"{ROOM}/plan/options.py::unread_options",
        '_without_format(dtype) if "kvq" in extra else',
        "",
        REFUSALS,
    ),
    Fault(
        "memory that is not free is vLLM's problem",
        f"{ROOM}/plan/memory.py::Machine.problem",
        "available:",
        "total:",
        REFUSALS,
    ),
    Fault(
        "blocks may be larger than the documents say",
        "vllm_kvq/formats/codec.py",
        "1024",
        "1536",
        "tests/formats/test_page.py -k too_large",
    ),
    Fault(
        "a chunk of a seeded prompt crashes the engine",
        f"{PATCHES}/served/seeds.py::keep_seeds.make_bookkeeping._bookkeeping_sync",
        "del self.input_batch.generators[i]",
        "pass",
        "tests/engine/oracle/test_seeds.py",
        slow=True,
    ),
    Fault(
        "a chunk of a seeded prompt draws a number",
        f"{PATCHES}/served/seeds.py::keep_seeds.make_sample._sample",
        "self.input_batch.generators[i].set_state(state)",
        "pass",
        "tests/engine/oracle/test_seeds.py",
        slow=True,
    ),
    # -- vLLM's V2 model runner
    Fault(
        "a GPU's warm-up gives companions one block",
        f"{PATCHES}/served/warmup.py::serve_warmup.make._warmup_block_counter.blocks",
        "spec.blocks_per_request",
        "1",
        WARM,
        slow=True,
    ),
    Fault(
        "a GPU's warm-up takes companions as the last one left them",
        f"{PATCHES}/served/warmup.py::serve_warmup.make._warmup_block_counter",
        "zero_",
        "mean",
        WARM,
        slow=True,
    ),
)
