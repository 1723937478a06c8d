"""examples/batch.py: a job that is killed resumes, and every question is answered once."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from forked_commands import Forked

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "batch.py"
QUESTIONS: list[dict[str, Any]] = [{"id": i, "prompt": f"count from {i % 4} to"} for i in range(7)]
"""The last three are the first three once more: a job that resumes must give the answers of the one that was killed."""
LINES = "".join(json.dumps(question) + "\n" for question in QUESTIONS)


def answer_in(folder: Path, arguments: list[str]) -> None:
    os.chdir(folder)
    sys.argv = [str(SCRIPT), *arguments]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def job(model: Path, folder: Path) -> Forked:
    (folder / "questions.jsonl").write_text(LINES)
    arguments = ["questions.jsonl", "answers.jsonl"]
    arguments += ["--model", str(model), "--kv-cache-dtype", "kitty2", "--enforce-eager", "--max-model-len", "256"]
    arguments += ["--kv-cache-memory-bytes", "64M", "--tokens", "6", "--piece", "2"]
    variables = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    return Forked(folder / "log", variables, answer_in, folder, arguments)


def finished(process: Forked) -> tuple[int, str]:
    return process.wait(300), process.said()


def test_a_killed_job_goes_on(model: Path, tmp_path: Path) -> None:
    process = job(model, tmp_path)
    while "4 of 7 answered" not in process.said():
        assert process.poll() is None, process.said()[-3000:]
        time.sleep(0.02)
    process.kill()
    process.wait()
    answers = tmp_path / "answers.jsonl"
    first = answers.read_text().splitlines(keepends=True)[:4]
    answers.write_text("".join(first) + first[0][:20])
    code, said = finished(job(model, tmp_path))
    assert code == 0, said[-3000:]
    assert "7 of 7 answered" in said
    assert "4 of 7 answered" not in said
    assert answers.read_text().startswith("".join(first))
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [{"id": row["id"], "prompt": row["prompt"]} for row in rows] == QUESTIONS
    assert all(row["tokens"] == 6 and row["answer"] for row in rows)
    assert [row["answer"] for row in rows[4:]] == [row["answer"] for row in rows[:3]]
    assert "has all 7 answers" in finished(job(model, tmp_path))[1]


@pytest.mark.parametrize(
    ("lines", "answer", "said"),
    [
        (LINES + "[1]\n", None, 'questions.jsonl, line 8: not an object with either "prompt" or "messages"'),
        (LINES + "{\n", None, "questions.jsonl, line 8: "),
        (
            LINES + '{"prompt": "2 + 2", "answer": 4}\n',
            None,
            "line 8: the job writes 'answer'; give yours another name",
        ),
        (
            LINES + '{"prompt": "2 + 2", "tokens": 4}\n',
            None,
            "line 8: the job writes 'tokens'; give yours another name",
        ),
        (LINES, {"id": 0, "prompt": "another", "answer": ""}, "line 1 answers another question"),
    ],
)
def test_refusals(
    tmp_path: Path, lines: str, answer: dict[str, Any] | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a model is looked for, and without a change to the answers."""
    (tmp_path / "questions.jsonl").write_text(lines)
    answers = tmp_path / "answers.jsonl"
    if answer is not None:
        answers.write_text(json.dumps(answer) + "\n{")
    before = answers.read_text() if answers.exists() else None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["batch.py", "questions.jsonl", "answers.jsonl", "--model", "missing"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert said in str(stop.value.code)
    assert before is None or answers.read_text() == before


@pytest.mark.parametrize("option", ["--piece", "--tokens"])
@pytest.mark.parametrize("value", ["0", "-1"])
def test_there_is_at_least_one(
    tmp_path: Path, option: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Questions in a piece, and tokens; this is checked before the questions are looked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["batch.py", "questions.jsonl", "answers.jsonl", option, value])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stop.value.code == 2
    assert f"argument {option}: {value} is below 1" in capsys.readouterr().err


def test_a_line_ends_only_where_json_lines_end(tmp_path: Path) -> None:
    """U+2028 and its like end a line for Python's `splitlines`, but in JSON they may stand within a string."""
    question = {"prompt": "one\u2028two\x85three"}
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(question, ensure_ascii=False) + "\n", encoding="utf-8")
    assert runpy.run_path(str(SCRIPT))["questions"](path) == [question]


@pytest.mark.wide
def test_vllms_own_batches(model: Path, tmp_path: Path) -> None:
    """`vllm run-batch`, with OpenAI's files."""
    body = {"model": str(model), "messages": [{"role": "user", "content": "count"}], "max_tokens": 4}
    body["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    lines = [{"custom_id": x, "method": "POST", "url": "/v1/chat/completions", "body": body} for x in "ab"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [str(Path(sys.executable).with_name("vllm")), "run-batch", "-i", "in.jsonl", "-o", "out.jsonl"]
    command += ["--model", str(model), "--kv-cache-dtype", "kitty2", "--enforce-eager", "--max-model-len", "256"]
    command += ["--kv-cache-memory-bytes", "64M", "--trust-request-chat-template"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(x["custom_id"], x["response"]["status_code"]) for x in answers] == [("a", 200), ("b", 200)]
    assert "kvq: format=kitty2" in done.stdout + done.stderr
