"""The auto-encoders of tests/weights/: each is of its game, its K are those of frames that it was trained on, and
tests/benchmarks/README.md gives them. (That each one's fast error map is the plain one, test_errors_and_selection.py
shows.)"""

import json

import pytest
import torch
from conftest import ROOT

import spirl_mae
import spirl_rainbow

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
    """It is of the run tests/results/pytorch_start/MsPacman__spirl__1.json."""
    args = spirl_rainbow.Args(env_id="ALE/MsPacman-v5")
    content = spirl_rainbow.load_agent(ROOT / "tests/weights/MsPacman_agent.pt", args)
    run = json.loads((ROOT / "tests/results/pytorch_start/MsPacman__spirl__1.json").read_text())
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
    readme = (ROOT / "README.md").read_text()
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
    assert f"{min(lose_some):.0f} to {max(lose_some):.0f} % of their frames lose salient patches" in readme
