from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_first_example_of_the_readme_runs_as_printed(tmp_path: Path) -> None:
    block = re.search(
        r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    assert block is not None, "the README has no python example"
    code = block[1]
    assert code.count("LoRARequest(") >= 2
    assert ".generate(" in code
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    printed = re.search(r"^prints\n\n```\n(.*?)^```$", README.read_text("utf-8"), re.DOTALL | re.M)
    assert printed is not None, "the README says what the example prints"
    assert done.stdout == printed[1]
    assert done.stderr == ""
