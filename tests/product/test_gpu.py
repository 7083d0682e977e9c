"""What only a GPU can show, skipped where there is none; and on a pretended one where the processor waits for it."""

import copy
import json
import re

import pytest
import torch
from conftest import PLAY, PRETRAINING, ROOT, SIZES, SMALL, in_background, run
from test_resume import killed

import spirl_mae
import spirl_rainbow as spirl

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
GPU = ["--device", "cuda"]  # after the flags of conftest.py: the last of two counts


@needs_gpu
def test_the_cache_equals_the_plain_map(trained_mae, random_play):
    mae = copy.deepcopy(trained_mae).to("cuda")
    cache = spirl.ErrorMapCache(mae)
    for frames in random_play.values():
        frames = torch.from_numpy(frames[100:500:40].copy()).to("cuda")
        plain = spirl_mae.reconstruction_error_map(mae, frames).cpu()  # the cache's errors are on the CPU
        for _ in range(2):
            assert (cache(frames) - plain).abs().max() < 1e-4


@needs_gpu
@pytest.mark.parametrize(
    "script, flags",
    [
        ("spirl_rainbow.py", [*SMALL, "--compile"]),
        ("spirl_baselines.py", [*SMALL, "--method", "mae-all"]),
        ("spirl_baselines.py", PLAY),
        ("spirl_mae.py", [*SIZES, *PRETRAINING, "--mae-epochs", "20"]),
    ],
)
def test_a_run_is_killed_and_goes_on(tmp_path, script, flags):
    steps = [] if script == "spirl_mae.py" else ["--total-timesteps", "200", "--checkpoint-frequency", "20"]
    path = killed(tmp_path, [script, *flags, *GPU, *steps], ("an update", 30))
    assert (path / ("mae" if script == "spirl_mae.py" else ".") / "checkpoint.pt").exists()
    done = run(tmp_path, "--resume", path, script=script)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((path / "results.json").read_text())["device"] == "cuda:0"


@in_background
def waits(folder):
    """The lines at which a step waits for the GPU, and how often in each of steps 40 to 58: {method: {line: {step:
    times}}}; nothing of a method without any."""
    found = {}
    short = "--learning-starts 25 --total-timesteps 60 --eval-episodes 1 --max-episode-frames 120".split()
    runs = {
        "SPIRL": ("spirl_rainbow.py", SMALL + short),
        "DE-Rainbow": ("spirl_baselines.py", PLAY + short),
        "MAE-All": ("spirl_baselines.py", [*SMALL, "--method", "mae-all", *short]),
        "pre-training alone": ("spirl_mae.py", SIZES + PRETRAINING),
    }
    for method, (script, flags) in runs.items():
        done = run(folder, ROOT / script, *flags, *GPU, script="tests/product/pretend_gpu.py")
        assert done.returncode == 0, done.stderr[-3000:]
        for step, times, line in re.findall(r"^wait\t(\d+)\t(\d+)\t(.*)$", done.stdout, re.M):
            if 40 <= int(step) < 59:
                found.setdefault(method, {}).setdefault(line, {})[int(step)] = int(times)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")
def test_a_step_waits_for_the_gpu_only_for_new_errors_and_for_the_action(waits):
    action = "action = int(online.q_values(*state).argmax())"
    errors = "self.errors.update(zip(new, computed.tolist()))"
    assert {method: waits[method].keys() for method in waits} == {
        "SPIRL": {action, errors},
        "DE-Rainbow": {action},
        "MAE-All": {action},
    }
    assert all(waits[method][action] == {step: 1 for step in range(40, 59)} for method in waits)
    assert set(waits["SPIRL"][errors].values()) <= {1, 2}  # two where a game is cut off
