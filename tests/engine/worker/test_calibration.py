"""Constants that a server fits when it starts: they are those of the text's tokens, and all later starts read them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_arguments import kvq
from forked_commands import warm_engines
from models_on_disk import SMALL, Written

from proof.models import named
from proof.models.checkpoints import write_model
from proof.oracle.engines import forked
from proof.oracle.engines.forked import EngineFailed
from proof.oracle.trace import Trace
from vllm_kvq.eval.heads.capture import capture
from vllm_kvq.eval.reading.reader import Reader
from vllm_kvq.formats.constants import Constants, Moments
from vllm_kvq.formats.methods.klt import TransformedKeys
from vllm_kvq.formats.parts.planes import SLAB
from vllm_kvq.formats.parts.rope import Rope
from vllm_kvq.formats.parts.turning import Turning
from vllm_kvq.integration.plan.calibration import Source, read
from vllm_kvq.integration.plan.options import Options
from vllm_kvq.integration.plan.plan import plan

pytestmark = pytest.mark.engine
SINKS, LENGTH = 4, 70
TEXT = torch.randint(8, 250, (3, LENGTH), generator=torch.Generator().manual_seed(0))


def start(model: Path, cache: Path, given: dict[str, Any], tokens: bool = False, traces: Sequence[Trace] = ()) -> Any:
    constants, *others = forked.call(started, str(model), str(cache), given, tokens, traces)
    return {layer: torch.from_numpy(keys) for layer, keys in constants.items()}, *others


def started(model: str, cache: str, given: dict[str, Any], tokens: bool, traces: Sequence[Trace]) -> Any:
    """In a process of its own: what its packed layers have, its fingerprint, and its answers."""
    os.environ["XDG_CACHE_HOME"] = cache
    from proof.oracle.engines.engine import TracedEngine
    from vllm_kvq.integration.worker import report
    from vllm_kvq.integration.worker.calibration import fitting
    from vllm_kvq.integration.worker.calibration.text import Pieces

    runs: list[int] = []
    own_run, own_line, lines = fitting._run, report.start_line, []

    def counted(worker: Any, *arguments: Any) -> Any:
        runs.append(1)
        if worker.vllm_config.lora_config is not None:
            # memory that nobody has written to may hold anything
            (chosen,) = worker.model_runner.lora_manager._adapter_manager.punica_wrapper_mapping.values()
            chosen._token_lora_indices.fill_(10**6)
        return own_run(worker, *arguments)

    def kept(*arguments: Any) -> str:
        lines.append(own_line(*arguments))
        return lines[-1]

    fitting._run, report.start_line = counted, kept
    if tokens:
        fitting._text = lambda config: Pieces(TEXT, torch.zeros(len(TEXT), dtype=torch.long))
    engine = TracedEngine(model, kv_cache_dtype="klt3", **given)
    layers = engine.engine.vllm_config.compilation_config.static_forward_context.values()
    packed = [p for p in (getattr(getattr(layer, "impl", None), "packed", None) for layer in layers) if p is not None]
    constants = {p.fmt.geometry.layer: p.fmt.geometry.constants.keys.numpy() for p in packed}
    return constants, len(runs), lines[0].rpartition("fingerprint=")[2], [engine.run(trace) for trace in traces]


def covariances(keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a layer's constants say of the text: mean and covariance of keys, how both turn, and what queries weigh."""
    d = keys.shape[-1]
    mean, s, theta, pairs, forward, backward = keys.double().split((1, 1, 1, 1, d, d), 1)
    weighed = forward * s.mT
    return mean[:, 0], backward.mT @ backward, weighed.mT @ weighed, torch.cat([theta, pairs], 1)


