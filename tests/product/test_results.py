"""What is stored beside the scripts: results are of whole runs of the paper's agent, a MAE is of its game and its K of
frames that it was trained on, and the READMEs have the numbers of all. (That a MAE's fast error map is the plain one,
test_errors_and_selection.py shows.)"""

import json
import sys

import numpy as np
import pytest
import torch
import tyro
from conftest import ROOT

import spirl_mae
import spirl_rainbow

sys.path.insert(0, str(ROOT / "tests/results"))
import table  # noqa: E402

FOLDERS = list(dict.fromkeys([table.FOLDER, table.EARLIER, *table.ABLATIONS, *table.MAES.values()]))
FILES = sorted(path for folder in FOLDERS for path in folder.glob("*.json"))
README = " ".join((ROOT / "README.md").read_text().split())


@pytest.mark.parametrize("rows, readme", table.TABLES.items(), ids=[rows.__name__ for rows in table.TABLES])
def test_the_readmes_have_the_tables_of_all_files(rows, readme):
    runs, text = table.read(), (ROOT / readme).read_text()
    assert sum(len(seeds) for folder in FOLDERS for seeds in table.read(folder).values()) == len(FILES)
    assert f"\n\n{rows(runs)}\n\n" in text


def test_the_quick_starts_scores_are_of_stored_runs():
    for method, begin in (("spirl", "seeds 1 to 5 scored {};"), ("de-rainbow", "as many steps, seeds 1 to 5: {} (")):
        paths = sorted((ROOT / "tests/results/10k").glob(f"MsPacman__{method}__*.json"))
        runs = [json.loads(path.read_text()) for path in paths]
        assert [run["seed"] for run in runs] == [1, 2, 3, 4, 5]
        assert all(run["steps"] == 10_000 and len(run["scores"]) == 50 for run in runs)
        assert begin.format(", ".join(f"{run['mean']:.0f}" for run in runs)) in README


def test_a_learning_curve_is_the_mean_of_the_last_ten_games_that_had_ended():
    games = [[1000 * n, float(n)] for n in range(1, 101)]  # game n ends at step 1,000 n and scores n
    run = {"steps": 100_000, "training_scores": games}
    assert table.last_ten_games(run, (3_999, 10_000, 25_000, 100_000)) == [2.0, 5.5, 20.5, 95.5]
    later = {"steps": 148_400, "training_scores": [[end + 48_400, score] for end, score in games]}  # DE-Rainbow-P
    assert table.last_ten_games(later, (3_999, 10_000, 25_000, 100_000)) == [2.0, 5.5, 20.5, 95.5]


def test_the_readmes_sentence_on_data_efficiency_has_the_tables_numbers():
    rows = [row.split(" | ") for row in table.efficiency(table.read()).splitlines()]
    spirl, de_rainbow = (row for row in rows if row[:2] in (["| MsPacman", "SPIRL"], ["| MsPacman", "DE-Rainbow"]))
    assert f"score {spirl[3]} on average, DE-Rainbow's {de_rainbow[3]};" in README
    assert f"at 100,000 steps {spirl[6].strip(' |')} and {de_rainbow[6].strip(' |')}." in README


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_result_is_of_the_papers_agent(path):
    results = json.loads(path.read_text())
    (game, method, seed), args = path.stem.split("__"), results["args"]
    assert (results["env_id"], results["method"], results["seed"]) == (f"ALE/{game}-v5", method, int(seed))
    defaults = vars(table.SCRIPTS[method].Args())
    assert not args.pop("mae_amp", False)  # a flag that is no more; it was never given
    assert args.keys() <= defaults.keys()
    changed = {name for name, value in args.items() if value != defaults[name]}
    allowed = {"env_id", "seed", "method", "mae_checkpoint", "device", "threads", "run_name", "capture_video"}
    allowed |= {"checkpoint_frequency"}
    by_itself = {"resume"}  # a resumed run is the same one (test_resume.py), but four that left a GPU
    if path.parent in table.ABLATIONS:
        flag = table.ABLATIONS[path.parent][0].strip("`")
        if flag.startswith("--"):  # not a change of the script
            assert flag in results["command"]
            allowed.add(flag.split()[0][2:])
    if method == "de-rainbow-p":  # Table 12
        assert args["learning_starts"] == (5_000 if game == "Frostbite" else 50_000)
        by_itself |= {"total_timesteps", "learning_starts"}
    assert changed <= allowed | by_itself
    if method in ("spirl", "mae-all"):
        weights = f"tests/weights/{game}.pt"
        shipped = torch.load(ROOT / weights, weights_only=True)["args"]
        if path.parent in set(table.MAES.values()) - {table.FOLDER, table.EARLIER}:
            assert results["mae_args"] != shipped and results["mae_args"]["env_id"] == results["env_id"]
        else:
            assert args["mae_checkpoint"] == weights and results["mae_args"] == shipped
    assert (results["steps"], results["updates"]) == (98_400 + args["learning_starts"], 98_400)
    assert len(results["scores"]) == 50 and results["mean"] == pytest.approx(np.mean(results["scores"]))
    assert len(results["commit"]) == 40
    python, script, *flags = results["command"].split()  # as it would have to be typed again
    given = vars(tyro.cli(table.SCRIPTS[method].Args, args=flags)) | {name: args[name] for name in by_itself}
    given = {name: given[name] for name in args}  # which has no flag that is newer
    assert (python, script, given) == ("python", f"{table.SCRIPTS[method].__name__}.py", args)
    assert results["machine"] and results["training_seconds"] > 0


