"""The command `python -m proof clients`: real clients and a real pretrained model, with a low-bit cache.

    python -m proof weights .weights qwen2.5-0.5b
    python -m proof clients .weights/qwen2.5-0.5b [--kv-cache-dtype kvq3] [--only SERVER] [--report FILE]

Servers are started one after the other; each has to pass its cases. The model must know a chat template, tools in
Qwen2.5's form, and the capital of France. Takes half an hour or more.

Exits with 1 if a case fails.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from unittest.mock import patch

from proof.clients.adapters import trained
from proof.clients.case import Endpoint, Row, Wrong, failed, run_case
from proof.clients.servers import MODEL, SETUPS, Setup
from proof.demo.capacity import parse_capacity
from vllm_kvq.bench.servers.server import ServerError
from vllm_kvq.cli.arguments import words
from vllm_kvq.kernels.cpu.processor import processor_name

START_SECONDS = 600
SHOWN = 90
"""Characters of what was found, in the page."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="python -m proof clients",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="checkpoint folder")
    parser.add_argument(
        "--kv-cache-dtype", default="kvq3", metavar="FORMAT", help="format or budget (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="auto", help="of the model (default: the checkpoint's)")
    names = [setup.name for setup in SETUPS]
    parser.add_argument("--only", type=words(names), default=names, metavar="SERVER,...", help=", ".join(names))
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the table into a page")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="keep adapter, logs and findings there, and go on from them"
    )
    options = parser.parse_args(argv)
    if not (options.model / "config.json").exists():
        parser.error(f"{options.model} has no config.json; python -m proof weights OUT brings models")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="kvq-clients-") as folder:
        for setup in SETUPS:
            if setup.name in options.only:
                rows += found(setup, options, options.folder or Path(folder))
    if options.report:
        options.report.write_text(page(rows, options), encoding="utf-8")
    print(f"{len(rows) - failed(rows)} of {len(rows)} cases passed")
    return int(bool(failed(rows)))


def found(setup: Setup, options: argparse.Namespace, folder: Path) -> list[Row]:
    """What was found before, if all of that passed; otherwise what is found now."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{setup.name}, {options.model.name}, {options.kv_cache_dtype}, {options.dtype}.json"
    if kept.exists():
        rows = [Row(**row) for row in json.loads(kept.read_text(encoding="utf-8"))]
        if not failed(rows):
            return rows
    try:
        rows = serve(setup, options, folder)
    except (ServerError, Wrong) as error:
        say("\n".join([*getattr(error, "log_tail", ()), f"  FAILED  {setup.name}: {error}"]))
        rows = [Row(setup.name, "-", "start and stop", str(error), False, 0)]
    kept.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")
    return rows


def serve(setup: Setup, options: argparse.Namespace, folder: Path) -> list[Row]:
    adapter = trained(options.model, folder, say) if setup.lora else None
    cache = ("--kv-cache-dtype", options.kv_cache_dtype, "--dtype", options.dtype)
    log = folder / f"{setup.name}.log"
    rows = []
    with patch.dict(os.environ, setup.environment), setup.server(options.model, cache, adapter, log) as server:
        say(f"{setup.name}: {server.shown}")
        server.wait_until_healthy(START_SECONDS)
        endpoint = Endpoint(server.url, MODEL, options.model, folder)
        capacity = parse_capacity(server.read_log())
        name = f"{setup.name}, {capacity.format if capacity else options.kv_cache_dtype}"
        for case in setup.cases:
            rows.append(row := run_case(name, case, endpoint))
            verdict = "passed" if row.passed else "FAILED"
            say(f"  {verdict}  {row.client}: {row.what} ({row.seconds:.0f} s): {row.found}")
        if status := server.stop():
            raise ServerError(
                f"the server exited with status {status}", log.read_text(encoding="utf-8").splitlines()[-20:]
            )
    return rows


def say(line: str) -> None:
    print(line, flush=True)


def page(rows: Sequence[Row], options: argparse.Namespace) -> str:
    command = f"python -m proof clients .weights/{options.model.name} --kv-cache-dtype {options.kv_cache_dtype}"
    if options.dtype != "auto":
        command += f" --dtype {options.dtype}"
    if len(options.only) < len(SETUPS):
        command += f" --only {shlex.quote(','.join(options.only))}"
    lines = ["| server | client | case | what was found |", "| --- | --- | --- | --- |"]
    for row in rows:
        found = row.found if row.passed else f"**failed**: {row.found}"
        found = (found if len(found) <= SHOWN else found[: SHOWN - 3] + "...").replace("|", "\\|").replace("\n", " ")
        lines.append(f"| {row.server} | {row.client} | {row.what} | {found} |")
    return f"""# Clients

What clients do with a server that has a low-bit cache, on a real pretrained model.
{len(rows)} cases, {failed(rows)} failed; {processor_name()}, {date.today().isoformat()}.

    {command}

{chr(10).join(lines)}
"""


if __name__ == "__main__":
    raise SystemExit(main())