@pytest.mark.parametrize("name", ["Llama", "Gemma-2", "Gemma-3", "gpt-oss"])
def test_constants_are_those_of_the_tokens(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against the queries and keys that vLLM's own attention layers see, with its own cache. Soft caps, windows and
    learned sinks change what later layers see."""
    write_model(named(name), tmp_path / "model")
    arguments = {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 28, "skip_tokenizer_init": True}
    found, runs, _, _ = start(tmp_path / "model", tmp_path, arguments, True)
    assert runs == 1
    warm_engines(monkeypatch)
    texts = capture(str(tmp_path / "model"), [text.tolist() for text in TEXT], "float32")
    assert {*found} == {layer.index for layer in texts.layers}
    # layers with a window may have another RoPE
    rope = texts.rope or Reader(tmp_path / "model", "float32").before(tuple(TEXT[0].tolist())).captured.rope
    turning = Turning.of(rope, texts.layers[0].head_size)
    phases = turning.phases(torch.arange(SINKS, LENGTH) // SLAB).repeat(len(TEXT), 1)
    assert turning.theta[0] == pytest.approx(1)
    for layer in texts.layers:
        q, k = (x.unflatten(0, (-1, LENGTH))[:, SINKS:].flatten(0, 1).float() for x in (layer.query, layer.key))
        want = TransformedKeys.fit_moments(Moments.of(q, k, phases), turning)
        # random keys may have next to no constant part
        assert want[:, 2].any() or name == "Llama"
        for mine, theirs in zip(covariances(found[layer.index]), covariances(want), strict=True):
            assert ((mine - theirs).norm() / theirs.norm()).item() < 1e-3


@pytest.fixture(scope="module")
def fitted(written: Written, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """A model, a cache in which its first start has left a file, and the results of that start."""
    model, cache = written(**SMALL), tmp_path_factory.mktemp("cache")
    return model, cache, start(model, cache, ARGUMENTS, traces=[prompt()])


ARGUMENTS: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 28}


def prompt() -> Trace:
    import traces

    return traces.all_traces(32)[0]


def kept_in(cache: Path) -> Path:
    (file,) = (cache / "vllm_kvq" / "calibration").iterdir()
    return file


Fitted = tuple[Path, Path, Any]


def test_a_later_start_reads_what_the_first_kept(fitted: Fitted) -> None:
    model, cache, (constants, runs, fingerprint, answers) = fitted
    assert runs == 1
    again, more, same, repeated = start(model, cache, ARGUMENTS, traces=[prompt()])
    assert more == 0
    assert same == fingerprint
    assert all(torch.equal(again[layer], constants[layer]) for layer in constants)
    assert [answer.outputs for answer in repeated] == [answer.outputs for answer in answers]
    of_file, _ = read(kept_in(cache))
    assert all(torch.equal(of_file[layer].keys, constants[layer]) for layer in constants)  # type: ignore[arg-type]


def test_constants_are_the_models_own_where_adapters_are_served(fitted: Fitted, tmp_path: Path) -> None:
    model, _, (constants, _, fingerprint, _) = fitted
    found, runs, of_found, _ = start(model, tmp_path, {**ARGUMENTS, "enable_lora": True})
    assert runs == 1
    assert of_found == fingerprint
    assert all(torch.equal(found[layer], keys) for layer, keys in constants.items())


def test_a_damaged_file_is_refused(fitted: Fitted, tmp_path: Path) -> None:
    model, cache, _ = fitted
    damaged = tmp_path / "vllm_kvq" / "calibration" / kept_in(cache).name
    damaged.parent.mkdir(parents=True)
    content = bytearray(kept_in(cache).read_bytes())
    content[-5] ^= 64
    damaged.write_bytes(content)
    with pytest.raises(EngineFailed, match=r"the calibration \S+ is damaged; delete it, and the server will create"):
        start(model, tmp_path, ARGUMENTS)
    damaged.write_bytes(content[:1000])
    with pytest.raises(
        EngineFailed, match=r"the calibration \S+ can't be read \(.+\); delete it, and the server will create"
    ):
        start(model, tmp_path, ARGUMENTS)


def test_a_named_file_serves_its_own_model_only(fitted: Fitted, written: Written, tmp_path: Path) -> None:
    model, cache, (constants, *_) = fitted
    named_file = {**ARGUMENTS, **kvq(calibration=str(kept_in(cache)))}
    again, runs, _, _ = start(model, tmp_path, named_file)
    assert runs == 0
    assert all(torch.equal(again[layer], constants[layer]) for layer in constants)
    other = written(**SMALL, seed=1)
    with pytest.raises(EngineFailed, match=r"the calibration \S+ is of another model; leave the option out"):
        start(other, tmp_path, named_file)


def test_a_cache_that_cannot_be_written_stops_nobody(fitted: Fitted, tmp_path: Path) -> None:
    model, _, (constants, *_) = fitted
    (tmp_path / "vllm_kvq").write_text("not a folder")
    again, runs, _, _ = start(model, tmp_path, ARGUMENTS)
    assert runs == 1
    assert all(torch.equal(again[layer], constants[layer]) for layer in constants)


def test_a_tokenizer_that_knows_no_text_is_refused(written: Written, tmp_path: Path) -> None:
    """As that of a model of proteins, say. The constants would be those of one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = tmp_path / "model"
    shutil.copytree(written(**SMALL), model)
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(512)}, unk_token="w2"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w2").save_pretrained(model)
    with pytest.raises(EngineFailed, match=r"is one and the same token to this model; fit them to text that it knows"):
        start(model, tmp_path, ARGUMENTS)


