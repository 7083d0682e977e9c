"""The README's table of scores is the one of tests/results/, and each file there is of a whole run of the paper's agent,
SPIRL's with a MAE of tests/weights/."""

import json
import sys

import numpy as np
import pytest
import torch
import tyro
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests/results"))
import table  # noqa: E402

FILES = sorted(table.FOLDER.glob("*.json"))


def test_the_readme_has_the_table_of_all_files():
    runs = table.read()
    assert sum(map(len, runs.values())) == len(FILES)
    assert f"\n\n{table.markdown(runs)}\n\n" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_is_of_the_papers_agent(path):
    results = json.loads(path.read_text())
    (game, method, seed), args = path.stem.split("__"), results["args"]
    assert (results["env_id"], results["method"], results["seed"]) == (f"ALE/{game}-v5", method, int(seed))
    assert (args["env_id"], args.get("method", "spirl"), args["seed"]) == (f"ALE/{game}-v5", method, int(seed))
    defaults = vars(table.SCRIPTS[method].Args())
    # A resumed run is allowed: on one machine it is the same run, bit for bit (test_resume.py). Where a run began on
    # another machine, "machine" says so.
    changed = {name for name, value in args.items() if value != defaults[name]}
    allowed = {"env_id", "seed", "method", "mae_checkpoint", "device", "threads", "run_name", "resume", "capture_video",
               "checkpoint_frequency"}
    random_steps = 1600
    if method == "de-rainbow-p":  # Table 12
        random_steps = 5_000 if game == "Frostbite" else 50_000
        allowed |= {"total_timesteps", "learning_starts"}
    assert changed <= allowed
    if method in ("spirl", "mae-all"):
        weights = f"tests/weights/{game}.pt"
        assert args["mae_checkpoint"] == weights
        assert results["mae_args"] == torch.load(ROOT / weights, weights_only=True)["args"]
    assert args["learning_starts"] == random_steps
    assert (results["steps"], results["updates"]) == (98_400 + random_steps, 98_400)
    assert len(results["scores"]) == 50 and results["mean"] == pytest.approx(np.mean(results["scores"]))
    assert len(results["commit"]) == 40
    python, script, *flags = results["command"].split()  # as it would have to be typed again
    given = vars(tyro.cli(table.SCRIPTS[method].Args, args=flags)) | {"resume": args["resume"]}
    if method == "de-rainbow-p":
        given |= {name: args[name] for name in ("total_timesteps", "learning_starts")}
    assert (python, script, given) == ("python", f"{table.SCRIPTS[method].__name__}.py", args)
    assert results["machine"] and results["training_seconds"] > 0
