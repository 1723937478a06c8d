"""Answers a data set with a low-bit KV cache on every engine of a Ray cluster, and resumes where it stopped.

    python examples/ray_batch.py questions.jsonl answers --model MODEL --kv-cache-dtype kvq3 --engines 4
    python examples/ray_batch.py questions.jsonl answers --model MODEL --kv-cache-dtype kvq3 --engines 2 --cpus 8

The first has a GPU for each engine (with `--tensor-parallel-size N`, N of them), the second has 8 cores.

    questions   JSON lines (*.jsonl) or Parquet (*.parquet), a file or a folder of files, with a column of ids, each of
                which is there only once, and a column "prompt", or "messages" for the model's chat template. What else
                it holds is copied.
    answers     a folder of JSON lines (*.json) or Parquet, with "answer", "tokens" and "error" in addition, unordered.
                "error" is empty where there is an answer. Otherwise it says why not: the prompt was too long, say.

If the job is killed, start it again with the same arguments. Ray Data notes in answers.done, next to answers, which
ids are answered. Both are on a file system that all machines share. To start over, delete both.

All options of `vllm serve` that describe an engine are understood. Needs: pip install "ray[data]==2.60.0" jsonref
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pickle
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.types
import ray
from ray.data import Dataset
from ray.data.checkpoint import CheckpointConfig
from ray.data.llm import build_processor, vLLMEngineProcessorConfig
from vllm import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

Row = dict[str, Any]
KINDS = {".jsonl": ray.data.read_json, ".parquet": ray.data.read_parquet}
OURS = ("answer", "tokens", "error")
ERROR = "__inference_error__"
"""Ray's column. A row that has something there is not asked."""
FOR_ROWS = 2
"""Cores that read, filter and write."""


def arguments() -> tuple[argparse.Namespace, AsyncEngineArgs, Row]:
    """The command line, as vLLM takes it, and what of it differs from vLLM's defaults."""
    parser = FlexibleArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--id", default="id", help="the column that tells rows apart (default: id)")
    parser.add_argument("--engines", type=int, default=1, help="engines at the same time (default: 1)")
    parser.add_argument("--cpus", type=float, default=1, help="without GPUs: cores for each rank (default: 1)")
    parser.add_argument("--tokens", type=int, default=256, help="maximum tokens per answer (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default: 0)")
    parser.add_argument("--piece", type=int, default=256, help="rows that are written together (default: 256)")
    load_general_plugins()  # the values of --kv-cache-dtype
    AsyncEngineArgs.add_cli_args(parser)
    args = parser.parse_args()
    if Path(args.model).exists():
        args.model = str(Path(args.model).resolve())  # the engines have other working folders
    engine = AsyncEngineArgs.from_cli_args(args)
    names = [field.name for field in dataclasses.fields(engine) if hasattr(args, field.name)]
    given = {name: getattr(engine, name) for name in names if getattr(args, name) != parser.get_default(name)}
    given.pop("model", None)
    return args, engine, given


