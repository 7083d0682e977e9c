"""DE-Rainbow, DE-Rainbow-P and MAE-All: their inputs, their networks, and whole runs beside SPIRL's."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from conftest import ROOT, SMALL, finished, in_background, run_here, scalars

import spirl_baselines as baselines
import spirl_rainbow as spirl

METHODS = ("de-rainbow", "de-rainbow-p", "mae-all")
PIXELS = SMALL[SMALL.index("--max-episode-frames") :]  # what DE-Rainbow takes of a small run's flags


def oracle_convolution(image, layer, padding):
    """A 5x5 convolution with stride 5, zeros around the image, and ReLU of (C, H, W), one output at a time."""
    weight, bias = layer.weight.detach().double().numpy(), layer.bias.detach().double().numpy()
    image = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    side = (image.shape[1] - 5) // 5 + 1
    out = np.zeros((len(weight), side, side))
    for channel in range(len(weight)):
        for row in range(side):
            for column in range(side):
                window = image[:, 5 * row : 5 * row + 5, 5 * column : 5 * column + 5]
                out[channel, row, column] = max(0.0, (window * weight[channel]).sum() + bias[channel])
    return out


def test_the_cnn_against_loops():
    torch.manual_seed(0)
    cnn = baselines.DataEfficientCNN()
    frames = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    counts = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])  # the second stack is two frames into a life
    with torch.no_grad():
        features = cnn(frames, counts)
    assert features.shape == (2, 1024)  # 64 channels of 4x4
    for stack, count, got in zip(frames.numpy(), counts.numpy(), features):
        image = stack / 255.0 * count[:, None, None]
        first = oracle_convolution(image, cnn.conv1, 3)
        assert first.shape == (32, 18, 18)
        np.testing.assert_allclose(oracle_convolution(first, cnn.conv2, 1).ravel(), got, rtol=1e-4, atol=1e-6)


def test_the_cnn_sees_every_pixel():
    torch.manual_seed(0)
    frames = torch.rand(1, 4, 84, 84, requires_grad=True)
    torch.manual_seed(1)
    cnn = baselines.DataEfficientCNN()
    with torch.no_grad():
        for layer in (cnn.conv1, cnn.conv2):
            layer.bias.fill_(10.0)  # no ReLU is closed
    cnn(frames, torch.ones(1, 4)).sum().backward()
    assert (frames.grad != 0).all()


def test_the_grey_frames_are_of_the_same_games():
    """Pixel by pixel the luminance of the colours that SPIRL sees, at another size."""
    grey = baselines.make_envs(baselines.Args(), 1)
    rgb = spirl.make_envs(spirl.Args(image_size=84, patch_size=7), 1)
    seen = [env.reset(seed=spirl.game_seeds(1, spirl.PLAY, 0))[0] for env in (grey, rgb)]
    assert seen[0].shape == (1, 1, 84, 84) and seen[0].dtype == np.uint8
    apart, before_and_after = [], []  # largest differences, of 255
    for step in range(60):
        luminance = seen[1][0, 0] @ np.array([0.2989, 0.587, 0.114])
        apart.append(np.abs(luminance - seen[0][0, 0]).max())
        seen = [env.step(np.array([step % 18]))[0] for env in (grey, rgb)]
        before_and_after.append(np.abs(luminance - seen[0][0, 0]).max())
    assert np.median(apart) < 1.5 and max(apart) < 15  # rounding; the brighter of two colours is not that of two greys
    assert np.median(before_and_after) > 30  # what a frame too many or too few would do


def test_mae_all_sees_all_embeddings_in_order(trained_mae, random_play):
    frames = random_play["ALE/Seaquest-v5"][100:103]
    embeddings, counts = baselines.embed_all_patches(trained_mae, frames)
    assert embeddings.shape == (3, 144, 64) and embeddings.dtype == torch.float16
    assert counts.tolist() == [144] * 3
    for frame, got in zip(frames, embeddings):
        patches = [torch.from_numpy(frame[8 * row : 8 * row + 8, 8 * column : 8 * column + 8]).flatten().float() / 255
                   for row in range(12) for column in range(12)]
        with torch.no_grad():
            latent = trained_mae.encode(torch.stack(patches)[None], torch.arange(144)[None])[0]
        for place in range(144):  # row 0 of both is [cls]
            expected = latent[1 + place] + trained_mae.pos_embed[0, 1 + place]
            torch.testing.assert_close(got[place].float(), expected, rtol=2e-3, atol=2e-3)


def test_memory_of_a_100k_replay():
    for shape, dtype, limit in (((84, 84), torch.uint8, 0.8e9), ((144, 64), torch.float16, 2e9)):
        replay = baselines.Replay(100_000, shape, dtype, "cpu")
        tensors = [value for value in vars(replay).values() if isinstance(value, torch.Tensor)]
        assert sum(value.numel() * value.element_size() for value in tensors) < limit


@in_background
def each_method(folder):
    """Frostbite in the 100K setting's regime, MsPacman in the 400K setting's, both in small."""
    in_400k = ["--env-id", "ALE/MsPacman-v5", "--train-frequency", "4", "--eval-frequency", "95"]
    flags = {"de-rainbow": [*PIXELS, "--capture-video"], "de-rainbow-p": [*PIXELS, "--mae-frames", "150", *in_400k],
             "mae-all": [*SMALL, "--capture-video"]}
    return {method: finished(folder, method, *flags[method], "--total-timesteps", "160", "--method", method,
                             script="spirl_baselines.py") for method in METHODS}


def test_each_method_from_the_shell(each_method):
    for method, (path, results) in each_method.items():
        steps, updates = (190, 10) if method == "de-rainbow-p" else (160, 40)  # 30 more random ones
        assert results["method"] == method and (results["steps"], results["updates"]) == (steps, updates)
        names = {str(file.relative_to(path)) for file in path.rglob("*") if "." in file.name}
        names = {name for name in names if "tfevents" not in name}
        of_mae = {"mae.pt", "figures/policy_attention.png"} if method == "mae-all" else set()
        of_video = {"videos/policy.gif"} if method != "de-rainbow-p" else set()
        assert names == {"args.json", "agent.pt", "results.json"} | of_video | of_mae
        assert json.loads((path / "args.json").read_text())["total_timesteps"] == steps
        assert len(results["scores"]) == 3 and results["mean"] == pytest.approx(np.mean(results["scores"]))
        assert scalars(path).keys() >= {"charts/episodic_return", "charts/SPS", "eval/mean"}
        agent = torch.load(path / "agent.pt", weights_only=True)
        assert ("trunk.conv1.weight" in agent["model"]) == (method != "mae-all")
    assert each_method["de-rainbow"][1]["protocol"].startswith("mean of the final weights")
    assert each_method["de-rainbow-p"][1]["protocol"].startswith("best median")
    assert [evaluation["step"] for evaluation in each_method["de-rainbow-p"][1]["evaluations"]] == [95, 190]


def test_de_rainbow_p_starts_from_random_steps_alone(tmp_path, monkeypatch):
    """One update, on the first step after the random ones: the replay holds then those, and the step that learns."""
    end = run_here(tmp_path, monkeypatch, *PIXELS, "--method", "de-rainbow-p", "--env-id", "ALE/MsPacman-v5",
                   "--mae-frames", 700, "--total-timesteps", 121, "--buffer-size", 800, "--run-name", "p",
                   script="spirl_baselines.py")
    assert end["run"].updates == 1 and end["args"].total_timesteps == 701
    env = baselines.make_envs(end["args"], 1)
    actions = np.random.default_rng([1, spirl.ACT]).integers(9, size=700)
    observation, _ = env.reset(seed=spirl.game_seeds(1, spirl.PLAY, 0))
    replay, slot, games, random_steps = end["replay"], 0, 0, 0
    while random_steps < 700:
        action = actions[random_steps : random_steps + 1]
        assert torch.equal(replay.frames[slot], torch.from_numpy(observation[0, 0])) and replay.counts[slot] == 1
        assert replay.actions[slot] == action[0]
        observation, reward, terminated, truncated, info = env.step(action)
        assert replay.rewards[slot] == min(reward[0], 1) and replay.ended[slot] == terminated[0]
        slot, random_steps = slot + 1, random_steps + 1
        if truncated[0] and not terminated[0]:
            assert torch.equal(replay.frames[slot], torch.from_numpy(observation[0, 0])) and replay.actions[slot] == -1
            slot += 1
        if truncated[0] or (terminated[0] and info["lives"][0] == 0):
            games += 1
            observation, _ = env.reset(seed=spirl.game_seeds(1, spirl.PLAY, games))
    assert games >= 2
    assert torch.equal(replay.frames[slot], torch.from_numpy(observation[0, 0])) and replay.actions[slot] >= 0
    assert replay.slot == slot + 1 and replay.actions[slot + 1] == -1  # the step that learned, and what it led to


@pytest.mark.parametrize("game, random_steps, total", [("Frostbite", 5_000, 103_400), ("Seaquest", 50_000, 148_400)])
def test_de_rainbow_p_has_the_steps_of_table_12(tmp_path, game, random_steps, total):
    command = [sys.executable, ROOT / "spirl_baselines.py", "--method", "de-rainbow-p", "--env-id", f"ALE/{game}-v5",
               "--run-name", "p", "--threads", "1"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        arguments = tmp_path / "runs/p/args.json"
        while process.poll() is None and not arguments.exists():
            time.sleep(0.1)
        process.send_signal(signal.SIGKILL)
    args = json.loads(arguments.read_text())
    assert args["learning_starts"] == random_steps and args["total_timesteps"] == total
    assert args["buffer_size"] == 100_000
