"""Faults in what is kept on disk: compiled libraries, measurements, the answers of a batch job."""

from __future__ import annotations

from proof.mutants.fault import Fault

BUILD = "tests/kernels/compiled/test_cpu_build.py"
FAILURES = "tests/kernels/compiled/test_build_failures.py"
TRUST = "tests/kernels/compiled/test_trust.py"
STORE = "tests/eval/run/test_store.py"
RAY = "tests/processes/test_ray_batch.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "a truncated library counts as whole",
        "vllm_kvq/kernels/compiled.py::why_not",
        "if len(whole) < sections + size * count:",
        "if False:",
        f"{BUILD} -k truncated",
    ),
    Fault(
        "a damaged library is not compiled again",
        "vllm_kvq/kernels/build.py::build",
        "if compiled.is_there(target):\n                return target\n            if target",
        "if target.exists():\n                return target\n            if target",
        f"{BUILD} -k damaged",
    ),
    Fault(
        "the compiler's last line is taken for the cause",
        "vllm_kvq/kernels/build.py::_cause",
        '"error:" in',
        "not",
        f"{BUILD} -k full_disk",
    ),
    Fault(
        "a library with a changed byte is loaded",
        "vllm_kvq/kernels/compiled.py::why_not",
        "not data.endswith(hashlib.sha256(whole).digest())",
        "False",
        f"{FAILURES} -k changed_byte",
    ),
    Fault(
        "a library for another processor is kept",
        "vllm_kvq/kernels/compiled.py::why_not",
        "not in (ANY_MACHINE, _machine())",
        "is None",
        f"{FAILURES} -k processor",
    ),
    Fault(
        "a user without a home gets a traceback",
        "vllm_kvq/kernels/folders.py::user_folder",
        "RuntimeError",
        "KeyError",
        f"{FAILURES} -k home",
    ),
    Fault(
        "a library is loaded that somebody else can write",
        "vllm_kvq/kernels/compiled.py::why_not",
        "not shipped",
        "False",
        f"{TRUST} -k became",
    ),
    Fault(
        "libraries are compiled into a folder that somebody else can write",
        "vllm_kvq/kernels/build.py::_cache_dir",
        "if (who := trust.folder_writers(path)) is not None",
        "if False",
        f"{TRUST} -k user_names",
    ),
    Fault(
        "another user's library is trusted",
        "vllm_kvq/kernels/trust.py::_of",
        "if found.st_uid not in _owners():",
        "if False:",
        f"{TRUST} -k another",
    ),
    Fault(
        "a damaged measurement is kept",
        "vllm_kvq/eval/run/store.py::Store.get",
        "path.unlink(missing_ok=True)",
        "",
        f"{STORE} -k damaged",
    ),
    Fault(
        "a truncated measurement counts as measured",
        "vllm_kvq/eval/run/store.py::Store.has",
        "return zipfile.is_zipfile(self.path(kind, key))",
        "return self.path(kind, key).exists()",
        f"{STORE} -k truncated",
    ),
    Fault(
        "a full disk leaves half a measurement",
        "vllm_kvq/eval/run/store.py::Store.put",
        "os.unlink(made)",
        "",
        f"{STORE} -k full_disk",
    ),
    Fault(
        "a batch job keeps the line at which it was killed",
        "examples/batch.py::answered",
        "os.truncate(path, sum(map(len, whole)))",
        "pass",
        "tests/servers/test_batch.py -k killed",
        slow=True,
    ),
    Fault(
        "a batch job on Ray does not note what is answered",
        "examples/ray_batch.py::main",
        "asked.context.checkpoint_config = CheckpointConfig",
        "CheckpointConfig",
        f"{RAY} -k noted",
        slow=True,
    ),
    Fault(
        "a batch job on Ray takes ids that are there twice",
        "examples/ray_batch.py::questions",
        "or len(ids) != found.count()",
        "",
        f"{RAY} -k refused",
        slow=True,
    ),
    Fault(
        "a chat of a batch job on Ray begins with <bos> twice",
        "examples/ray_batch.py::Ask.prompt",
        '"tokenized_prompt": tokens',
        '"tokenized_prompt": tokens[:1] + tokens',
        f"{RAY} -k template",
    ),
    Fault(
        "a row that vLLM refuses stops a batch job on Ray",
        "examples/ray_batch.py::config",
        "should_continue_on_error=True,",
        "",
        f"{RAY} -k gpu_for_each",
    ),
    Fault(
        "a batch job on Ray does not say why a row has no answer",
        "examples/ray_batch.py::answer",
        '"error": row[ERROR]',
        '"error": ""',
        f"{RAY} -k says_why",
    ),
    Fault(
        "a batch job on Ray writes pieces of other types than the questions'",
        "examples/ray_batch.py::typed",
        ".cast(schema)",
        "",
        f"{RAY} -k keeps_its_type",
    ),
    Fault(
        "a batch job on Ray takes its own columns for those of a row",
        "examples/ray_batch.py::answer",
        'pickle.loads(row["row"])',
        "row",
        f"{RAY} -k noted",
        slow=True,
    ),
)
