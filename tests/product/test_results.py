"""The tables of README.md and tests/results/README.md are those of tests/results/, and each file there is of a whole
run of the paper's agent, SPIRL's with a MAE of tests/weights/."""

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


@pytest.mark.parametrize("rows, readme", table.TABLES.items(), ids=[rows.__name__ for rows in table.TABLES])
def test_the_readmes_have_the_tables_of_all_files(rows, readme):
    runs, text = table.read(), (ROOT / readme).read_text()
    assert sum(map(len, runs.values())) == len(FILES)
    assert f"\n\n{rows(runs)}\n\n" in text
    for key, seeds in runs.items():  # with a run less of any game and method the table would be another one
        fewer = {other: runs[other] for other in runs if other != key}
        if len(seeds) > 1:
            fewer = runs | {key: seeds[1:]}
        assert f"\n\n{rows(fewer)}\n\n" not in text


def test_the_quick_starts_scores_are_of_stored_runs():
    text = " ".join((ROOT / "README.md").read_text().split())
    for method, begin in (("spirl", "seeds 1 to 5 scored {};"), ("de-rainbow", "as many steps, seeds 1 to 5: {} (")):
        paths = sorted((ROOT / "tests/results/10k").glob(f"MsPacman__{method}__*.json"))
        runs = [json.loads(path.read_text()) for path in paths]
        assert [run["seed"] for run in runs] == [1, 2, 3, 4, 5]
        assert all(run["steps"] == 10_000 and len(run["scores"]) == 50 for run in runs)
        assert begin.format(", ".join(f"{run['mean']:.0f}" for run in runs)) in text


def test_a_learning_curve_is_the_mean_of_the_last_ten_games_that_had_ended():
    games = [[1000 * n, float(n)] for n in range(1, 101)]  # game n ends at step 1,000 n and scores n
    run = {"steps": 100_000, "training_scores": games}
    assert table.last_ten_games(run, (3_999, 10_000, 25_000, 100_000)) == [2.0, 5.5, 20.5, 95.5]
    later = {"steps": 148_400, "training_scores": [[end + 48_400, score] for end, score in games]}  # DE-Rainbow-P
    assert table.last_ten_games(later, (3_999, 10_000, 25_000, 100_000)) == [2.0, 5.5, 20.5, 95.5]


def test_the_readmes_sentence_on_data_efficiency_has_the_tables_numbers():
    rows = [row.split(" | ") for row in table.efficiency(table.read()).splitlines()]
    spirl, de_rainbow = (row for row in rows if row[:2] in (["| MsPacman", "SPIRL"], ["| MsPacman", "DE-Rainbow"]))
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"score {spirl[3]} on average, DE-Rainbow's {de_rainbow[3]};" in text
    assert f"at 100,000 steps {spirl[6].strip(' |')} and {de_rainbow[6].strip(' |')}." in text


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_result_is_of_the_papers_agent(path):
    results = json.loads(path.read_text())
    (game, method, seed), args = path.stem.split("__"), results["args"]
    assert (results["env_id"], results["method"], results["seed"]) == (f"ALE/{game}-v5", method, int(seed))
    assert (args["env_id"], args.get("method", "spirl"), args["seed"]) == (f"ALE/{game}-v5", method, int(seed))
    defaults = vars(table.SCRIPTS[method].Args())
    # A resumed run is allowed: on one machine it is the same run, bit for bit (test_resume.py). Where a run began on
    # another machine, "machine" says so.
    gone = {"mae_amp"}  # a flag that is no more; it was never given
    assert args.keys() - defaults.keys() <= gone and not any(args.get(name) for name in gone)
    args = {name: value for name, value in args.items() if name in defaults}
    changed = {name for name, value in args.items() if value != defaults[name]}
    allowed = {"env_id", "seed", "method", "mae_checkpoint", "device", "threads", "run_name", "resume"}
    allowed |= {"capture_video", "checkpoint_frequency"}
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
    given = {name: given[name] for name in args}  # which has no flag that is newer
    assert (python, script, given) == ("python", f"{table.SCRIPTS[method].__name__}.py", args)
    assert results["machine"] and results["training_seconds"] > 0
