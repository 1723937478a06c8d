"""Records what KVarN's authors' reference of their store kernel makes of a tile, from a checkout of their repository
(github.com/huawei-csl/KVarN, commit f9806bd):

    .venv/bin/python tests/formats/peers/vectors/record_kvarn.py CHECKOUT

writes `kvarn.safetensors` next to this file. The reference is in a test that needs their hardware, so it is extracted
from that; a tile of values goes through it as one of keys does, with tokens and channels exchanged.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm_kvq.formats.parts.rotation import hadamard

HERE = Path(__file__).parent
SOURCE = "ascend_kernel/kvarn_store_tile_k/api_test.py"
TOKENS, D, ROUNDS = 128, 64, 16


def reference(checkout: Path) -> Any:
    tree = ast.parse((checkout / SOURCE).read_text())
    found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "_reference"]
    names: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(found, []), SOURCE, "exec"), names)
    return names["_reference"]


def main() -> int:
    store = reference(Path(sys.argv[1]))
    x = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(7))
    x = x * torch.logspace(-0.8, 0.8, D) * torch.logspace(-0.5, 0.5, TOKENS)[:, None] - 0.3
    x[:, 5] += 8
    # below e^-0.3 a standard deviation is not made up for: two of the tiles are that small
    tiles = {"large": x.half(), "small": (0.05 * x).half()}
    found = {}
    for name, tile in tiles.items():
        rotated = tile.float() @ hadamard(D)
        found[name] = tile
        for half, turned in (("keys", rotated.T), ("values", rotated)):
            for bits in (2, 4):
                packed, scale, zero, along = store(turned[None].contiguous(), bits, ROUNDS)
                codes = torch.stack([packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)], -1).flatten(-2)[0]
                stored = {"codes": codes, "scale": scale[0].half(), "zero": zero[0].half(), "along": along[0].half()}
                found |= {f"{name}.{half}.{bits}.{what}": y.contiguous() for what, y in stored.items()}
    save_file(found, HERE / "kvarn.safetensors")
    return 0


if __name__ == "__main__":
    sys.exit(main())
