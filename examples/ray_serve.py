"""An OpenAI-compatible server with a low-bit KV cache on a Ray cluster: Ray Serve's replicas behind one address.

    python examples/ray_serve.py --model MODEL --kv-cache-dtype kvq3 --replicas 4
    python examples/ray_serve.py --model MODEL --kv-cache-dtype kvq3 --replicas 2 --cpus 8

The first has a GPU for each replica (with `--tensor-parallel-size N`, N of them), the second has 8 cores.
Ctrl-C and SIGTERM end the server and its replicas.

All options of `vllm serve` that describe an engine are understood, and --host, --port and --served-model-name. For a
server that outlives this process, see examples/kubernetes/rayservice.yaml, or `serve deploy` with what it holds.
Needs: pip install "ray[data,serve]==2.60.0" jsonref
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app
from vllm import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

FOR_REQUESTS = 1
"""Cores of Ray Serve's ingress."""


def arguments() -> tuple[argparse.Namespace, AsyncEngineArgs, dict[str, Any]]:
    """The command line, as vLLM takes it, and what of it differs from vLLM's defaults."""
    parser = FlexibleArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1, help="engines behind the address (default: 1)")
    parser.add_argument("--cpus", type=float, default=1, help="without GPUs: cores for each rank (default: 1)")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: other machines, too (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000)
    load_general_plugins()  # the values of --kv-cache-dtype
    AsyncEngineArgs.add_cli_args(parser)
    args = parser.parse_args()
    if Path(args.model).exists():
        args.model = str(Path(args.model).resolve())  # the replicas have other working folders
    engine = AsyncEngineArgs.from_cli_args(args)
    names = [field.name for field in dataclasses.fields(engine) if hasattr(args, field.name)]
    given = {name: plain(getattr(engine, name)) for name in names if getattr(args, name) != parser.get_default(name)}
    for name in ("model", "served_model_name"):  # Ray has its own settings for these
        given.pop(name, None)
    return args, engine, given


def plain(value: Any) -> Any:
    """What was set in a configuration, as a dictionary: Ray looks into some of them, and makes the rest again."""
    if not dataclasses.is_dataclass(value):
        return value
    fresh = type(value)()
    names = [field.name for field in dataclasses.fields(value) if field.init and field.name != "engine_id"]
    return {name: plain(getattr(value, name)) for name in names if getattr(value, name) != getattr(fresh, name)}


def config(engine: AsyncEngineArgs, given: dict[str, Any], options: argparse.Namespace) -> LLMConfig:
    cpu = current_platform.is_cpu()
    ranks = engine.tensor_parallel_size * engine.pipeline_parallel_size
    have, each, more = ("CPU", options.cpus, FOR_REQUESTS) if cpu else ("GPU", 1, 0)
    there, needed = ray.cluster_resources().get(have, 0), options.replicas * ranks * each + more
    if there < needed:
        ours = f", {more} of them for requests" if more else ""
        sys.exit(f"the cluster has {there:g} {have}s and needs {needed:g}{ours}; ask for fewer --replicas")
    deployment: dict[str, Any] = {"num_replicas": options.replicas}
    place: dict[str, Any] = {}
    if cpu:
        deployment["ray_actor_options"] = {"num_cpus": 0}  # the front end needs none besides --cpus
        threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(max(1, int(options.cpus)))}
        place = {
            "placement_group_config": {"bundle_per_worker": {"CPU": options.cpus}},
            "runtime_env": {"env_vars": threads},  # engines of one machine would bind their threads to the same cores
        }
    name = (engine.served_model_name or [engine.model])[0]
    return LLMConfig(
        model_loading_config={"model_id": name, "model_source": engine.model},
        engine_kwargs=given,
        deployment_config=deployment,
        **place,
    )


def main() -> None:
    options, engine, given = arguments()
    ray.init(ignore_reinit_error=True)
    app = build_openai_app({"llm_configs": [config(engine, given, options)]})
    serve.start(http_options={"host": options.host, "port": options.port})
    try:
        serve.run(app, blocking=True)
    except RuntimeError as e:  # a replica can't start, and only the status says why
        found = serve.status().applications.values()
        why = [deployment.message for application in found for deployment in application.deployments.values()]
        sys.exit("\n".join([str(e), *filter(None, why)]))
    finally:
        serve.shutdown()


if __name__ == "__main__":
    main()
