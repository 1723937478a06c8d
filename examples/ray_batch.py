"""Answers a data set with a low-bit KV cache on every engine of a Ray cluster, and goes on where it was stopped.

    python examples/ray_batch.py questions.jsonl answers --model MODEL --kv-cache-dtype kitty2 --engines 4

    questions   JSON lines or Parquet, a file or a folder of files, with a column of ids, each of which is there once,
                and a column "prompt", or "messages" for the model's chat template. What else it holds is copied.
    answers     a folder of files of the same kind, with "answer" and "tokens" in addition, in no particular order

After the job was killed, start it again with the same arguments. What is answered is noted in answers.done, next to
answers, by Ray Data's checkpoints; both are on a file system that all machines share. To start anew, delete both.

All options of `vllm serve` that describe an engine are understood. Needs `pip install "ray[data]>=2.57"`.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

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
OURS = ("answer", "tokens")


def questions(path: Path, key: str) -> tuple[Dataset, str, list[str]]:
    """The data set, the kind of its files, and its columns."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    kinds = {file.suffix for file in files}
    if len(kinds) != 1 or not kinds <= set(KINDS):
        sys.exit(f"{path}: files must be all {' or all '.join(KINDS)}, and not {', '.join(sorted(kinds)) or 'none'}")
    (kind,) = kinds
    found = KINDS[kind]([str(file.resolve()) for file in files])
    columns = found.columns()
    if key not in columns or ("prompt" in columns) == ("messages" in columns):
        sys.exit(f'{path}: a row needs the column {key!r} (--id), and either "prompt" or "messages"')
    if taken := set(columns) & set(OURS):
        sys.exit(f"{path}: the job writes a column {min(taken)!r}; give yours another name")
    ids = [row[key] for row in found.select_columns(key).take_all()]
    if len(set(ids)) != len(ids):
        sys.exit(f"{path}: {key!r} is not another in every row, so it can't tell which rows are answered; use --id")
    return found, kind, columns


def arguments_of(engine: AsyncEngineArgs) -> Row:
    """What differs from vLLM's defaults, as Ray hands it to the engines."""
    default = AsyncEngineArgs(model=engine.model)
    names = [field.name for field in dataclasses.fields(engine) if field.name != "model"]
    given = {name: getattr(engine, name) for name in names}
    return {name: value for name, value in given.items() if value != getattr(default, name)}


def processor(engine: AsyncEngineArgs, columns: list[str], options: Any) -> Any:
    arguments = arguments_of(engine)
    place = None
    if current_platform.is_cpu():
        if (cores := ray.cluster_resources()["CPU"]) < options.engines * options.cpus + 2:
            sys.exit(f"{cores:g} cores are too few: {options.engines} engines of {options.cpus:g} and two for the rows")
        # otherwise Ray waits for GPUs; and Ray's executor, its default for several ranks, does not run on CPUs
        arguments.setdefault("distributed_executor_backend", "mp")
        place = {"bundles": [{"CPU": options.cpus}]}
    config = vLLMEngineProcessorConfig(
        model_source=engine.model,
        engine_kwargs=arguments,
        concurrency=options.engines,
        batch_size=options.piece,
        placement_group_config=place,
        # vLLM turns texts into tokens and back, so that only chats need actors of their own
        chat_template_stage={"enabled": "messages" in columns, "num_cpus": 0.1},
        tokenize_stage=False,
        detokenize_stage=False,
        log_engine_metrics=False,
    )
    sampling = {"temperature": options.temperature, "max_tokens": options.tokens}

    def ask(row: Row) -> Row:
        return {**row, "sampling_params": sampling}

    def answer(row: Row) -> Row:
        return {name: row[name] for name in columns} | {
            "answer": row["generated_text"],
            "tokens": row["num_generated_tokens"],
        }

    return build_processor(config, preprocess=ask, postprocess=answer)


def main() -> None:
    parser = FlexibleArgumentParser(description=__doc__)
    parser.add_argument("questions", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--id", default="id", help="the column that tells rows apart (default: id)")
    parser.add_argument("--engines", type=int, default=1, help="engines at the same time (default: 1)")
    parser.add_argument(
        "--cpus", type=float, default=1, help="cores of an engine, where there are no GPUs (default: 1)"
    )
    parser.add_argument("--tokens", type=int, default=256, help="maximum tokens per answer (default: 256)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default: 0)")
    parser.add_argument("--piece", type=int, default=256, help="questions that are written together (default: 256)")
    load_general_plugins()  # the values of --kv-cache-dtype
    AsyncEngineArgs.add_cli_args(parser)
    args = parser.parse_args()
    answers = args.answers.resolve()
    done = answers.with_name(answers.name + ".done")
    # read by data sets when they are made
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        args.id, str(done), delete_checkpoint_on_success=False
    )
    asked, kind, columns = questions(args.questions, args.id)
    pieces = asked.repartition(target_num_rows_per_block=args.piece)
    answered = processor(AsyncEngineArgs.from_cli_args(args), columns, args)(pieces)
    (answered.write_json if kind == ".jsonl" else answered.write_parquet)(str(answers))


if __name__ == "__main__":
    main()