def questions(path: Path, key: str) -> tuple[Dataset, str]:
    """The data set and the kind of its files."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    kinds = {file.suffix for file in files}
    if len(kinds) != 1 or not kinds <= set(KINDS):
        sys.exit(f"{path}: files must be all {' or all '.join(KINDS)}, and not {', '.join(sorted(kinds)) or 'none'}")
    (kind,) = kinds
    found = KINDS[kind]([str(file.resolve()) for file in files])
    columns = found.columns() or []
    if key not in columns or ("prompt" in columns) == ("messages" in columns):
        sys.exit(f'{path}: rows need the column {key!r} (--id), and either "prompt" or "messages"')
    if taken := set(columns) & {*OURS}:
        sys.exit(f"{path}: the job writes a column {min(taken)!r}; give yours another name")
    kind_of_id = dict(zip(columns, found.schema().types, strict=True))[key]
    known = (pyarrow.types.is_integer, pyarrow.types.is_string, pyarrow.types.is_large_string)
    if not any(is_one(kind_of_id) for is_one in known):
        sys.exit(f"{path}: {key!r} must hold whole numbers or texts, and not {kind_of_id}; use --id for another column")
    ids = found.unique(key)
    if None in ids or len(ids) != found.count():
        sys.exit(f"{path}: {key!r} is missing or the same in some rows, so it can't tell which are answered; use --id")
    return found, kind


def noted(answers: Path) -> Path:
    """Where Ray notes what is answered. Without it answers would come twice, and without the answers not at all."""
    done = answers.with_name(answers.name + ".done")
    for left, gone in ((answers, done), (done, answers)):
        if left.is_dir() and any(left.iterdir()) and not gone.exists():
            sys.exit(f"{left} is there without {gone.name}; bring that back, or delete both to start over")
    return done


def config(engine: AsyncEngineArgs, given: Row, options: argparse.Namespace) -> vLLMEngineProcessorConfig:
    cpu = current_platform.is_cpu()
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
    have, each, rows = ("CPU", options.cpus, FOR_ROWS) if cpu else ("GPU", 1, 0)
    there, needed = ray.cluster_resources().get(have, 0), options.engines * ranks * each + rows
    if there < needed:
        more = f", {rows} of them for the rows" if rows else ""
        sys.exit(f"the cluster has {there:g} {have}s and the job needs {needed:g}{more}; ask for fewer --engines")
    place: Row = {}
    if cpu:  # otherwise Ray waits for GPUs; and its own executor, its default for several ranks, does not run on CPUs
        given = {"distributed_executor_backend": "mp"} | given
        threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, int(options.cpus)))}
        place = {
            "placement_group_config": {"bundle_per_worker": {"CPU": options.cpus}},
            "runtime_env": {"env_vars": threads},  # engines of one machine would bind their threads to the same cores
        }
    return vLLMEngineProcessorConfig(
        model_source=engine.model,
        engine_kwargs=given,
        concurrency=(options.engines, options.engines),
        batch_size=options.piece,
        should_continue_on_error=True,
        # `ask` applies the chat template, and vLLM turns texts into tokens and back: no stage needs actors of its own
        chat_template_stage=False,
        tokenize_stage=False,
        detokenize_stage=False,
        **place,
    )


def chat_tokenizer(engine: AsyncEngineArgs) -> Any:
    from transformers import AutoTokenizer

    revision = engine.tokenizer_revision if engine.tokenizer else engine.tokenizer_revision or engine.revision
    name = engine.tokenizer or engine.model
    return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=engine.trust_remote_code)


class Ask:
    """A row of questions -> what Ray asks the engine, with the row as one column: Ray would take a column "model" for
    an adapter, and a column that is empty in a whole piece has no type."""

    def __init__(self, sampling: Row, tokenizer: Any = None) -> None:
        self.sampling, self.tokenizer = sampling, tokenizer

    def __call__(self, row: Row) -> Row:
        asked = {"row": pickle.dumps(row), "sampling_params": self.sampling, "prompt": "", ERROR: ""}
        try:
            return asked | self.prompt(row)
        except Exception as problem:  # whatever a template doesn't like
            return asked | {ERROR: f"{type(problem).__name__}: {problem}"}

    def prompt(self, row: Row) -> Row:
        if self.tokenizer is None:
            if not isinstance(row["prompt"], str) or not row["prompt"]:
                raise ValueError('"prompt" is not a text, or is empty')
            return {"prompt": row["prompt"]}
        # as tokens: vLLM would put a second <bos> before a template's text
        messages = [dict(message) for message in row["messages"]]
        tokens = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return {"tokenized_prompt": tokens}


def answer(row: Row) -> Row:
    """What Ray returns for a row that was asked -> the row, with the answer, or why there is none."""
    kept: Row = pickle.loads(row["row"])
    if row[ERROR]:
        return kept | {"answer": "", "tokens": 0, "error": row[ERROR]}
    return kept | {"answer": row["generated_text"], "tokens": row["num_generated_tokens"], "error": ""}


def typed(schema: pyarrow.Schema, rows: pyarrow.Table) -> pyarrow.Table:
    """Types as in the questions, even where a whole piece has nothing in a column: else nobody can read the folder."""
    return rows.select(schema.names).cast(schema)


def answered(asked: Dataset, engine: AsyncEngineArgs, given: Row, options: argparse.Namespace) -> Dataset:
    sampling = {"temperature": options.temperature, "max_tokens": options.tokens}
    ask = Ask(sampling, chat_tokenizer(engine) if "messages" in asked.columns() else None)
    pieces = asked.repartition(target_num_rows_per_block=options.piece)
    return build_processor(config(engine, given, options))(pieces.map(ask)).map(answer)


def main() -> None:
    options, engine, given = arguments()
    answers = options.answers.resolve()
    done = noted(answers)
    ray.init(ignore_reinit_error=True)
    asked, kind = questions(options.questions, options.id)
    asked.context.checkpoint_config = CheckpointConfig(options.id, str(done), delete_checkpoint_on_success=False)
    found = answered(asked, engine, given, options)
    if kind == ".jsonl":
        found.write_json(str(answers))
        return
    ours = zip(OURS, (pyarrow.string(), pyarrow.int64(), pyarrow.string()), strict=True)
    schema = pyarrow.schema([*asked.schema().base_schema, *(pyarrow.field(*column) for column in ours)])
    found.map_batches(functools.partial(typed, schema), batch_format="pyarrow").write_parquet(str(answers))


if __name__ == "__main__":
    main()
