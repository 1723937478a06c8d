"""No decision depends on the time of day, which may be set back: only on clocks that never go back."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIME_OF_DAY = re.compile(r"\btime\.time\(|\btime\.time_ns\(|\bdatetime\.(?:now|utcnow)\(|\.st_[amc]time|getmtime")
STAMPS = {"vllm_kvq/integration/metrics.py": 2, "vllm_kvq/cli/page/made.py": 1}
"""prometheus_client's own stamps: of a gauge that several processes write, the newest counts. One writes ours. And the
date on a page of results."""


def uses(root: Path) -> dict[str, int]:
    files = [path for folder in ("vllm_kvq", "proof", "scripts", "bench") for path in (root / folder).rglob("*.py")]
    found = {str(p.relative_to(root)): len(TIME_OF_DAY.findall(p.read_text(encoding="utf-8"))) for p in files}
    return {name: count for name, count in found.items() if count}


def test_only_stamps_have_the_time_of_day() -> None:
    assert uses(ROOT) == STAMPS


def test_a_timeout_by_the_time_of_day_is_seen(tmp_path: Path) -> None:
    (tmp_path / "proof").mkdir()
    (tmp_path / "proof" / "a.py").write_text("import time\nend = time.time() + 5\nt = time.monotonic()\n")
    assert uses(tmp_path) == {"proof/a.py": 1}
