"""DE-Rainbow, DE-Rainbow-P and MAE-All: their inputs, their networks and their steps."""

import json
from unittest.mock import Mock

import gymnasium as gym
import pytest
import torch
import torch.nn.functional as F
from conftest import run_here

import spirl_baselines as baselines
import spirl_rainbow as spirl


def test_the_cnn_is_two_convolutions_of_5x5_with_stride_5():
    torch.manual_seed(0)
    cnn = baselines.DataEfficientCNN()
    frames = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    counts = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])  # the second stack is two frames into a life
    x = frames / 255 * counts[..., None, None]
    x = F.conv2d(x, cnn.conv1.weight, cnn.conv1.bias, stride=5, padding=3).relu()
    assert x.shape == (2, 32, 18, 18)
    x = F.conv2d(x, cnn.conv2.weight, cnn.conv2.bias, stride=5, padding=1).relu()
    assert x.shape == (2, 64, 4, 4)
    torch.testing.assert_close(cnn(frames, counts), x.flatten(1), rtol=1e-4, atol=1e-6)


def test_de_rainbow_sees_grey_frames_as_they_are():
    """That they are of the same games as the colours that SPIRL sees, test_drift.py shows."""
    grey, _ = baselines.make_envs(baselines.Args(), 1).reset(seed=spirl.game_seeds(1, spirl.PLAY, 0))
    pixels, counts = baselines.prepare_pixels("cpu", grey[:, 0])
    assert pixels.shape == (1, 84, 84) and pixels.dtype == torch.uint8 and counts.tolist() == [1]
    assert (pixels.numpy() == grey[:, 0]).all()


def test_mae_all_sees_all_embeddings_in_order(trained_mae, random_play):
    frames = random_play["ALE/Seaquest-v5"][100:103]
    embeddings, counts = baselines.embed_all_patches(trained_mae, frames)
    assert embeddings.dtype == torch.float16 and counts.tolist() == [1] * 3
    latent = trained_mae.encode(trained_mae.patchify(torch.from_numpy(frames)), torch.arange(144).expand(3, -1))
    expected = latent[:, 1:] + trained_mae.pos_embed[:, 1:]  # row 0 of both is [cls]
    torch.testing.assert_close(embeddings.float(), expected, rtol=2e-3, atol=2e-3)


def test_mae_alls_trunk_is_that_of_spirl_with_every_patch_selected():
    torch.manual_seed(0)
    trunk = baselines.PatchTransformer(24, 16, 4).requires_grad_(False)
    torch.manual_seed(0)
    spirls = spirl.SalientPatchTransformer(24, 16, 4).requires_grad_(False)
    for mine, its in zip(trunk.parameters(), spirls.parameters(), strict=True):
        assert torch.equal(mine, its)  # they begin with the same weights
        mine += 0.5 * torch.randn_like(mine)
        its.copy_(mine)
    embeddings, counts = torch.randn(3, 4, 9, 24).half(), torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1], [1, 1, 1, 1]])
    assert torch.equal(trunk(embeddings, counts), spirls(embeddings, 9 * counts))
    state = embeddings[2:], counts[2:]
    _, expected = spirl.attended_patches(spirls, (state[0], 9 * state[1]), torch.arange(9)[None])
    assert baselines.attended_patches(trunk, state) == expected and 1 < len(expected) < 9


@pytest.mark.parametrize("game, random_steps, total", [("Frostbite", 5_000, 103_400), ("Seaquest", 50_000, 148_400)])
@pytest.mark.parametrize("method", ["mae", "spirl", "mae-all", "de-rainbow-p"])
def test_random_play_is_as_long_as_in_tables_6_and_12(tmp_path, monkeypatch, method, game, random_steps, total):
    monkeypatch.setattr(gym, "make_vec", Mock(side_effect=InterruptedError))  # stops it where it would begin to play
    script = {"mae": "spirl_mae", "spirl": "spirl_rainbow"}.get(method, "spirl_baselines")
    flags = ["--method", method] if script == "spirl_baselines" else []
    with pytest.raises(InterruptedError) as stop:
        run_here(tmp_path, monkeypatch, *flags, "--env-id", f"ALE/{game}-v5", script=f"{script}.py")
    collected = [entry.locals["num_frames"] for entry in stop.traceback if entry.name == "collect_random_frames"]
    assert collected == ([] if method == "de-rainbow-p" else [random_steps + 256])
    (path,) = tmp_path.glob(f"runs/{game}__{script}__1__{'[0-9]' * 13}")
    args = json.loads((path / "args.json").read_text())
    if method == "de-rainbow-p":
        assert args["learning_starts"] == random_steps and args["total_timesteps"] == total
        assert args["buffer_size"] == 100_000
