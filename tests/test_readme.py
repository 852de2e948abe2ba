"""Every Python example in the README runs as it stands, in a fresh interpreter's namespace."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = [b for b in re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if "import" in b]


def test_the_readme_has_its_examples():
    assert len(BLOCKS) == 5


@pytest.mark.filterwarnings("ignore:Precision .* is not supported by the model summary")
@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_an_example_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS[number].splitlines()) < 32
    exec(compile(BLOCKS[number], f"README.md example {number}", "exec"), {"__name__": "readme"})
