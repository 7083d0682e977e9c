"""The README's table of scores is the one of tests/results/, and each file there is of a whole run of the paper's."""

import json
import sys

import numpy as np
import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests/results"))
import table  # noqa: E402

import spirl_baselines  # noqa: E402
import spirl_rainbow  # noqa: E402


def test_the_readme_has_the_table():
    assert table.table(table.read()) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "tests/results/100k").glob("*.json")), ids=lambda path: path.stem)
def test_a_result_is_of_the_papers_setting(path):
    results = json.loads(path.read_text())
    defaults = vars((spirl_rainbow if results["method"] == "spirl" else spirl_baselines).Args())
    ours = {name for name, value in results["args"].items() if value != defaults[name]}
    assert ours <= {"env_id", "seed", "threads", "device", "run_name", "method", "mae_checkpoint", "resume",
                    "compile"}, ours
    assert len(results["scores"]) == 50 and results["mean"] == pytest.approx(np.mean(results["scores"]))
    assert len(results["commit"]) == 40 and results["command"].startswith("python spirl_") and results["machine"]
    game, method, seed = path.stem.split("__")
    assert (results["env_id"], results["method"], results["seed"]) == (f"ALE/{game}-v5", method, int(seed))
