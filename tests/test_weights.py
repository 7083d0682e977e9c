"""The auto-encoders of tests/weights/: each loads, is of its game, and its fast error map is the plain one."""

import pytest
import torch
from conftest import ROOT

import spirl_mae


@pytest.mark.parametrize("path", sorted((ROOT / "tests/weights").glob("*.pt")), ids=lambda path: path.stem)
def test_shipped_weights(path):
    args, mae = spirl_mae.Args(env_id=f"ALE/{path.stem}-v5", seed=99), spirl_mae.MaskedAutoencoder()
    counted = spirl_mae.load_mae(path, mae, args)
    content = torch.load(path, weights_only=True)
    assert content["env_id"] == content["args"]["env_id"] == args.env_id
    assert all(value.dtype == torch.float32 for value in content["model"].values())
    assert counted["lorenz_slope"] == 0.5 and len(counted["counts"]) == content["args"]["mae_frames"]
    mae.eval().requires_grad_(False)
    trained_on = spirl_mae.collect_random_frames(spirl_mae.Args(**content["args"]), 16)  # the first of them
    assert counted["counts"][:16].tolist() == spirl_mae.count_salient_patches(mae, trained_on, 0.5).tolist()
    frames = torch.from_numpy(spirl_mae.collect_random_frames(args, 300)[::30].copy())
    plain, cached = spirl_mae.reconstruction_error_map(mae, frames), spirl_mae.ErrorMapCache(mae)(frames)
    assert (plain - cached).abs().max() < 1e-5
    counts = [spirl_mae.select_salient_patches(errors, 144)[1].tolist() for errors in (plain, cached)]
    assert counts[0] == counts[1] and plain.mean() < 0.2  # 1 is a MAE that knows only each patch's mean
