"""What only a GPU can show; skipped where there is none."""

import copy
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, SMALL, finished, run
from test_resume import KILLER

import spirl_rainbow as spirl

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = [*SMALL[:-2], "--device", "cuda"]


def test_the_cache_equals_the_plain_map(trained_mae, random_play):
    mae = copy.deepcopy(trained_mae).to("cuda")
    cache = spirl.ErrorMapCache(mae)
    for frames in random_play.values():
        frames = torch.from_numpy(frames[100:500:40].copy()).to("cuda")
        plain = spirl.reconstruction_error_map(mae, frames)
        for _ in range(2):
            assert (cache(frames) - plain).abs().max() < 1e-4


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


@pytest.mark.parametrize("amp", [[], ["--mae-amp"]], ids=["float32", "bfloat16"])
def test_the_auto_encoder_alone(tmp_path, amp):
    flags = SMALL[: SMALL.index("--max-episode-frames")]
    path, results = finished(tmp_path, "mae", *flags, *amp, "--device", "cuda", script="spirl_mae.py")
    assert results["device"] == "cuda:0" and (path / "figures/mae_reconstruction.png").exists()
