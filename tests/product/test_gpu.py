"""What only a GPU can show, skipped where there is none; and on a pretended one where the processor waits for it."""

import copy
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SMALL, finished, in_background, run
from test_resume import KILLER

import spirl_rainbow as spirl

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = [*SMALL[:-2], "--device", "cuda"]


@needs_gpu
def test_the_cache_equals_the_plain_map(trained_mae, random_play):
    mae = copy.deepcopy(trained_mae).to("cuda")
    cache = spirl.ErrorMapCache(mae)
    for frames in random_play.values():
        frames = torch.from_numpy(frames[100:500:40].copy()).to("cuda")
        plain = spirl.reconstruction_error_map(mae, frames)
        for _ in range(2):
            assert (cache(frames) - plain).abs().max() < 1e-4


@needs_gpu
@pytest.mark.parametrize("script, flags", [
    ("spirl_rainbow.py", [*CUDA, "--compile"]),
    ("spirl_baselines.py", ["--method", "mae-all", *CUDA]),
    ("spirl_baselines.py", CUDA[CUDA.index("--max-episode-frames") :]),
])
def test_a_run_is_killed_and_goes_on(tmp_path, script, flags):
    flags = [*flags, "--total-timesteps", "200", "--checkpoint-frequency", "20", "--run-name", "run"]
    command = [sys.executable, "-c", KILLER, "an update", "30", ROOT / script, *flags]
    assert subprocess.run([str(part) for part in command], cwd=tmp_path, capture_output=True).returncode == -9
    assert (tmp_path / "runs/run/checkpoint.pt").exists()
    done = run(tmp_path, "--resume", "runs/run", script=script)
    assert done.returncode == 0 and (tmp_path / "runs/run/results.json").exists(), done.stderr[-3000:]


@needs_gpu
def test_the_auto_encoder_alone(tmp_path):
    flags = SMALL[: SMALL.index("--max-episode-frames")]
    path, results = finished(tmp_path, "mae", *flags, "--device", "cuda", script="spirl_mae.py")
    assert results["device"] == "cuda:0" and (path / "figures/mae_reconstruction.png").exists()


@in_background
def waits(folder):
    """The script's lines at which a step waits for the GPU, and how often in each of steps 40 to 59, of SPIRL and of
    DE-Rainbow: {script: {line: {step: times}}}."""
    found = {}
    for script, flags in (("spirl_rainbow.py", CUDA), ("spirl_baselines.py", CUDA[CUDA.index("--max-episode-frames") :])):
        command = [sys.executable, ROOT / "tests/product/pretend_gpu.py", ROOT / script, *flags, "--learning-starts", "25",
                   "--total-timesteps", "60", "--eval-episodes", "1", "--max-episode-frames", "120"]
        command += ["--mae-epochs", "1"] if script == "spirl_rainbow.py" else []
        done = subprocess.run([str(part) for part in command], cwd=folder, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        found[script] = {}
        for line in done.stdout.splitlines():
            if line.startswith("wait\t") and line.split("\t")[1] in map(str, range(40, 59)):
                _, step, times, place = line.split("\t")
                found[script].setdefault(place.split(" ", 1)[1], {})[int(step)] = int(times)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU")
def test_a_step_waits_for_the_gpu_only_for_new_errors_and_for_the_action(waits):
    action = "action = int(online.q_values(*state).argmax())"
    errors = "self.errors.update(zip(new, computed.tolist()))"
    assert waits["spirl_rainbow.py"].keys() == {action, errors} and waits["spirl_baselines.py"].keys() == {action}
    assert all(waits[script][action] == {step: 1 for step in range(40, 59)} for script in waits)
    assert set(waits["spirl_rainbow.py"][errors].values()) <= {1, 2}  # two where a game is cut off
