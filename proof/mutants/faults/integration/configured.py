"""Faults in what a server is configured to be: the plan, pages' meaning, budgets, calibrated formats and constants."""

from __future__ import annotations

from proof.mutants.fault import Fault

PLAN = "vllm_kvq/integration/plan"
FITTED = "vllm_kvq/integration/worker/calibration"
FORMATS = "vllm_kvq/formats"
FINGERPRINT = "tests/planning/plan/test_fingerprint.py -k"
CONSTANTS = "tests/planning/plan/test_constants_files.py -k"
BUDGETS = "tests/planning/plan/test_budgets.py -k"
REFUSALS = "tests/planning/plan/test_refusals.py -k"
OWN_TEXT = "tests/commands/test_own_text.py -k"
KLT = "tests/formats/methods/test_klt.py -k"
KITTY = "tests/formats/methods/test_kitty.py -k"

MEANING = (
    Fault(
        "pages that a draft was served with mean what they mean without it",
        f"{PLAN}/fingerprint.py::fingerprint",
        "model_meaning(spec.draft_model_config) if cached_draft else None",
        "None",
        f"{FINGERPRINT} other_pages",
    ),
    Fault(
        "the fingerprint forgets how many tokens are sinks",
        f"{PLAN}/fingerprint.py::format_meaning",
        ", fmt.S",
        "",
        f"{FINGERPRINT} other_pages",
    ),
    Fault(
        "weights that vLLM quantizes give the pages of those that it does not",
        f"{PLAN}/fingerprint.py::model_meaning",
        "model.quantization,",
        "",
        f"{FINGERPRINT} other_pages",
    ),
    Fault(
        "only the first of several connectors is looked at",
        f"{PLAN}/connectors.py::_refused",
        "filter(None, found)",
        "found",
        "tests/models/pool/test_offload.py -k hides",
    ),
    Fault(
        "a store of other pages is as good as one's own",
        f"{PLAN}/refusals.py::check",
        "store_problem(vllm_config, plan(vllm_config, options, layers).fingerprint)",
        "None",
        f"{FINGERPRINT} of_others",
    ),
    Fault(
        "pages of one's own are refused as others'",
        f"{PLAN}/connectors.py::store_problem",
        "if named != fingerprint",
        "",
        f"{FINGERPRINT} of_others",
    ),
    Fault(
        "fingerprints in the connectors that another one lists are overlooked",
        f"{PLAN}/connectors.py::_named",
        'extra.get("connectors")',
        "None",
        f"{FINGERPRINT} of_others",
    ),
    Fault(
        "a server refuses what it has written into its own configuration",
        f"{PLAN}/connectors.py::store_problem",
        "or fingerprints.MARKED in transfer.kv_connector_extra_config",
        "",
        f"{FINGERPRINT} marked_itself",
    ),
    Fault(
        "the log does not say under which fingerprint pages are kept",
        f"{PLAN}/connectors.py::mark_connector",
        "logger.info_once(",
        "str.format(",
        f"{FINGERPRINT} whose_pages",
    ),
    Fault(
        "a connector is given gigabytes of a thousand megabytes",
        f"{PLAN}/connectors.py::choose_connector",
        "(1 << 30)",
        "10**9",
        f"{FINGERPRINT} connector",
    ),
    Fault(
        "a draft may have layers with a window if it does not say how long",
        f"{PLAN}/drafts.py::draft_problem",
        'or "sliding_attention" in layer_types(model)',
        "",
        f"{REFUSALS} cache_is_another",
    ),
    Fault(
        "a draft's cache holds keys only",
        f"{PLAN}/drafts.py::Draft.token_bytes",
        "2 *",
        "",
        "tests/planning/plan/test_served.py -k 'written and draft'",
    ),
    Fault(
        "a checkpoint weighs what its largest file weighs",
        f"{PLAN}/model/weights.py::weight_bytes",
        "sum",
        "max",
        f"{REFUSALS} shards",
    ),
)
FILES = (
    Fault(
        "constants of other layers are read",
        f"{PLAN}/calibration.py::_checked",
        '"layers": "other layers",',
        "",
        f"{CONSTANTS} of_others",
    ),
    Fault(
        "constants of random weights are kept for the model's own",
        f"{PLAN}/calibration.py::_identity",
        'or vllm_config.load_config.load_format == "dummy"',
        "",
        f"{CONSTANTS} random_weights",
    ),
    Fault(
        "weights that only end otherwise are the same",
        f"{PLAN}/calibration.py::_sample",
        "+ opened.read(SAMPLE)",
        "",
        f"{CONSTANTS} both_ends",
    ),
    Fault(
        "constants are fitted to keys that are not finite",
        f"{FITTED}/fitting.py::_on_host",
        "if not (moments.keys.isfinite().all() and moments.queries.isfinite().all()):",
        "if not moments.keys.isfinite().any():",
        f"{CONSTANTS} not_finite",
    ),
    Fault(
        "bundled texts stand behind the model's last position",
        f"{FITTED}/text.py::bundled",
        "room = max(0, min(longest, FARTHEST) - length)",
        "room = min(longest, FARTHEST)",
        f"{OWN_TEXT} bundled",
    ),
    Fault(
        "bundled texts begin without what a tokenizer begins with",
        f"{FITTED}/text.py::bundled",
        "first +",
        "",
        f"{OWN_TEXT} bundled",
    ),
    Fault(
        "constants of one server's layers are another's",
        "vllm_kvq/integration/preview/constants.py::Known._of",
        "[name, dict(options)], sort_keys=True",
        "[name]",
        "tests/eval/test_served_constants.py -k its_own",
    ),
    Fault(
        "formats that skip other layers have one file",
        "vllm_kvq/cli/constants.py::_by_file",
        ', choice.options.get("skip_layers")',
        "",
        f"{OWN_TEXT} share_constants",
    ),
)
NAMES = (
    Fault(
        "a budget begins with its second format",
        f"{FORMATS}/budgets.py",
        '("klt3", "kitty2")',
        '("kitty2", "klt3")',
        f"{BUDGETS} most_precise",
    ),
    Fault(
        "a budget is refused for its first format's reason",
        f"{PLAN}/budgets.py::choose",
        "refused.popitem()",
        "next(iter(refused.items()))",
        f"{BUDGETS} refusals",
    ),
    Fault(
        "where nothing is fast, nobody says what was passed over",
        f"{PLAN}/budgets.py::choose",
        "{name: refused[name] for name in before if name in refused}",
        "{name: slow[name] for name in before if name in slow}",
        f"{BUDGETS} nothing_is_fast",
    ),
    Fault(
        "a third party's format may be called what a budget is",
        f"{FORMATS}/table.py::_taken",
        "fmt.name in BUDGETS",
        "fmt is BUDGETS",
        "tests/formats/test_third_party.py -k taken",
    ),
)
CODECS = (
    Fault(
        "klt: what keys have in common counts as variance",
        f"{FORMATS}/constants.py::Moments.covariance",
        "- self.mean[:, :, None] * self.mean[:, None]",
        "",
        f"{KLT} sums_of_pieces",
    ),
    Fault(
        "klt: directions that keys do not have are stretched without end",
        f"{FORMATS}/methods/klt.py::constants_of",
        "SHORTEST * s.amax(-1, keepdim=True).clamp_min(1e-6)",
        "1e-9",
        f"{KLT} stretched_without_end",
    ),
    Fault(
        "klt: a key that is read may be larger than any that is stored",
        f"{FORMATS}/methods/klt.py::TransformedKeys.unpack",
        ".clamp(-LIMIT, LIMIT)",
        "",
        f"{KLT} larger_than_all",
    ),
    Fault(
        "kitty: channels are boosted by their magnitude",
        f"{FORMATS}/methods/kitty.py::BoostedKeys.pack",
        "amax(-2, keepdim=True) - x.amin",
        "abs().amax",
        f"{KITTY} widest",
    ),
    Fault(
        "kitty: codes of plain channels run over",
        f"{FORMATS}/methods/kitty.py::BoostedKeys._quantize",
        ".minimum(top)",
        "",
        f"{KITTY} each_channel",
    ),
    Fault(
        "a process without AMX asks Linux for it",
        "vllm_kvq/integration/cpu_attention.py::prepare",
        "if torch.cpu._is_amx_tile_supported() and not",
        "if not",
        "tests/kernels/cpu/test_amx.py -k without_amx",
    ),
)

FAULTS: tuple[Fault, ...] = (*MEANING, *FILES, *NAMES, *CODECS)
