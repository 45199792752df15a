"""The page on Hugging Face's Trainer says what the example does, and no option without its place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from springtide.integrations.transformers.arguments import FIELDS, Treatment

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "trainers.md").read_text()
EXAMPLE = (ROOT / "examples" / "trainer" / "train.py").read_text()


def test_the_changed_lines_are_those_of_the_example() -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    compile(block, "the page", "exec")
    (line,) = [line for line in block.splitlines() if "springtide" in line]
    assert line in EXAMPLE
    called = [node.func for node in ast.walk(ast.parse(EXAMPLE)) if isinstance(node, ast.Call)]
    assert "ElasticTrainer" in [name.id for name in called if isinstance(name, ast.Name)]
    assert "springtide" not in EXAMPLE.replace(line, "").partition('"""\n')[2].replace('springtide"', "")


def test_what_the_page_says_holds_is_not_refused() -> None:
    holds = PAGE.partition("## What holds")[2].partition("## What is refused")[0]
    named = {name for name in re.findall(r"`(\w+)[`=]", holds) if name in FIELDS}
    assert {"max_grad_norm", "report_to", "load_best_model_at_end", "save_strategy"} <= named
    for name in named:
        assert FIELDS[name].treatment is Treatment.SUPPORTED, name
