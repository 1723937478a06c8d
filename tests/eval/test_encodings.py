"""What models write is UTF-8 in every file, whatever the locale's encoding is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WORD = "na\u00efve \u2192 \u4e2d\u6587"
WRITES = f"""
import locale, sys
from pathlib import Path
from vllm_kvq.bench import figures
from vllm_kvq.cli.eval import humaneval
from vllm_kvq.eval.results import report
from vllm_kvq.eval.results.result import TEACHER_FORCED, Results, Row

assert locale.getencoding().lower() != "utf-8"
folder, word = Path(sys.argv[1]), {WORD!a}
answer = dict.fromkeys(humaneval.COLUMNS, "") | {{"text": word}}
answer.pop("format")
humaneval.write(folder, {{"formats": [{{"label": "kitty2", "answers": [answer]}}]}})
figures.write_csv(folder / "bench.csv", [{{"kernel": word}}])
row = Row("model", "kitty2", {{}}, "text", TEACHER_FORCED, 1024, 4, None, problem=word)
report.write_csv(folder / "results.csv", Results((row,)))
"""


def test_a_locale_without_utf_8(tmp_path: Path) -> None:
    env = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", WRITES, str(tmp_path)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("humaneval.csv", "bench.csv", "results.csv"):
        assert WORD in (tmp_path / name).read_text(encoding="utf-8"), name