# -- what is refused before weights load -----------------------------------------------------------------------------
def test_a_file_has_one_name_before_the_model_is_loaded_and_after(tmp_path: Path) -> None:
    """Llama 4's class writes into the configuration."""
    from vllm.engine.arg_utils import EngineArgs

    write_model(named("Llama 4"), tmp_path)
    config = EngineArgs(str(tmp_path), kv_cache_dtype="klt3", kv_cache_memory_bytes=1 << 28).create_engine_config()
    layers = sorted(plan(config).layers.packed_layers)
    before = Source.of(config, Options.of(config), layers)
    config.model_config.hf_config.attn_temperature_tuning ^= True
    after = Source.of(config, Options.of(config), layers)
    assert before is not None
    assert before == after
    config.model_config.hf_config.intermediate_size += 1
    assert before != Source.of(config, Options.of(config), layers)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"pipeline_parallel_size": 2}, "constants are fitted only by a server of one pipeline stage; start the model"),
        (kvq(calibration="/nowhere"), "there is no calibration /nowhere; leave the option 'calibration' out, and"),
        (kvq(calibration=3), "option 'calibration' is 3; it takes the name of a file"),
        (
            {"kv_cache_dtype": "kitty2", **kvq(calibration="a")},
            "option 'calibration' is not read by kitty2, which has nothing to calibrate",
        ),
    ],
)
def test_refused(configured: Callable[..., Any], arguments: dict[str, Any], sentence: str) -> None:
    from vllm_kvq.problem import Refused

    with pytest.raises(Refused) as caught:
        configured(**{"kv_cache_dtype": "klt3", **arguments})
    assert sentence in str(caught.value)


# -- ranks -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("ranks", "heads"), [(1, 2), (2, 4), (4, 4), (4, 2), (4, 1)])
def test_ranks_have_the_constants_of_one_process(ranks: int, heads: int) -> None:
    from vllm_kvq.integration.worker.calibration.fitting import _Ranks

    query, key = (torch.randn(50, n, 8, generator=torch.Generator().manual_seed(n)) for n in (8, heads))
    whole, copies = Moments.of(query, key), max(1, ranks // heads)
    each = max(1, heads // ranks)
    parts = [
        Moments.of(query.chunk(ranks, 1)[rank], key[:, rank // copies * each : rank // copies * each + each])
        for rank in range(ranks)
    ]
    joined = _Ranks(0, copies).joined(parts)
    assert torch.allclose(joined.covariance, whole.covariance)
    assert torch.allclose(joined.seen, whole.seen)
    constants = Constants(whole.covariance, None)
    own = [_Ranks(rank, copies).own(constants, each).keys for rank in range(ranks)]
    assert torch.equal(torch.cat(own[::copies]), whole.covariance)  # type: ignore[arg-type]
    assert all(torch.equal(own[rank], own[rank // copies * copies]) for rank in range(ranks))  # type: ignore[arg-type]


# -- means that turn -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mrope", [False, True])
def test_means_turn_where_tokens_are_cached_at_their_positions(mrope: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with M-RoPE: an image's tokens share positions, and a mean turned too far would be worse than none."""
    from vllm_kvq.integration.worker.calibration import fitting

    monkeypatch.setattr(fitting, "rope_of_layer", lambda model, name: Rope.plain(64, 1024))
    worker = SimpleNamespace(
        get_model=object,
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(uses_mrope=mrope),
            compilation_config=SimpleNamespace(static_forward_context={"layer": SimpleNamespace(head_size=64)}),
        ),
    )
    assert bool(fitting._turned(worker)("layer").theta.any()) != mrope  # type: ignore[arg-type]
