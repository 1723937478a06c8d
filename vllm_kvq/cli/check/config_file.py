"""The options of `--config`, read as vLLM reads them, and refused where it would lose one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

FLAG = "--config"


class Unreadable(ValueError):
    """A sentence about the file."""


def config_words(name: str) -> list[str]:
    """What the file's lines would be on the command line. Raises Unreadable."""
    words: list[str] = []
    for key, value in _content(name).items():
        flag = f"--{key}"
        if isinstance(value, bool):
            words += [flag] * value
        elif isinstance(value, list):
            words += [flag, *map(str, value)] if value else []
        elif isinstance(value, dict):
            words += [flag, json.dumps(value)]
        else:
            words += [flag] if value is None else [flag, str(value)]
    return words


def _content(name: str) -> dict[Any, Any]:
    try:
        import yaml
    except ImportError:  # vLLM brings it; that vLLM is not installed is reported next
        return {}
    path = Path(name)
    if not path.is_file():
        raise Unreadable(f"{FLAG}: there is no file {name}; write it as in {FLAG} kvq.yaml")
    try:
        text = path.read_text(encoding="utf-8")
        _refuse_twins(yaml.compose(text, yaml.SafeLoader), name)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Unreadable(f"{FLAG}: {name} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise Unreadable(f"{FLAG}: {name} has no options; it takes lines such as kv-cache-dtype: kitty2")
    return content


def _refuse_twins(node: yaml.Node | None, name: str) -> None:
    """Refuses a key that is there twice: YAML's readers take the last one, so two files in one would lose options."""
    import yaml

    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_twins(item, name)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode) and lines.setdefault(key.value, line) != line:
            raise Unreadable(
                f"{FLAG}: {name} has {key.value} on lines {lines[key.value]} and {line}, of which only the last would "
                "be read; put what belongs to both under one of them"
            )
        _refuse_twins(value, name)
