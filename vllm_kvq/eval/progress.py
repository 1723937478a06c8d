"""A bar on standard error."""

from __future__ import annotations

from typing import Any


class Bar:
    """On entry, returns a function that takes what is being done and the number of steps done since the last call."""

    def __init__(self, steps: int) -> None:
        import rich.console
        import rich.progress

        columns = (
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("{task.description}"),
        )
        self.bar = rich.progress.Progress(*columns, console=rich.console.Console(stderr=True))
        self.task = self.bar.add_task("", total=steps)

    def __enter__(self) -> Any:
        self.bar.start()
        return lambda text, more: self.bar.update(self.task, description=text, advance=more)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
