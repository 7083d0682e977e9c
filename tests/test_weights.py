"""The auto-encoders of tests/weights/: each is of its game, its K are those of frames that it was trained on, and the
README gives them. (That each one's fast error map is the plain one, test_errors_and_selection.py shows.)"""

import pytest
import torch
from conftest import ROOT

import spirl_mae


@pytest.mark.parametrize("path", sorted((ROOT / "tests/weights").glob("*.pt")), ids=lambda path: path.stem)
def test_shipped_weights(path, maes, random_play):
    content = torch.load(path, weights_only=True)
    args, counted = spirl_mae.Args(**content["args"]), content["salient_counts"]
    assert content["env_id"] == args.env_id == f"ALE/{path.stem}-v5"
    assert all(value.dtype == torch.float32 for value in content["model"].values())
    assert counted["lorenz_slope"] == 0.5 and len(counted["counts"]) == 5000
    mae, every = maes[args.env_id], args.mae_frames // 5000
    trained_on = spirl_mae.collect_random_frames(args, 40 * every)[:: 20 * every]  # two of them
    again = spirl_mae.count_salient_patches(mae, trained_on, 0.5)  # rounding may move it by one
    assert (counted["counts"][:40:20] - again).abs().max() <= 1
    errors = spirl_mae.ErrorMapCache(mae)(torch.from_numpy(random_play[args.env_id][:400:200]))
    assert errors.mean() < 0.2  # 1 is a MAE that knows only each patch's mean


def test_the_readme_gives_their_K():
    medians, ideal = [], []
    for game in spirl_mae.PAPER_IDEAL_RATIO:
        counts = torch.load(ROOT / f"tests/weights/{game[4:-3]}.pt", weights_only=True)["salient_counts"]["counts"]
        medians.append(round(100 * counts.double().median().item() / 144))
        ideal.append(round(100 * spirl_mae.ideal_max_ratio(counts, 144)))
    readme = " ".join((ROOT / "README.md").read_text().split())
    for numbers in (medians, ideal):
        assert "{}, {}, {} and {} %".format(*numbers) in readme
