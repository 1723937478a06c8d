"""A process that died while it had work is reported in one sentence, with the last line of its log."""

from __future__ import annotations

from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_kvq.eval.engine.engines import Engine, EngineFailed
from vllm_kvq.eval.engine.jobs import Complete, Generate, Score
from vllm_kvq.integration.preview import apart
from vllm_kvq.integration.preview.logs import last_line


@pytest.mark.parametrize(("said", "last"), [("one\n two \n \n\n", "two"), ("\n \n", None), ("", None), (None, None)])
def test_the_last_line_that_says_something(said: str | None, last: str | None, tmp_path: Path) -> None:
    log = tmp_path / "log"
    if said is not None:
        log.write_text(said, encoding="utf-8")
    assert last_line(log) == last


@pytest.mark.parametrize("job", [Score, Generate, Complete])
def test_an_engine_that_died_between_two_jobs(job: type, tmp_path: Path) -> None:
    """Sending finds that out, and the failure is the same as when an answer never comes."""
    engine = Engine.__new__(Engine)
    engine._log = tmp_path / "log"
    engine._log.write_text("killed by the kernel\n\n", encoding="utf-8")
    engine._pipe, other = Pipe()
    other.close()
    ask = {Score: engine.score, Generate: engine.generate, Complete: engine.complete}[job]
    with pytest.raises(EngineFailed, match=r"exited without an error message: killed by the kernel$"):
        ask("a job")


@pytest.mark.parametrize("error", [EOFError, ConnectionResetError])
def test_work_apart_that_died(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def recv() -> None:
        raise error

    pipe, nothing = SimpleNamespace(recv=recv, close=lambda: None), SimpleNamespace(start=int, join=int)
    context = SimpleNamespace(Pipe=lambda duplex: (pipe, pipe), Process=lambda **_: nothing)
    monkeypatch.setattr(apart, "get_context", lambda _: context)
    with pytest.raises(apart.Failed, match=r"exited without an error message; its log is empty$"):
        apart.apart(int)
