"""The page on other libraries' trainers says what the examples do, and no option without its place."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from springtide.integrations.lightning.arguments import ARGUMENTS
from springtide.integrations.transformers.arguments import FIELDS
from springtide.integrations.treatment import Treatment

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "trainers.md").read_text()
EXAMPLES = {
    "trainer": "ElasticTrainer",
    "lightning": "SpringtideStrategy",
    "accelerate": "ElasticAccelerator",
}


@pytest.mark.parametrize(("folder", "name"), EXAMPLES.items(), ids=EXAMPLES)
def test_the_changed_lines_are_those_of_the_example(folder: str, name: str) -> None:
    example = (ROOT / "examples" / folder / "train.py").read_text()
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (block,) = [block for block in blocks if name in block]
    compile(block, "the page", "exec")
    (line,) = [line for line in block.splitlines() if "springtide" in line]
    assert line in example
    called = [node.func for node in ast.walk(ast.parse(example)) if isinstance(node, ast.Call)]
    assert name in [item.id for item in called if isinstance(item, ast.Name)]
    assert "springtide" not in example.replace(line, "").partition('"""\n')[2].replace('springtide"', "")


def test_what_the_page_says_holds_is_not_refused() -> None:
    holds = PAGE.partition("### What holds")[2].partition("### What is refused")[0]
    named = {name for name in re.findall(r"`(\w+)[`=]", holds) if name in FIELDS}
    assert {"max_grad_norm", "report_to", "load_best_model_at_end", "save_strategy"} <= named
    for name in named:
        assert FIELDS[name].treatment is Treatment.SUPPORTED, name


def test_what_holds_with_lightning_is_not_refused() -> None:
    holds = PAGE.partition("## Lightning")[2].partition("Refused by name, when")[0]
    named = {name for name in re.findall(r"`(\w+)[`=]", holds) if name in ARGUMENTS}
    assert {"gradient_clip_val", "precision", "sync_batchnorm"} <= named
    for name in named - {"precision"}:
        assert ARGUMENTS[name].treatment is Treatment.SUPPORTED, name
