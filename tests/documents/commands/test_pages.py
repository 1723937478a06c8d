"""tests/helpers/documents/pages.py: every command of a document is found, and found whole."""

from __future__ import annotations

from pathlib import Path

import pages
import pytest

PAGE = """# A page

    one --flag        # a comment
    two \\
      --flag

```sh
cat > file <<'END'
x = 1

END
three |
  four '
five'
```

```python
not = "a command"
```

* A list
  goes on

Text, then Python:

    from a import f
    y = f(2)
"""


def test_each_command_is_found_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    assert [(c.line, c.text) for c in pages.commands("page.md")] == [
        (3, "one --flag        # a comment"),
        (4, "two \\\n  --flag"),
        (8, "cat > file <<'END'\nx = 1\n\nEND"),
        (12, "three |\n  four '\nfive'"),
        (26, "from a import f"),
        (27, "y = f(2)"),
    ]