# The paper's mr*; its Table 3 prints the share that is left out, 60, 65, 80 and 70 %.
PAPER_IDEAL_RATIO = {"Frostbite": 0.40, "MsPacman": 0.35, "Seaquest": 0.20, "BattleZone": 0.30}


@pytest.mark.parametrize("game", PAPER_IDEAL_RATIO)
def test_shipped_weights(game, maes, random_play):
    env_id, content = f"ALE/{game}-v5", torch.load(ROOT / f"tests/weights/{game}.pt", weights_only=True)
    known = vars(spirl_mae.Args())  # what was saved may have a flag that is gone
    args = spirl_mae.Args(**{name: value for name, value in content["args"].items() if name in known})
    counted = content["salient_counts"]
    assert args.mae_mask_spread == 0.21 and content["env_id"] == args.env_id == env_id
    assert all(value.dtype == torch.float32 for value in content["model"].values())
    assert counted["lorenz_slope"] == 0.5 and len(counted["counts"]) == 5000
    mae, frames = maes[env_id], args.mae_frames or spirl_mae.PAPER_MAE_FRAMES.get(env_id, 50_000)
    every = frames // 5000
    trained_on = spirl_mae.collect_random_frames(args, 40 * every)[:: 20 * every]  # two of them
    again = spirl_mae.count_salient_patches(mae, trained_on, 0.5)["counts"]  # rounding may move it by one
    assert (counted["counts"][:40:20] - again).abs().max() <= 1
    errors = spirl_mae.ErrorMapCache(mae)(torch.from_numpy(random_play[env_id][:400:200]))
    assert errors.mean() < 0.2  # 1 is a MAE that knows only each patch's mean


def test_the_shipped_agent_is_of_its_game_and_fits():
    """It is of the run tests/results/100k/MsPacman__spirl__1.json."""
    args = spirl_rainbow.Args(env_id="ALE/MsPacman-v5")
    content = spirl_rainbow.load_agent(ROOT / "tests/weights/MsPacman_agent.pt", args)
    run = json.loads((table.FOLDER / "MsPacman__spirl__1.json").read_text())
    assert content["step"] == run["steps"] == 100_000 and content["max_patches"] == run["max_patches"] == 43
    assert content["args"]["run_name"] == run["args"]["run_name"]
    network = spirl_rainbow.RainbowNetwork(spirl_rainbow.SalientPatchTransformer(), 128, 9)
    network.load_state_dict(content["model"])


def test_the_readmes_have_what_was_counted_and_measured():
    def after(size, masks):  # median K (what keeps all 200 frames whole), of each seed
        paths = sorted((ROOT / "tests/results/mask_spread").glob(f"{game}__{masks}__{size}__*__amp.json"))
        ends = [json.loads(path.read_text())[-1] for path in paths]
        return ", ".join(f"{end['K'][1]:.0f} ({100 * end['mr*']:.0f})" for end in ends)

    measured = (ROOT / "tests/benchmarks/README.md").read_text()
    lose_some = []
    for game, paper in PAPER_IDEAL_RATIO.items():
        counts = torch.load(ROOT / f"tests/weights/{game}.pt", weights_only=True)["salient_counts"]["counts"]
        median, ideal = f"{counts.double().median() / 1.44:.0f}", f"{100 * spirl_mae.ideal_max_ratio(counts, 144):.0f}"
        cut = 100 * (counts > int(144 * spirl_rainbow.PAPER_MAX_RATIO[f"ALE/{game}-v5"])).double().mean()
        lose_some.append(cut)
        assert f"| {game} | {median} | {ideal} | {100 * paper:.0f} | {cut:.1f} % |\n" in measured
        sizes = ("5000x10", "5000x50" if game == "Frostbite" else "50000x8")
        fixed, spread = (" | ".join(after(size, masks) for size in sizes) for masks in ("fixed", "spread0.21"))
        shipped = f"| | 54 to 96 % | {spread} | {median} ({ideal}) | |\n"
        assert f"| {game} | 75 % | {fixed} | | {100 * paper:.0f} |\n{shipped}" in measured
    assert f"{min(lose_some):.0f} to {max(lose_some):.0f} % of their frames lose salient patches" in README
